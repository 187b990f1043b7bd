"""Training the compactors of a study, one folder each."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from experiments.still.settings import Study
from kvnotes_interp import training
from kvnotes_interp.operators.scorer import ScorerSettings, new_scorer
from kvnotes_interp.operators.still import StillSettings, new_still

if TYPE_CHECKING:
    from kvnotes_interp.model import Model


def folder_of(out: Path, name: str, seed: int) -> Path:
    """Where a training run is kept."""
    return out / "trained" / name / str(seed)


def compactor_of(study: Study, out: Path, name: str, seed: int) -> str:
    """Name under which a trained compactor is found: `still@runs/still/organism/trained/still/0/best`."""
    return f"{study.trained[name].method}@{folder_of(out, name, seed) / 'best'}"


def method_of(model: Model, study: Study, name: str, seed: int) -> training.Method:
    """An untrained compactor of these settings, as a method of the loop."""
    one = study.trained[name]
    if one.method == "still":
        still = new_still(model, settings=StillSettings(**one.settings, seed=seed))
        return training.Compacting(model, still, **{"ratios": study.ratios, **one.options})
    scorer = new_scorer(model, settings=ScorerSettings(**one.settings, seed=seed))
    return training.Selecting(model, scorer, **{"ratios": study.ratios, **one.options})


def train(model: Model, study: Study, out: Path, name: str, seed: int, *, progress: bool = True) -> training.Trained:
    """One compactor with one seed; what is finished is only read. All of a seed share their teacher's answers."""
    trained = training.distill(
        method_of(model, study, name, seed),
        model,
        *study.drawn(name, seed),
        settings=study.settings(name, seed),
        out=folder_of(out, name, seed),
        teacher=out / "teacher",
        resume=True,
        progress=progress,
    )
    print(f"{name} {seed}: KL {trained.before['kl']:.3f} -> {trained.best['kl']:.3f}", flush=True)
    return trained
