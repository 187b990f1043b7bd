"""Compaction: answers against the number of times that the cache was compacted ([S], iterated)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from kvnotes_interp.results import Result

TASK = "biography"
RUN = "{task}-passes"
COMMAND = (
    "kvprobe compact --model organism:trained --task {task} --task-option documents=8 --n 32 --ratios 4,8 "
    "--passes 1,2,4,8 --out {run}"
)


def draw(result: Result) -> Figure:
    return result.plot("compaction_passes")
