"""Learned caches: attention deviation against relative position, and by region ([P], boundary against interior)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from kvnotes_interp.results import Result

TASK = "biography"
RUN = "{task}-learned-deviate"
COMMAND = (
    "kvprobe deviate --task {task} --task-option documents=3 --n 12 --split test "
    "--operators no_recompute,packet@{runs}/packet,sempic@{runs}/sempic,joint@{runs}/joint --out {run}"
)


def draw(result: Result) -> Figure:
    return result.plot("deviation_curve")
