"""Learned caches: attention that the first token of a document draws ([P], block-first-token sink)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from figures.learned_deviation import COMMAND, RUN, TASK

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from kvnotes_interp.results import Result

__all__ = ["COMMAND", "RUN", "TASK", "draw"]


def draw(result: Result) -> Figure:
    return result.plot("sink")
