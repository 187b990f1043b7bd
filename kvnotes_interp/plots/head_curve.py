"""The cumulative curve: recovery when the top k heads are patched together, against random heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from plotly import graph_objects as go

from kvnotes_interp.errors import InputError
from kvnotes_interp.plots import style
from kvnotes_interp.plots.data import about, intervals, remember, rows_of

if TYPE_CHECKING:
    from kvnotes_interp.results import Result

RANKINGS = {
    "same_pair": ("same pair (upper bound)", style.GREY, "dash", "diamond"),
    "other_half": ("ranked on the other half", style.BLUE, "solid", "circle"),
    "random": ("random heads, same k", style.INK, "dot", "x-thin-open"),
}
PANELS = {
    ("read_curve", "patched"): "Read heads: at the decision",
    ("write_curve", "frozen"): "Write heads: at the aggregators, rest frozen",
    ("write_curve", "recomputed"): "Write heads: rest recomputed",
}


def draw(result: Result, *, write: str = "frozen") -> go.Figure:
    """One panel for read heads and one for write heads, as far as they were measured.

    Args:
        write: "frozen" or "recomputed", how the rest of the prompt follows a write head.
    """
    if write not in ("frozen", "recomputed"):
        raise InputError(f'write={write!r}: choose "frozen" or "recomputed".')
    tables, shown = [], pd.DataFrame()
    for view, site in (("read_curve", "patched"), ("write_curve", write)):
        try:
            rows = rows_of(result, view, part=None)
        except InputError:
            continue
        shown = rows = rows[(rows["site"] == site) & rows["ranking"].isin(RANKINGS)]
        table = intervals(result, rows, ["ranking", "k"])
        tables.append((PANELS[view, site], table.assign(panel=view, k=table["k"].astype(int))))
    if not tables:
        raise InputError("this result holds no cumulative curve of heads.")
    wide = len(tables) > 1
    fig = style.figure(
        "Recovery when the top k heads are patched together",
        about(result, shown),
        width=880 if wide else style.COLUMN,
        height=430,
        margin={"b": 104},
        extra_top=24,
    )
    ends = pd.concat([t[["mean", "low", "high"]] for _, t in tables]).to_numpy(float)
    span = [min(-0.12, float(np.nanmin(ends)) - 0.05), max(1.08, float(np.nanmax(ends)) + 0.05)]
    for index, (title, table) in enumerate(tables):
        _panel(fig, index, len(tables), title, table, span)
    fig.update_yaxes(title_text=style.RECOVERY, selector={"anchor": "x"})
    fig.update_layout(legend={"orientation": "h", "x": 0, "xanchor": "left", "y": -0.2, "yanchor": "top"})
    return remember(fig, "head_curve", result, pd.concat([t for _, t in tables], ignore_index=True))


def _panel(fig: go.Figure, index: int, n: int, title: str, table: pd.DataFrame, span: list[float]) -> None:
    axis = "" if index == 0 else str(index + 1)
    start, stop = index / n + (0.03 if index else 0), (index + 1) / n - (0.03 if index + 1 < n else 0)
    before = len(fig.data)
    for ranking, (name, colour, dash, symbol) in RANKINGS.items():
        own = table[table["ranking"] == ranking].sort_values("k")
        if len(own):
            style.band(fig, own, x="k", name=name, colour=colour, dash=dash, symbol=symbol)
    for trace in list(fig.data)[before:]:
        trace.update(xaxis=f"x{axis}", yaxis=f"y{axis}")
        if index:
            trace.update(showlegend=False)
    ks = sorted(set(table["k"]))
    axes: dict[str, Any] = {
        f"xaxis{axis}": {"domain": [start, stop], "anchor": f"y{axis}", "tickvals": ks, "title": "Heads patched, k"},
        f"yaxis{axis}": {"anchor": f"x{axis}", "range": span},
    }
    fig.update_layout(axes)
    for value in (0, 1):
        line = {"color": style.GREY, "width": 1, "dash": "dot"}
        fig.add_shape(
            type="line",
            x0=0,
            x1=1,
            xref=f"x{axis} domain",
            y0=value,
            y1=value,
            yref=f"y{axis}",
            line=line,
            layer="below",
        )
    fig.add_annotation(
        text=title,
        x=start,
        y=1,
        xref="paper",
        yref="paper",
        xanchor="left",
        yanchor="bottom",
        showarrow=False,
        font={"size": 13},
    )
