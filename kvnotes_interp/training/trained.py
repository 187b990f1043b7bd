"""What a finished training run is: where it is, how it went, and its figure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvnotes_interp.errors import InputError
from kvnotes_interp.files import faults_of
from kvnotes_interp.results import manifest as manifests
from kvnotes_interp.training import log

if TYPE_CHECKING:
    import pandas as pd
    from plotly.graph_objects import Figure
    from rich.console import RenderableType

METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class Trained:
    """A finished run.

    Attributes:
        folder: holds `best` and `last`, metrics.jsonl, manifest.json and figures.
        method, model: their names. steps: optimizer steps done. stopped_early: whether patience ran out.
        best_step: the step with the lowest validation KL. before, best, last: validation at steps 0, best and last.
    """

    folder: Path
    method: str
    model: str
    steps: int
    stopped_early: bool
    best_step: int
    before: dict[str, float]
    best: dict[str, float]
    last: dict[str, float]

    @classmethod
    def load(cls, folder: str | Path) -> Trained:
        """Read a finished run. Raises InputError for a folder that is none."""
        folder = Path(folder)
        manifest = manifests.read(folder)
        if manifest.get("probe") != "train" or manifest.get("status") != "complete":
            raise InputError(
                f"{folder} holds no finished training: probe {manifest.get('probe')!r}, status "
                f"{manifest.get('status')!r}. Go on with it by distill(..., resume=True) or kvprobe train --resume."
            )
        with faults_of(f"the manifest or {METRICS} of {folder}", "Copy the whole folder again."):
            found = manifest["trained"]
            lines = {line["step"]: line for line in log.read(folder / METRICS) if line["kind"] == "validation"}
            at = [_scores(lines[step]) for step in (0, found["best_step"], found["steps"])]
            request = manifest["request"]
            names = str(request["method"]["name"]), str(request["model"]["name"])
            return cls(folder, *names, **found, **dict(zip(_WHEN, at, strict=True)))

    def metrics(self) -> pd.DataFrame:
        """metrics.jsonl as a table; `kind` is "train" or "validation"."""
        return _table(self.folder)

    def plot(self) -> Figure:
        """Loss, validation KL and answers against the step."""
        return _figure(self.folder, self.method, self.model)

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {**asdict(self), "folder": str(self.folder)}

    def __rich__(self) -> RenderableType:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        title = Text(f"{self.method} on {self.model}", style="bold")
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("validation")
        steps = (0, self.best_step, self.steps)
        for when, step in zip(_WHEN, steps, strict=True):
            table.add_column(f"{when} (step {step})", justify="right")
        for name in self.last:
            cells = [f"{part[name]:.4g}" for part in (self.before, self.best, self.last)]
            table.add_row(name.replace("_", " "), *cells)
        return table


def draw(folder: Path, method: str, model: str) -> None:
    """Write the figure of the run in `folder` to `figures/training`: HTML, JSON and the lines as CSV."""
    from kvnotes_interp.plots import export

    export.write(_figure(folder, method, model), folder / "figures" / "training", static=())


def _table(folder: Path) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(log.read(folder / METRICS))


def _figure(folder: Path, method: str, model: str) -> Figure:
    from kvnotes_interp.training import figure

    return figure.draw(_table(folder), title=f"Training: {method}", subtitle=model)


_WHEN = ("before", "best", "last")


def _scores(line: dict[str, Any]) -> dict[str, float]:
    return {name: float(line[name]) for name in ("kl", "token_f1", "exact_match", "first_token")}
