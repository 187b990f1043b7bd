"""Edges: recovery when the decision token is cut off from the field, from all after it, or from the first positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plotly import graph_objects as go

from kvnotes_interp.plots import _arms, style
from kvnotes_interp.plots.data import about, intervals, remember, rows_of

if TYPE_CHECKING:
    from kvnotes_interp.results import Result

SITES = {"none": "nothing", "field": "the field", "downstream": "all after the field", "sink": "the first four"}
BASES = {"field_only": "field new", "oracle": "all new"}


def draw(result: Result) -> go.Figure:
    """Both caches: field new and notes old, and everything new."""
    rows = rows_of(result, "edge")
    table = intervals(result, rows.assign(site=rows["base"] + ":" + rows["site"]), ["site", "ranking"])
    arms = {f"{b}:{s}": f"{label}: {what}" for b, label in BASES.items() for s, what in SITES.items()}
    fig = style.figure(
        "The decision token cut off from groups of keys",
        about(result, rows, interval="Bars", more="Labels: the cache, and what is cut off."),
        width=620,
        height=420,
        extra_top=22,
    )
    _arms.draw(fig, table, arms, chosen="cut off from it")
    return remember(fig, "edges", result, table)
