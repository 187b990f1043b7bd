"""Decodability: held-out accuracy of linear probes by layer and place ([N], Linear decodability)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from kvnotes_interp.results import Result

TASK = "pronoun"
RUN = "{task}-linear"
COMMAND = "kvprobe linear --task {task} --out {run}"


def draw(result: Result) -> Figure:
    return result.plot("decodability")
