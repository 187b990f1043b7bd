"""Train compactors and measure them: `python -m experiments.still.study --study organism --out runs/still/organism`.

Stages, each in a folder of its own under --out and each taken up again where it was stopped:

    trained     the trained compactors
    quality     answers from compact caches, by task, length, ratio and number of passes
    survival    decisions of pairs from compact caches: facts and conclusions

At the end `summary.json` holds the study's tables; `collect.py` puts them into README.md.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import kvnotes_interp as kv
from experiments.still import report
from experiments.still.settings import Asked, Study, Survival
from experiments.still.train import compactor_of, train
from experiments.studies import changed, check_names, options
from kvnotes_interp import tasks
from kvnotes_interp.errors import InputError, KVNotesError
from kvnotes_interp.training import Settings

if TYPE_CHECKING:
    from kvnotes_interp.model import Model

STAGES = ("trained", "quality", "survival")
PAIR_SEED = 1


def compactors(study: Study, out: Path, asked: Asked | Survival) -> tuple[str, ...]:
    """Names of the trained compactors, one for every seed, and of the others."""
    every = [(name, seed) for name in asked.trained for seed in study.seeds_of(name)]
    return (*(compactor_of(study, out, name, seed) for name, seed in every), *asked.compactors)


def quality(model: Model, study: Study, out: Path, name: str, *, progress: bool = True) -> kv.Result:
    """Answers from the caches of all compactors that `study.quality[name]` names."""
    asked = study.quality[name]
    return kv.probes.compaction_quality(
        model,
        study.tasks[asked.task].test(asked.questions),
        compactors=compactors(study, out, asked),
        ratios=asked.ratios,
        passes=asked.passes,
        max_new_tokens=Settings(**study.training).max_new_tokens,
        timing=0,
        out=out / "quality" / name,
        resume=True,
        progress=progress,
    )


def survival(model: Model, study: Study, out: Path, asked: Survival, *, progress: bool = True) -> None:
    """What is left of the decisions of every family, one run folder each."""
    for family in asked.families:
        kv.probes.compaction_survival(
            model,
            tasks.load(family, n=asked.pairs, seed=PAIR_SEED, split="test"),
            compactors=compactors(study, out, asked),
            ratios=asked.ratios,
            out=out / "survival" / family,
            resume=True,
            progress=progress,
        )


def run(
    study: Study,
    out: Path,
    *,
    stages: Sequence[str] = STAGES,
    only: Sequence[str] | None = None,
    progress: bool = True,
) -> None:
    """All stages; what is finished is only read.

    only: names in `trained` and `quality`; all else, and the survival, is then left out. Raises InputError for another.
    """
    every = {*study.trained, *study.quality}
    try:
        check_names([(name, sorted(every)) for name in only or ()])
    except ValueError as error:
        raise InputError(f"--only: {error}") from None
    model, wanted = kv.load(study.model), set(only or every)
    if "trained" in stages:
        for seed in study.seeds:
            for name in study.trained:
                if name in wanted and seed in study.seeds_of(name):
                    train(model, study, out, name, seed, progress=progress)
    if "quality" in stages:
        for name in study.quality:
            if name in wanted:
                quality(model, study, out, name, progress=progress)
    if "survival" in stages and study.survival is not None and not only:
        survival(model, study, out, study.survival, progress=progress)
    report.write(study, model, out)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options("experiments.still.study", __doc__, STAGES)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these compactors and questions, not all")
    given = parser.parse_args(arguments)
    try:
        study = changed(Study.read(given.study), given)
        run(study, given.out, stages=given.stages, only=given.only, progress=not given.quiet)
    except KVNotesError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
