"""Frontier: how often a decision is right against what the edit ran for it ([N], Editing)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from kvnotes_interp.results import Result

TASK = "pronoun"
RUN = "{task}-edit"
COMMAND = "kvprobe edit --task {task} --out {run}"


def draw(result: Result) -> Figure:
    return result.plot("frontier")
