"""Compaction: conclusions against facts, as slots go ([S] compacts, [N] asks)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from kvnotes_interp.results import Result

TASK = "gate"
RUN = "{task}-survive"
COMMAND = "kvprobe survive --model organism:trained --task {task},badge --n 32 --out {run}"


def draw(result: Result) -> Figure:
    return result.plot("survival")
