"""A trained Still compactor by the name of its folder, `still@runs/bio`, beside the other compactors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvnotes_interp.compact import Cache
from kvnotes_interp.operators.eviction.compacted import Budget, Compacted, Sliding
from kvnotes_interp.operators.still.compactor import Still
from kvnotes_interp.operators.still.folder import FOLDER, read

if TYPE_CHECKING:
    from kvnotes_interp.model import Model


def still(
    model: Model, cache: Cache, *, budget: Budget, sliding: Sliding = "keep", adapter: str | Path | Still = ""
) -> Compacted:
    """Compact with a trained compactor, or the folder that holds it; nothing is run through the model.

    The folder is the compactor's own or that of its training run. It is read once for as long as the model is there,
    and again when it was written anew.

    Raises InputError as `Still.compact` and `Still.load` do, and without a folder.
    """
    compactor = adapter if isinstance(adapter, Still) else FOLDER.kept(model, adapter, read)
    return compactor(model, cache, budget=budget, sliding=sliding)
