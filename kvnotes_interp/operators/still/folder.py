"""A Still compactor on disk: `still.safetensors`, and `still.json` with what it is and whose."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvnotes_interp.files import faults_of
from kvnotes_interp.operators.eviction.trained_folder import TrainedFolder
from kvnotes_interp.operators.still.compactor import Still, new_still
from kvnotes_interp.operators.still.settings import StillSettings

if TYPE_CHECKING:
    from kvnotes_interp.model import Model

FOLDER = TrainedFolder("still", "Still compactor")
write, read_about = FOLDER.write, FOLDER.read_about


def read(folder: Path, model: Model) -> Still:
    """Read what `write` wrote, for this model alone. Raises InputError, see `Still.load`."""
    about, tensors = FOLDER.read_about(folder), FOLDER.read_tensors(folder)
    Still(None, None, about["model_id"], about["source"]).check(model)  # type: ignore[arg-type]
    with faults_of(str(folder / FOLDER.about), "Train it again."):
        still = new_still(model, settings=StillSettings(**about["settings"]))
    still.set(tensors)
    return still
