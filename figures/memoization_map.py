"""The memoization map: which token at which layer carries the answer ([N], Locality)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from kvnotes_interp.results import Result

TASK = "pronoun"
RUN = "{task}"
COMMAND = "kvprobe patch --task {task} --n 32 --out {run}"


def draw(result: Result) -> Figure:
    return result.plot("map")
