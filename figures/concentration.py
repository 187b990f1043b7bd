"""Concentration: recovery against the number of top-ranked positions, with intervals ([N], Suffix concentration)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from kvnotes_interp.results import Result

TASK = "pronoun"
RUN = "{task}-suffix"
COMMAND = "kvprobe suffix --task {task} --n 32 --out {run}"


def draw(result: Result) -> Figure:
    return result.plot("concentration")
