"""Write the tables of README.md from runs: `python -m experiments.still.collect --keep runs/still --write`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments import tables

HERE = Path(__file__).parent
README, SUMMARIES = HERE / "README.md", HERE / "summaries"
COMPACTORS = {
    "still@runs/still-trained/best": "Still, trained on biographies",
    "still@runs/still-identity": "Still, untrained",
    "attention_matching": "Attention Matching",
    "random@4": "random, 4 sinks",
    "snapkv": "SnapKV",
    "streaming": "StreamingLLM",
    "h2o": "H2O",
    "key_norm": "key norm",
}
RATIOS = (2, 4, 8, 16)
# run -> what was asked, and the options of the command that makes it
QUALITY = {
    "biography-3": ("biography, 3 documents", "--task biography --task-option documents=3"),
    "biography-7": ("biography, 7 documents", "--task biography --task-option documents=7"),
    "needle": ("needle", "--task needle"),
}
SURVIVAL = "gate-badge"
ORGANISM = "--model organism:trained --n 32"
ENDS = (("full cache", "full"), ("no document", "no_context"))
SURVIVES = (
    ("gap", "What is left of the score gap between old and new prompt"),
    ("decided", "Share of pairs of which both prompts still get their own answer"),
    ("decoded", "Accuracy of a linear probe on the decision token, held out by content"),
    ("erratum", "Effect of an erratum behind the compacted old cache, in gaps of the full caches"),
    ("field_patched", "Effect of patching the field's kept slots, in gaps of the full caches"),
)
LEARNED = "still@runs/still-identity,still@runs/still-trained/best,attention_matching,random@4"
TRAIN = (
    "kvprobe train still --model organism:trained --docs 3 --samples 640 --validation 64 --steps 240 --lr 1e-3 "
    "--max-new-tokens 4 --validate-every 40 --out runs/still-trained"
)


def commands() -> list[str]:
    """What makes the runs; `runs/still-identity` is `new_still(model).save(...)`, untrained."""
    questions = f"kvprobe compact {ORGANISM} --split test"
    asked = [f"{questions} {task} --out runs/still/{run}" for run, (_, task) in QUALITY.items()]
    asked.append(f"kvprobe survive {ORGANISM} --task gate,badge --out runs/still/{SURVIVAL}")
    again = [f"{line}-still --compactors {LEARNED}" for line in asked if "needle" not in line]
    return [*asked, TRAIN, *again]


def table(runs: Path) -> str:
    """All tables as markdown."""
    lines: list[str] = []
    for run, (title, _) in QUALITY.items():
        summary = _summary(runs, run)
        if not summary:
            continue
        ends = ", ".join(f"{name}: {_mean(summary, f'exact_match_{arm}')}" for name, arm in ENDS)
        lines += [f"### Right answers, {title}", "", f"{ends}.", "", *grid(summary, (("exact_match", ""),)), ""]
    summary = _summary(runs, SURVIVAL)
    if summary:
        for quantity, title in SURVIVES:
            kinds = (("derived_" + quantity, "gate (derived)"), ("verbatim_" + quantity, "badge (verbatim)"))
            lines += [f"### {title}", "", *grid(summary, kinds), ""]
    every = [run for one in (*QUALITY, SURVIVAL) for run in (one, f"{one}-still")]
    used = [run for run in every if (runs / run / "manifest.json").is_file()]
    return "\n".join([*lines, f"Runs: {'; '.join(tables.what_ran(runs / run) for run in used)}."])


def grid(summary: Mapping[str, Any], columns: Sequence[tuple[str, str]]) -> Iterable[str]:
    """One row per compactor, one column per ratio and quantity that the run holds."""
    heads = [f"{name} {ratio}x".strip() for _, name in columns for ratio in RATIOS]
    yield "| | " + " | ".join(heads) + " |"
    yield "|---|" + "---|" * len(heads)
    for name, title in COMPACTORS.items():
        if not any(key.endswith(f"_{name}_{RATIOS[0]}x") for key in summary):
            continue
        cells = [_mean(summary, f"{key}_{name}_{ratio}x") for key, _ in columns for ratio in RATIOS]
        yield f"| {title} | " + " | ".join(cells) + " |"


def _summary(runs: Path, run: str) -> dict[str, Any]:
    """The run's numbers, and those of the learned compactors beside it."""
    found = (tables.load_json(runs / name / "summary.json") or {} for name in (f"{run}-still", run))
    return {key: value for one in found for key, value in one.items()}


def _mean(summary: Mapping[str, Any], key: str) -> str:
    value = summary.get(key)
    return "" if value is None or value["mean"] is None else f"{value['mean']:.2f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    about = (__doc__ or "").partition("\n")[0]
    return tables.main(arguments, about=about, table=table, commands=commands, readme=README, summaries=SUMMARIES)


if __name__ == "__main__":
    sys.exit(main())
