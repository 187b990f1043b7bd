"""Nested windows: patching a growing share of the downstream tokens, from the end or from the field."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plotly import graph_objects as go

from kvnotes_interp.plots import style
from kvnotes_interp.plots.data import about, intervals, remember, rows_of

if TYPE_CHECKING:
    from kvnotes_interp.results import Result

STARTS = {
    "from_end": ("from the end backward", style.BLUE, "solid", "circle"),
    "from_field": ("from the field onward", style.RED, "dash", "square"),
}


def draw(result: Result, *, part: str = "kv") -> go.Figure:
    """Recovery against the share of downstream positions in the window."""
    rows = rows_of(result, "window", part=part)
    split = rows["site"].str.extract(r"^(?P<start>[^:]+):(?P<share>[\d.]+)%$")
    rows = rows.assign(start=split["start"], share=split["share"].astype(float)).dropna(subset=["share"])
    table = intervals(result, rows, ["start", "share"])
    fig = style.figure(
        "Recovery when a window of downstream tokens is patched",
        about(result, rows),
        height=380,
        extra_top=22,
    )
    for start, (name, colour, dash, symbol) in STARTS.items():
        own = table[table["start"] == start]
        if len(own):
            style.band(fig, own, x="share", name=name, colour=colour, dash=dash, symbol=symbol)
    style.reference_lines(fig)
    ticks = [v for v in (1, 2, 5, 10, 20, 50, 100) if v >= table["share"].min()]
    fig.update_xaxes(
        type="log",
        title_text="Share of downstream tokens patched (%, log scale)",
        tickvals=ticks,
        ticktext=[f"{v:g}" for v in ticks],
    )
    fig.update_yaxes(title_text=style.RECOVERY)
    fig.update_layout(legend={"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"})
    return remember(fig, "windows", result, table)
