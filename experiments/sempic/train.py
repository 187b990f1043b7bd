"""Training the Writers of a study, one folder each."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from experiments.sempic.settings import Study
from kvnotes_interp.operators.writer import new_writer
from kvnotes_interp.training import Trained, Writing, distill

if TYPE_CHECKING:
    from kvnotes_interp.model import Model


def folder_of(out: Path, writer: str, kind: str, seed: int) -> Path:
    """Where a training run is kept."""
    return out / "writers" / writer / f"{kind}-{seed}"


def operator_of(out: Path, writer: str, kind: str, seed: int) -> str:
    """Name of the operator that uses a trained Writer."""
    return f"{kind}@{folder_of(out, writer, kind, seed) / 'best'}"


def train(model: Model, study: Study, out: Path, writer: str, seed: int, *, progress: bool = True) -> list[Trained]:
    """Every kind of one Writer with one seed, all from the same questions and the same first teacher."""
    questions = study.drawn(writer, seed)
    done = []
    for kind in study.kinds:
        fresh = new_writer(model, kind, rank=study.rank, wrapper_tokens=study.wrapper_tokens, seed=seed)
        trained = distill(
            Writing(model, fresh),
            model,
            *questions,
            settings=study.settings(kind, seed),
            out=folder_of(out, writer, kind, seed),
            teacher=out / "teacher",
            resume=True,
            progress=progress,
        )
        print(f"{writer} {kind} {seed}: KL {trained.before['kl']:.3f} -> {trained.best['kl']:.3f}", flush=True)
        done.append(trained)
    return done
