"""A scorer on disk: `scorer.safetensors`, and `scorer.json` with what it is and whose."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvnotes_interp.files import faults_of
from kvnotes_interp.operators.eviction.trained_folder import TrainedFolder
from kvnotes_interp.operators.scorer.scorer import Scorer, new_scorer
from kvnotes_interp.operators.scorer.settings import ScorerSettings

if TYPE_CHECKING:
    from kvnotes_interp.model import Model

FOLDER = TrainedFolder("scorer", "scorer")


def read(folder: Path, model: Model) -> Scorer:
    """Read what `Scorer.save` wrote, for this model alone. Raises InputError, see `Scorer.load`."""
    about, tensors = FOLDER.read_about(folder), FOLDER.read_tensors(folder)
    Scorer(None, None, about["model_id"], about["source"]).check(model)  # type: ignore[arg-type]
    with faults_of(str(folder / FOLDER.about), "Train it again."):
        scorer = new_scorer(model, settings=ScorerSettings(**about["settings"]))
    scorer.set(tensors)
    return scorer
