"""What commands print: results on standard output, everything else on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer


def emit(thing: Any, as_json: bool) -> None:
    """A result: as a table, or as JSON and nothing else."""
    if as_json:
        print_json(thing.to_dict())
    else:
        from rich.console import Console

        Console().print(thing)


def print_json(value: Any) -> None:
    """Plain values as JSON."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]], note: str = "") -> None:
    """A table that fits 80 columns; cells may hold rich markup."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, show_edge=False)
    for name in header:
        table.add_column(name, overflow="fold", justify="right" if name in ("params", "layers", "KV/token") else "left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    if note:
        Console().print(note, markup=False, highlight=False, style="dim")


def say(text: str) -> None:
    """A message for the person at the terminal."""
    from rich.console import Console

    # Into a file or a pipe a message goes as one line, so that it can be searched.
    Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=not sys.stderr.isatty())


@contextmanager
def stoppable(out: Path | None) -> Iterator[None]:
    """Ctrl-C says what is kept."""
    try:
        yield
    except KeyboardInterrupt:
        say(f"Stopped. Finished pairs are in {out}: add --resume to go on." if out else "Stopped; nothing was saved.")
        raise typer.Exit(130) from None
