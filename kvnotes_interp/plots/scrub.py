"""Causal scrubbing: the note exchanged between prompts of the same and of the opposite conclusion."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plotly import graph_objects as go

from kvnotes_interp.plots import _arms, style
from kvnotes_interp.plots.data import about, intervals, remember, rows_of

if TYPE_CHECKING:
    from kvnotes_interp.results import Result

SITES = {
    "same_note": "note of another prompt,<br>same conclusion",
    "opposite_rest": "everything but the note,<br>opposite conclusion",
    "opposite_note": "note alone,<br>opposite conclusion",
    "opposite_note_other": "note of another prompt,<br>opposite conclusion",
}


def draw(result: Result) -> go.Figure:
    """Recovery towards the opposite conclusion: 0 where nothing moves."""
    rows = rows_of(result, "scrub")
    table = intervals(result, rows, ["site", "ranking"])
    size = int(rows.loc[rows["site"] == "opposite_note", "size"].max())
    fig = style.figure(
        "Notes exchanged between prompts",
        about(result, rows, interval="Bars", more=f"Note: top {size} positions, ranked on the other half."),
        width=620,
        height=360,
        extra_top=22,
    )
    _arms.draw(fig, table, SITES, chosen="the note")
    return remember(fig, "scrub", result, table)
