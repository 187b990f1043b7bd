"""Write the table of README.md from run folders: `python experiments/notes/collect.py --write`.

The paper's numbers stand in `ROWS`; ours are read from `summary.json` and `verdict.json`, never typed. Without an
option the table is printed; --commands prints what makes the runs; --check says whether README.md agrees with the runs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
README = HERE / "README.md"
BEGIN, END = "<!-- table: written by collect.py -->", "<!-- end of table -->"
MISSING = "not run"


@dataclass(frozen=True)
class Row:
    """A quantity, what the paper reports, and where ours is: `run` under the runs folder, `key` in its summary."""

    quantity: str
    paper: str
    run: str
    key: str


ROWS = (
    Row(
        "Field only, derived conclusion",
        "-0.028 (Llama-3.1-8B), 0.005 (Gemma-2-9B), 0.137 (Mistral-7B)",
        "pronoun",
        "field_only",
    ),
    Row("Downstream only, derived conclusion", "not reported", "pronoun", "downstream_only"),
    Row("Field and downstream (a control: must be 1)", "1.0 (all)", "pronoun", "field_and_downstream"),
    Row("Random site of the field's size", "not reported", "pronoun", "random_site"),
    Row("Downstream only, keys alone", "not reported", "pronoun", "downstream_only_k"),
    Row("Downstream only, values alone", "not reported", "pronoun", "downstream_only_v"),
    Row("Field only, near-verbatim lookup", "0.25 to 0.63 (Qwen3, Llama-3.1-8B)", "capital", "field_only"),
    Row("Downstream only, near-verbatim lookup", "not reported", "capital", "downstream_only"),
    Row("Top 8, ranked on other pairs", "not reported", "pronoun-suffix", "top8_other_pairs"),
    Row(
        "Top 8, ranked on the same pair (upper bound)",
        "0.74 to 0.79 (Qwen3, Llama), 0.94 to 0.95 (Gemma-2, Mistral)",
        "pronoun-suffix",
        "top8_same_pair",
    ),
    Row(
        "Random 8",
        "0.005 to 0.035 (Qwen3, Llama), 0.48 to 0.53 (Gemma-2, Mistral)",
        "pronoun-suffix",
        "top8_random",
    ),
    Row("Last 10 % of the positions", "0.51 to 0.87 (eight models, 4B to 32B)", "pronoun-suffix", "from_end_10"),
    Row(
        "Downstream, early third of the layers",
        "-0.003 to 0.009 (mean of single layers)",
        "pronoun-suffix",
        "layers_early",
    ),
    Row(
        "Downstream, middle third of the layers",
        "0.009 to 0.093 (mean of single layers)",
        "pronoun-suffix",
        "layers_mid",
    ),
    Row(
        "Downstream, late third of the layers",
        "0.017 to 0.103 (mean of single layers)",
        "pronoun-suffix",
        "layers_late",
    ),
)
COMMANDS = {
    "pronoun": "kvprobe patch --task pronoun --n 32 --out {runs}/pronoun",
    "capital": "kvprobe patch --task capital --n 32 --out {runs}/capital",
    "pronoun-suffix": "kvprobe suffix --task pronoun --n 32 --out {runs}/pronoun-suffix",
}
CARDS = HERE.parents[1] / "probes"


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
    """Both tables as markdown."""
    lines = ["| quantity | paper (model) | ours (SmolLM2-135M) | run |", "|---|---|---|---|"]
    for row in ROWS:
        summary = load_json(runs / row.run / "summary.json")
        run = what_ran(runs / row.run) if summary else f"`{row.run}`"
        lines.append(f"| {row.quantity} | {row.paper} | {ours(summary, row.key)} | {run} |")
    lines += ["", "| card | expected | measured (95 % interval) | outcome |", "|---|---|---|---|"]
    for card in sorted(CARDS.glob("*.yaml")):
        verdict = load_json(runs / "cards" / card.stem / "verdict.json")
        for entry in (verdict or {}).get("expectations", ()):
            lines.append(f"| {card.stem} | {entry['expected']} | {entry['measured']} | {entry['outcome']} |")
        if verdict is None:
            lines.append(f"| {card.stem} | | {MISSING} | |")
    return "\n".join(lines)


def filled(text: str, body: str) -> str:
    """`text` with `body` between the markers."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{README} lacks the markers {BEGIN} and {END}.")
    return f"{head}{BEGIN}\n\n{body}\n\n{END}{tail}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=Path, default=HERE.parents[1] / "runs", help="where the run folders are")
    parser.add_argument("--readme", type=Path, default=README, help="the file with the markers")
    parser.add_argument("--write", action="store_true", help="write the table into the file")
    parser.add_argument("--check", action="store_true", help="exit with 1 when the file does not hold this table")
    parser.add_argument("--commands", action="store_true", help="print the commands that make the runs")
    given = parser.parse_args(arguments)
    if given.commands:
        runs, cards = os.path.relpath(given.runs), os.path.relpath(CARDS)
        print(*(command.format(runs=runs) for command in COMMANDS.values()), sep="\n")
        for card in sorted(CARDS.glob("*.yaml")):
            print(f"kvprobe run {cards}/{card.name} --out {runs}/cards/{card.stem}")
        return 0
    body = table(given.runs)
    if given.check or given.write:
        text = given.readme.read_text(encoding="utf-8")
        new = filled(text, body)
        if given.check:
            return int(new != text)
        given.readme.write_text(new, encoding="utf-8")
    else:
        print(body)
    return 0


if __name__ == "__main__":
    sys.exit(main())
