"""A trained scorer by the name of its folder, `scorer@runs/bio`, beside the other compactors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvnotes_interp.compact import Cache
from kvnotes_interp.operators.eviction.compacted import Budget, Compacted, Sliding
from kvnotes_interp.operators.scorer.folder import FOLDER, read
from kvnotes_interp.operators.scorer.scorer import Scorer

if TYPE_CHECKING:
    from kvnotes_interp.model import Model


def scorer(
    model: Model, cache: Cache, *, budget: Budget, sliding: Sliding = "keep", adapter: str | Path | Scorer = ""
) -> Compacted:
    """Keep the slots that a trained scorer, or the folder that holds it, scores highest; the model runs nothing.

    The folder is the scorer's own or that of its training run. It is read once for as long as the model is there, and
    again when it was written anew.

    Raises InputError as `Scorer.compact` and `Scorer.load` do, and without a folder.
    """
    found = adapter if isinstance(adapter, Scorer) else FOLDER.kept(model, adapter, read)
    return found(model, cache, budget=budget, sliding=sliding)
