"""A trained Still compactor by the name of its folder, `still@runs/bio/best`, beside the other compactors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from kvnotes_interp.compact import Cache
from kvnotes_interp.downloads import sha256
from kvnotes_interp.errors import InputError
from kvnotes_interp.operators.eviction.compacted import Budget, Compacted, Sliding
from kvnotes_interp.operators.still.compactor import Still
from kvnotes_interp.operators.still.folder import ABOUT, read_about

if TYPE_CHECKING:
    from kvnotes_interp.model import Model

_LOADED: WeakKeyDictionary[Model, dict[Path, tuple[str, Still]]] = WeakKeyDictionary()


def still(
    model: Model, cache: Cache, *, budget: Budget, sliding: Sliding = "keep", adapter: str | Path | Still = ""
) -> Compacted:
    """Compact with a trained compactor, or the folder that holds it; nothing is run through the model.

    A folder is read once for as long as the model is there, and again when it was written anew.

    Raises InputError as `Still.compact` and `Still.load` do, and without a folder.
    """
    compactor = adapter if isinstance(adapter, Still) else _loaded(model, adapter)
    return compactor(model, cache, budget=budget, sliding=sliding)


def _loaded(model: Model, adapter: str | Path) -> Still:
    if not str(adapter):
        raise InputError("still needs the folder of a trained compactor: write still@FOLDER; kvprobe train makes one.")
    folder, kept = Path(adapter).resolve(), _LOADED.setdefault(model, {})
    read_about(folder)
    digest = sha256(folder / ABOUT)
    if folder not in kept or kept[folder][0] != digest:
        kept[folder] = (digest, Still.load(folder, model))
    return kept[folder][1]
