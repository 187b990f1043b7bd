"""Train Writers and measure them: `python -m experiments.sempic.study --study organism --out runs/sempic`.

Stages, each in a folder of its own under --out and each taken up again where it was stopped:

    writers     the trained Writers
    quality     answers, KL to full recompute and agreement: every Writer on every task
    deviation   attention, edge against interior
    regions     which tokens of a learned cache carry what it restores
    notes       local patching and linear probes on the caches of every operator

At the end `summary.json` holds the study's tables; `collect.py` puts them into README.md.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import kvnotes_interp as kv
from experiments.sempic import regions, report
from experiments.sempic.settings import Look, Study
from experiments.sempic.train import operator_of, train
from experiments.studies import changed, options
from kvnotes_interp import operators, tasks
from kvnotes_interp.errors import KVNotesError

if TYPE_CHECKING:
    from kvnotes_interp.model import Model

STAGES = ("writers", "quality", "deviation", "regions", "notes")
PLAIN = ("full_recompute", "no_recompute")


def quality(model: Model, study: Study, out: Path, task: str, seed: int, *, progress: bool = True) -> kv.Result:
    """Answers from the caches of all Writers of a seed, and from those of no and full recompute."""
    writers = [writer for writer in study.writers if seed in study.seeds_of(writer)]
    return kv.probes.splice_quality(
        model,
        study.tasks[task].test(study.questions),
        operators=[operator_of(out, writer, kind, seed) for writer in writers for kind in study.kinds],
        documents=None,
        max_new_tokens=study.training["max_new_tokens"],
        timing=0,
        out=out / "quality" / task / str(seed),
        resume=True,
        progress=progress,
    )


def chosen(study: Study, out: Path, writer: str, names: Sequence[str]) -> dict[str, operators.Operator]:
    """Operators by their kind, the learned ones with the Writer's first seed."""
    seed = study.seeds_of(writer)[0]
    return {
        name: operators.find(name if name in PLAIN else operator_of(out, writer, name, seed))
        for name in names
        if name in PLAIN or name in study.kinds
    }


def deviation(model: Model, study: Study, out: Path, look: Look, *, progress: bool = True) -> kv.Result:
    """How the documents of learned caches are read, against full recompute."""
    arms = chosen(study, out, look.writer, ("no_recompute", "packet", "sempic", "joint"))
    return kv.probes.attention_deviation(
        model,
        study.tasks[look.task].test(look.n, [look.documents]),
        operators=list(arms.items()),
        out=out / "deviation",
        resume=True,
        progress=progress,
    )


def notes(model: Model, study: Study, out: Path, family: str, writer: str, *, progress: bool = True) -> None:
    """Local patching of a pair family on the caches of every operator, and linear probes where they are asked for."""
    pairs = tasks.load(family, n=study.pairs, seed=1, split="test")
    for name in (*PLAIN, *study.kinds):
        operator = name if name in PLAIN else operator_of(out, writer, name, study.seeds_of(writer)[0])
        shared = {"operator": operator, "blocks": "documents", "tail": "suffix", "resume": True, "progress": progress}
        kv.probes.local_patching(
            model, pairs, parts=("kv",), views=("position", "region"), out=out / "notes" / family / name, **shared
        )
        if family in study.probed:
            kv.probes.linear_decodability(
                model,
                pairs,
                features=("keys", "values"),
                classifiers=("mean_difference",),
                directions=(),
                out=out / "probes" / family / name,
                **shared,
            )


def run(study: Study, out: Path, *, stages: Sequence[str] = STAGES, progress: bool = True) -> None:
    """All stages; what is finished is only read."""
    model = kv.load(study.model)
    every = [(writer, seed) for seed in study.seeds for writer in study.writers if seed in study.seeds_of(writer)]
    if "writers" in stages:
        for writer, seed in every:
            train(model, study, out, writer, seed, progress=progress)
    if "quality" in stages:
        for seed in study.seeds:
            for task in study.tasks:
                quality(model, study, out, task, seed, progress=progress)
    if "deviation" in stages and study.deviation is not None:
        deviation(model, study, out, study.deviation, progress=progress)
    if "regions" in stages and study.regions is not None:
        look = study.regions
        arms = chosen(study, out, look.writer, ("full_recompute", "sempic"))
        questions = study.tasks[look.task].test(look.n, [look.documents])
        regions.patched_regions(model, questions, arms, out=out / "regions")
    if "notes" in stages:
        for family, writer in study.notes.items():
            notes(model, study, out, family, writer, progress=progress)
    report.write(study, model, out)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options("experiments.sempic.study", __doc__, STAGES)
    given = parser.parse_args(arguments)
    try:
        study = changed(Study.read(given.study), given)
        run(study, given.out, stages=given.stages, progress=not given.quiet)
    except KVNotesError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
