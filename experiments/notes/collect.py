"""Write the tables of README.md from runs: `python experiments/notes/collect.py --write`.

The papers' numbers stand in `rows.py`; ours are read from `summary.json` and `verdict.json`, never typed. `--commands`
prints what makes the runs, `--keep runs` copies their summaries and manifests to `summaries/` beside this file, from
where the tables are read. Without an option the tables are printed; `--check` says whether README.md agrees.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]
import rows as wanted  # noqa: E402 - beside this file, which is run as a script

from experiments import tables  # noqa: E402
from experiments.tables import BEGIN, END, keep, load_json, what_ran  # noqa: E402, F401

README, SUMMARIES, CARDS = HERE / "README.md", HERE / "summaries", HERE.parents[1] / "probes"
MISSING = "not run"


def ours(summary: dict[str, Any] | None, key: str) -> str:
    """`0.174 [0.150, 0.199], 32 of 32 pairs`."""
    value = (summary or {}).get(key)
    if not summary or value is None or value["mean"] is None:
        return MISSING if summary is None else "not measured"
    return f"{tables.cell(value)}, {value['n']} of {summary['n_tried']} pairs"


def table(runs: Path) -> str:
    """All tables as markdown."""
    lines = ["| quantity | paper (model) | ours (SmolLM2-135M) | run |", "|---|---|---|---|"]
    for row in wanted.ROWS:
        summary = load_json(runs / row.run / "summary.json")
        lines.append(f"| {row.quantity} | {row.paper} | {ours(summary, row.key)} | `{row.run}` |")
    lines += ["", "### One story per family?", "", *families(runs)]
    for title, run, keys in wanted.LISTS:
        summary = load_json(runs / run / "summary.json")
        lines += ["", f"### {title}", "", "| | paper | ours | what it took |", "|---|---|---|---|"]
        for key, paper in keys:
            note = ((summary or {}).get(key) or {}).get("note", "")
            lines.append(f"| {key.replace('_', ' ')} | {paper} | {ours(summary, key)} | {note} |")
    lines += ["", "### Cards", "", "| card | expected | measured (95 % interval) | outcome |", "|---|---|---|---|"]
    for card in sorted(CARDS.glob("*.yaml")):
        verdict = load_json(runs / "cards" / card.stem / "verdict.json")
        for entry in (verdict or {}).get("expectations", ()):
            lines.append(f"| {card.stem} | {entry['expected']} | {entry['measured']} | {entry['outcome']} |")
        if verdict is None:
            lines.append(f"| {card.stem} | | {MISSING} | |")
    used = sorted(path.parent.relative_to(runs) for path in runs.rglob("manifest.json"))
    lines += ["", "Runs: " + "; ".join(what_ran(runs / name) for name in used) + "."] if used else []
    return "\n".join(lines)


def families(runs: Path) -> list[str]:
    """Family x probe, a few quantities of each probe."""
    names = [f"{family} ({kind})" for family, kind in wanted.FAMILIES.items()]
    lines = ["| probe | quantity | " + " | ".join(names) + " |", "|---|---|" + "---|" * len(names)]
    for probe, key, words in wanted.COLUMNS:
        cells = []
        for family in wanted.FAMILIES:
            run = f"{family}-{probe}" if probe != "patch" else family
            cells.append(ours(load_json(runs / run / "summary.json"), key))
        lines.append(f"| {probe} | {words} | " + " | ".join(short(cell) for cell in cells) + " |")
    return lines


def short(cell: str) -> str:
    """Without the count of pairs."""
    return cell.rpartition(", ")[0] if cell.endswith(" pairs") else cell


def commands() -> list[str]:
    """What makes every run of the tables: the rows, then the cards."""
    cards = sorted(CARDS.glob("*.yaml"))
    return wanted.commands() + [
        f"kvprobe run {os.path.relpath(CARDS)}/{card.name} --out runs/cards/{card.stem}" for card in cards
    ]


def main(arguments: list[str] | None = None) -> int:
    about = (__doc__ or "").partition("\n")[0]
    return tables.main(arguments, about=about, table=table, commands=commands, readme=README, summaries=SUMMARIES)


if __name__ == "__main__":
    sys.exit(main())
