"""Which heads of the decision token have to see the field, and which what was written after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plotly import graph_objects as go

from kvnotes_interp.plots import _head_grid
from kvnotes_interp.plots.data import about, remember, rows_of

if TYPE_CHECKING:
    from kvnotes_interp.results import Result

SITES = {"field": "Off the field", "downstream": "Off all after it"}


def draw(result: Result) -> go.Figure:
    """Layer x head: recovery lost when this head of the decision token alone is cut off, on the new prompt's cache."""
    rows = rows_of(result, "edge_head", part=None)
    rows = rows.assign(value=1 - rows["value"])
    panels = [_head_grid.Panel(t, "Recovery lost", rows[rows["site"] == s]) for s, t in SITES.items()]
    fig, table = _head_grid.draw(
        "Which heads read the field, and which the notes",
        about(result, rows, interval="", more="One head at a time, everything new."),
        [panel for panel in panels if len(panel.rows)],
    )
    return remember(fig, "edge_heads", result, table)
