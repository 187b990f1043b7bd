"""Write the tables of README.md from runs: `python -m experiments.still.collect --keep runs/still --write`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments import tables

HERE = Path(__file__).parent
README, SUMMARIES = HERE / "README.md", HERE / "summaries"
COMPACTORS = ("attention_matching", "random@4", "snapkv", "streaming", "h2o", "key_norm")
RATIOS = (2, 4, 8, 16)
# run -> what was asked, and the options of the command that makes it
QUALITY = {
    "biography-3": ("biography, 3 documents", "--task biography --task-option documents=3"),
    "biography-7": ("biography, 7 documents", "--task biography --task-option documents=7"),
    "needle": ("needle", "--task needle"),
}
SURVIVAL = "gate-badge"
ORGANISM = "--model organism:trained --n 32"


def commands() -> list[str]:
    """What makes the runs."""
    out = [
        f"kvprobe compact {ORGANISM} --split test {task} --out runs/still/{run}" for run, (_, task) in QUALITY.items()
    ]
    return [*out, f"kvprobe survive {ORGANISM} --task gate,badge --out runs/still/{SURVIVAL}"]


def table(runs: Path) -> str:
    """All tables as markdown."""
    lines: list[str] = []
    for run, (title, _) in QUALITY.items():
        summary = tables.load_json(runs / run / "summary.json")
        if summary is None:
            continue
        ends = ", ".join(f"{name}: {_mean(summary, f'exact_match_{arm}')}" for name, arm in ENDS)
        lines += [f"### Right answers, {title}", "", f"{ends}.", "", *grid(summary, (("exact_match", ""),)), ""]
    summary = tables.load_json(runs / SURVIVAL / "summary.json")
    if summary is not None:
        for quantity, title in SURVIVES:
            kinds = (("derived_" + quantity, "gate (derived)"), ("verbatim_" + quantity, "badge (verbatim)"))
            lines += [f"### {title}", "", *grid(summary, kinds), ""]
    used = [run for run in (*QUALITY, SURVIVAL) if (runs / run / "manifest.json").is_file()]
    return "\n".join([*lines, f"Runs: {'; '.join(tables.what_ran(runs / run) for run in used)}."])


ENDS = (("full cache", "full"), ("no document", "no_context"))
SURVIVES = (
    ("gap", "What is left of the score gap between old and new prompt"),
    ("decided", "Share of pairs of which both prompts still get their own answer"),
    ("decoded", "Accuracy of a linear probe on the decision token, held out by content"),
    ("erratum", "Effect of an erratum behind the compacted old cache, in gaps of the full caches"),
    ("field_patched", "Effect of patching the field's kept slots, in gaps of the full caches"),
)


def grid(summary: Mapping[str, Any], columns: Sequence[tuple[str, str]]) -> Iterable[str]:
    """One row per compactor, one column per ratio and quantity that the run holds."""
    heads = [f"{name} {ratio}x".strip() for _, name in columns for ratio in RATIOS]
    yield "| | " + " | ".join(heads) + " |"
    yield "|---|" + "---|" * len(heads)
    for name in COMPACTORS:
        cells = [_mean(summary, f"{key}_{name}_{ratio}x") for key, _ in columns for ratio in RATIOS]
        yield f"| {name.replace('_', ' ')} | " + " | ".join(cells) + " |"


def _mean(summary: Mapping[str, Any], key: str) -> str:
    value = summary.get(key)
    return "" if value is None or value["mean"] is None else f"{value['mean']:.2f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    about = (__doc__ or "").partition("\n")[0]
    return tables.main(arguments, about=about, table=table, commands=commands, readme=README, summaries=SUMMARIES)


if __name__ == "__main__":
    sys.exit(main())
