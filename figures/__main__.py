"""`python -m figures [NAME ...] [--runs DIR] [--task NAME] [--out DIR] [--no-pictures] [--list]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import figures
from kvnotes_interp.errors import KVNotesError


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the named figures, or all. 0: all were drawn; 2: one was not, and standard error says what to run."""
    parser = argparse.ArgumentParser(prog="python -m figures", description="Draw the paper figures from run folders.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="figures to draw; all without a name")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where the run folders are (default: runs)")
    parser.add_argument("--task", help="another task family than the recipe's own")
    parser.add_argument("--out", type=Path, default=figures.OUT, help="where to write (default: figures/out)")
    parser.add_argument("--no-pictures", action="store_true", help="no PNG and PDF")
    parser.add_argument("--list", action="store_true", help="list the figures and the runs they need")
    given = parser.parse_args(arguments)
    failed = False
    try:
        chosen = [figures.recipe(name) for name in given.names] or list(figures.recipes().values())
    except KVNotesError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for recipe in chosen:
        if given.list:
            print(f"{recipe.name}: {recipe.about}\n    {recipe.how(given.runs, given.task)}")
            continue
        try:
            written = figures.make(
                recipe, runs=given.runs, out=given.out, task=given.task, pictures=not given.no_pictures
            )
        except KVNotesError as error:
            failed = True
            print(f"error: {error}", file=sys.stderr)
            continue
        print(*written, sep="\n")
        for name, reason in getattr(written, "skipped", {}).items():
            print(f"{name} was not drawn: {reason}", file=sys.stderr)
    return 2 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
