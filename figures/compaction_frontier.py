"""Compaction: answers against the time to compact ([S], speed and quality)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from kvnotes_interp.results import Result

TASK = "biography"
RUN = "{task}-compact"
COMMAND = "kvprobe compact --model organism:trained --task {task} --n 32 --timing 3 --out {run}"


def draw(result: Result) -> Figure:
    return result.plot("compaction_time")
