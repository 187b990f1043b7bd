"""What the collect scripts share: kept summaries, cells of tables, and the page they are written to."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvnotes_interp.files import read_json

BEGIN, END = "<!-- table: written by collect.py -->", "<!-- end of table -->"
KEPT = ("summary.json", "manifest.json", "verdict.json")


def load_json(path: Path) -> Any:
    """What the file holds, or None where there is none."""
    return read_json(path) if path.is_file() else None


def cell(value: Mapping[str, Any]) -> str:
    """`0.174 [0.150, 0.199]`: a mean with its interval, where it has one."""
    text = f"{value['mean']:.3f}"
    return text if value["low"] is None else f"{text} [{value['low']:.3f}, {value['high']:.3f}]"


def short(row: Mapping[str, Any] | None) -> str:
    """`0.84 [0.76, 0.91]`: mean and interval; empty where nothing was measured."""
    if row is None or row["mean"] is None:
        return ""
    bounds = "" if row["low"] is None else f" [{row['low']:.2f}, {row['high']:.2f}]"
    return f"{row['mean']:.2f}{bounds}"


def find(rows: Iterable[Mapping[str, Any]], **wanted: Any) -> Mapping[str, Any] | None:
    """The row that agrees with `wanted`."""
    return next((row for row in rows if all(row[key] == value for key, value in wanted.items())), None)


def grid(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A markdown table."""
    return [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(f"| {' | '.join(row)} |" for row in rows)]


def what_ran(folder: Path, name: str | None = None) -> str:
    """`runs/pronoun`, with the weights and the commit that the manifest names."""
    manifest = load_json(folder / "manifest.json") or {}
    model, git = manifest.get("request", {}).get("model", {}), manifest.get("git") or {}
    weights = f"{model.get('name', '?')}, {model.get('kind', '?')}, {manifest.get('request', {}).get('dtype', '?')}"
    commit = (git.get("commit") or "?")[:9] + ("+" if git.get("dirty") else "")
    return f"`{name or folder.name}` ({weights}; {commit})"


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


def filled(text: str, body: str, page: Path) -> str:
    """`text` of `page` with `body` between the markers."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{page} lacks the markers {BEGIN} and {END}.")
    return f"{head}{BEGIN}\n\n{body}\n\n{END}{tail}"


def main(
    arguments: Sequence[str] | None,
    *,
    about: str,
    table: Callable[[Path], str],
    commands: Callable[[], Sequence[str]],
    readme: Path,
    summaries: Path,
    keep: Callable[[Path, Path], Sequence[Path]] = keep,
) -> int:
    """A collect script's command line: print the tables, write or check the page, keep summaries, print commands."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--runs", type=Path, default=summaries, help="where the summaries are")
    parser.add_argument("--readme", type=Path, default=readme, help="the file with the markers")
    parser.add_argument("--write", action="store_true", help="write the tables into the file")
    parser.add_argument("--check", action="store_true", help="exit with 1 when the file does not hold these tables")
    parser.add_argument("--commands", action="store_true", help="print the commands that make the runs")
    parser.add_argument("--keep", type=Path, metavar="RUNS", help="copy the summaries of these run folders first")
    given = parser.parse_args(arguments)
    if given.commands:
        print(*commands(), sep="\n")
        return 0
    if given.keep is not None:
        print(*(f"kept {folder}" for folder in keep(given.keep, given.runs)), sep="\n")
    body = table(given.runs)
    if given.check or given.write:
        text = given.readme.read_text(encoding="utf-8")
        new = filled(text, body, given.readme)
        if given.check:
            return int(new != text)
        given.readme.write_text(new, encoding="utf-8")
    elif given.keep is None:
        print(body)
    return 0
