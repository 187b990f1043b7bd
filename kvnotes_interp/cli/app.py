"""The application that every command registers with. Commands are listed in the order of their registration."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(
    name="kvprobe",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
)


def _version(wanted: bool) -> None:
    if wanted:
        from kvnotes_interp import __version__

        print(f"kvnotes_interp {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Where does a transformer keep its conclusions: does it read the fact again, or the note it took?"""
