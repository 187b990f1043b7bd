"""Paper figures from run folders: `python -m figures` (or `make figures`).

A recipe is one small file here that defines

    TASK      the task family it is drawn for unless told otherwise
    RUN       its run folder under runs/, with {task} in it
    COMMAND   the command that makes that run, with {task} and {run} in it ({runs} is the folder of all runs)
    draw      Result -> plotly Figure

A recipe over several runs also defines PARTS, name -> what stands for {part} in COMMAND (with {runs} in it, the folder
of all runs). Each part is a run folder of its own inside RUN, and `draw` takes name -> Result.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    draw: Callable[[Any], Figure]
    parts: Mapping[str, str] = field(default_factory=dict)

    def folder(self, runs: Path, task: str | None = None) -> Path:
        """The run folder that this figure is drawn from, or the folder of its parts."""
        return runs / self.run.format(task=task or self.task)

    def how(self, runs: Path, task: str | None = None) -> str:
        """The command that makes that folder; one a line for each part."""
        task, folder = task or self.task, self.folder(runs, task)
        if not self.parts:
            return self.command.format(task=task, run=folder, runs=runs)
        return "\n".join(
            self.command.format(task=task, run=folder / name, runs=runs, part=part.format(runs=runs))
            for name, part in self.parts.items()
        )

    def results(self, runs: Path, task: str | None = None) -> Result | dict[str, Result]:
        """What `draw` takes. Raises InputError when a folder is missing or unfinished."""
        from kvnotes_interp.results import Result

        folder = self.folder(runs, task)
        return {name: Result.load(folder / name) for name in self.parts} if self.parts else Result.load(folder)


def recipes() -> dict[str, Recipe]:
    """All recipes of this package, by the name of their file."""
    out = {}
    for module in pkgutil.iter_modules(__path__):
        if not module.name.startswith("_"):
            found = importlib.import_module(f"{__name__}.{module.name}")
            about = (found.__doc__ or "").strip().partition("\n")[0]
            parts = getattr(found, "PARTS", {})
            out[module.name] = Recipe(module.name, about, found.TASK, found.RUN, found.COMMAND, found.draw, parts)
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

    try:
        figure = chosen.draw(chosen.results(runs, task))
    except InputError as error:
        raise InputError(f"{chosen.name}: {error} To make it: {chosen.how(runs, task)}") from error
    name = chosen.name if task in (None, chosen.task) else f"{chosen.name}-{task}"
    return export.write(figure, out / name, static=("png", "pdf") if pictures else ())
