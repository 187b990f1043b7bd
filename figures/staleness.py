"""Staleness: which conclusion a probe reads at the decision on each cache ([N], Linear decodability)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from kvnotes_interp.results import Result

TASK = "pronoun"
RUN = "{task}-linear"
COMMAND = "kvprobe linear --task {task} --out {run}"


def draw(result: Result) -> Figure:
    return result.plot("staleness")
