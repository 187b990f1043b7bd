"""Notes by operator: recovery by place in the field's document and by region, for caches that operators made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvnotes_interp.plots import notes_by_operator

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from kvnotes_interp.results import Result

TASK = "gate_documents"
RUN = "{task}-notes"
PARTS = {
    "full_recompute": "full_recompute",
    "no_recompute": "no_recompute",
    "packet": "packet@{runs}/packet",
    "sempic": "sempic@{runs}/sempic",
    "joint": "joint@{runs}/joint",
}
COMMAND = (
    "kvprobe patch --model organism:trained --task {task} --split test --views position,region "
    "--operator {part} --blocks documents --tail suffix --out {run}"
)


def draw(results: Mapping[str, Result]) -> Figure:
    return notes_by_operator.draw(results)
