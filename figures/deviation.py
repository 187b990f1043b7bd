"""Deviation: layer x relative position, with the regions of a block ([P], Attention deviation)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from kvnotes_interp.results import Result

TASK = "biography"
RUN = "{task}-deviate"
COMMAND = "kvprobe deviate --task {task} --out {run}"


def draw(result: Result) -> Figure:
    return result.plot("deviation")
