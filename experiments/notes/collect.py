"""Write the tables of README.md from runs: `python experiments/notes/collect.py --write`.

The papers' numbers stand in `rows.py`; ours are read from `summary.json` and `verdict.json`, never typed. `--commands`
prints what makes the runs, `--keep runs` copies their summaries and manifests to `summaries/` beside this file, from
where the tables are read. Without an option the tables are printed; `--check` says whether README.md agrees.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import rows as wanted  # noqa: E402 - beside this file, which is run as a script

README, SUMMARIES, CARDS = HERE / "README.md", HERE / "summaries", HERE.parents[1] / "probes"
BEGIN, END = "<!-- table: written by collect.py -->", "<!-- end of table -->"
MISSING = "not run"
KEPT = ("summary.json", "manifest.json", "verdict.json")


def load_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def ours(summary: dict[str, Any] | None, key: str) -> str:
    """`0.174 [0.150, 0.199], 32 of 32 pairs`."""
    value = (summary or {}).get(key)
    if not summary or value is None or value["mean"] is None:
        return MISSING if summary is None else "not measured"
    text = f"{value['mean']:.3f}"
    if value["low"] is not None:
        text += f" [{value['low']:.3f}, {value['high']:.3f}]"
    return f"{text}, {value['n']} of {summary['n_tried']} pairs"


def what_ran(folder: Path) -> str:
    """`runs/pronoun`, with the weights and the commit that the manifest names."""
    manifest = load_json(folder / "manifest.json") or {}
    model, git = manifest.get("request", {}).get("model", {}), manifest.get("git") or {}
    weights = f"{model.get('name', '?')}, {model.get('kind', '?')}, {manifest.get('request', {}).get('dtype', '?')}"
    commit = (git.get("commit") or "?")[:9] + ("+" if git.get("dirty") else "")
    return f"`{folder.name}` ({weights}; {commit})"


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


def keep(runs: Path, out: Path) -> list[Path]:
    """Copy summaries, manifests and verdicts of finished runs; returns the folders kept."""
    kept = []
    for manifest in sorted(runs.rglob("manifest.json")):
        if (load_json(manifest) or {}).get("status") == "complete":
            kept.append(manifest.parent)
    kept += [verdict.parent for verdict in sorted(runs.rglob("verdict.json"))]
    for folder in kept:
        into = out / folder.relative_to(runs)
        into.mkdir(parents=True, exist_ok=True)
        for name in KEPT:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, into / name)
    return kept


def filled(text: str, body: str) -> str:
    """`text` with `body` between the markers."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{README} lacks the markers {BEGIN} and {END}.")
    return f"{head}{BEGIN}\n\n{body}\n\n{END}{tail}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=Path, default=SUMMARIES, help="where the summaries are")
    parser.add_argument("--readme", type=Path, default=README, help="the file with the markers")
    parser.add_argument("--write", action="store_true", help="write the tables into the file")
    parser.add_argument("--check", action="store_true", help="exit with 1 when the file does not hold these tables")
    parser.add_argument("--commands", action="store_true", help="print the commands that make the runs")
    parser.add_argument("--keep", type=Path, metavar="RUNS", help="copy the summaries of these run folders first")
    given = parser.parse_args(arguments)
    if given.commands:
        for command in wanted.commands():
            print(command)
        for card in sorted(CARDS.glob("*.yaml")):
            print(f"kvprobe run {os.path.relpath(CARDS)}/{card.name} --out runs/cards/{card.stem}")
        return 0
    if given.keep is not None:
        print(*(f"kept {folder}" for folder in keep(given.keep, given.runs)), sep="\n")
    body = table(given.runs)
    if given.check or given.write:
        text = given.readme.read_text(encoding="utf-8")
        new = filled(text, body)
        if given.check:
            return int(new != text)
        given.readme.write_text(new, encoding="utf-8")
    elif given.keep is None:
        print(body)
    return 0


if __name__ == "__main__":
    sys.exit(main())
