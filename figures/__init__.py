"""Paper figures from run folders: `python -m figures` (or `make figures`).

A recipe is one small file here that defines

    TASK      the task family it is drawn for unless told otherwise
    RUN       its run folder under runs/, with {task} in it
    COMMAND   the command that makes that run, with {task} and {run} in it
    draw      Result -> plotly Figure
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvnotes_interp.errors import InputError, nearest

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from kvnotes_interp.results import Result

OUT = Path(__file__).parent / "out"


@dataclass(frozen=True)
class Recipe:
    """One figure of a paper."""

    name: str
    about: str
    task: str
    run: str
    command: str
    draw: Callable[[Result], Figure]

    def folder(self, runs: Path, task: str | None = None) -> Path:
        """The run folder that this figure is drawn from."""
        return runs / self.run.format(task=task or self.task)

    def how(self, runs: Path, task: str | None = None) -> str:
        """The command that makes that folder."""
        return self.command.format(task=task or self.task, run=self.folder(runs, task))


def recipes() -> dict[str, Recipe]:
    """All recipes of this package, by the name of their file."""
    out = {}
    for module in pkgutil.iter_modules(__path__):
        if not module.name.startswith("_"):
            found = importlib.import_module(f"{__name__}.{module.name}")
            about = (found.__doc__ or "").strip().partition("\n")[0]
            out[module.name] = Recipe(module.name, about, found.TASK, found.RUN, found.COMMAND, found.draw)
    return out


def recipe(name: str) -> Recipe:
    """One recipe. Raises InputError that names the nearest one."""
    known = recipes()
    if name not in known:
        raise InputError(f'there is no figure "{name}".{nearest(name, known)} Figures: {", ".join(known)}.')
    return known[name]


def make(chosen: Recipe, *, runs: Path, out: Path = OUT, task: str | None = None, pictures: bool = True) -> list[Path]:
    """Draw one figure and write it to `out` as HTML, JSON and CSV, and as PNG and PDF where a Chromium is found.

    Raises InputError that names the command to run when the run folder is missing, unfinished or lacks the rows.
    """
    from kvnotes_interp.plots import export
    from kvnotes_interp.results import Result

    folder = chosen.folder(runs, task)
    try:
        figure = chosen.draw(Result.load(folder))
    except InputError as error:
        raise InputError(f"{chosen.name}: {error} To make it: {chosen.how(runs, task)}") from error
    name = chosen.name if task in (None, chosen.task) else f"{chosen.name}-{task}"
    return export.write(figure, out / name, static=("png", "pdf") if pictures else ())
