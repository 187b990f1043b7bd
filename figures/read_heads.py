"""Read heads: layer x head grid of direct logit attribution ([N], Circuit)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from kvnotes_interp.results import Result

TASK = "pronoun"
RUN = "{task}-ablate"
COMMAND = "kvprobe ablate --task {task} --out {run}"


def draw(result: Result) -> Figure:
    return result.plot("read_heads")
