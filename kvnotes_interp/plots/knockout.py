"""Knock-out: recovery when the decision token no longer sees the most attended positions, or whole groups of keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd
from plotly import graph_objects as go

from kvnotes_interp.errors import InputError, nearest
from kvnotes_interp.plots import style
from kvnotes_interp.plots.data import about, intervals, remember, rows_of

if TYPE_CHECKING:
    from kvnotes_interp.results import Result

RANKINGS = {
    "attention": ("most attended", style.BLUE, "solid", "circle"),
    "random": ("random, same number", style.INK, "dot", "x-thin-open"),
}
BANDS = {
    "early": ("early third of the layers", style.SKY, "triangle-down"),
    "mid": ("middle third", style.ORANGE, "square"),
    "late": ("late third", style.RED, "triangle-up"),
}
READOUTS = {
    "recovery": style.RECOVERY,
    "p_new": "P(new answer), of the two",
    "flip": "Share of pairs with the new answer",
}


def draw(result: Result, *, readout: str = "recovery") -> go.Figure:
    """The field-only cache: field new, notes old. Cutting the notes off leaves the field.

    Args:
        readout: "recovery", "p_new" or "flip".
    """
    if readout not in READOUTS:
        raise InputError(f"readout={readout!r}: choose from {', '.join(READOUTS)}.{nearest(readout, READOUTS)}")
    rows = rows_of(result, "knockout", readout=readout)
    table = intervals(result, rows, ["ranking", "band", "share"])
    table["percent"] = 100 * table["share"].astype(float)
    fig = style.figure(
        "The decision token cut off from what it attends to",
        about(result, rows, more="Field new, everything after it old."),
        height=450,
        margin={"b": 122},
    )
    for ranking, (name, colour, dash, symbol) in RANKINGS.items():
        own = table[(table["ranking"] == ranking) & (table["band"] == "all")]
        # No cut and a cut of everything have no random set; the ranked curve's ends are the random one's too.
        ends = table[(table["ranking"] == "attention") & (table["band"] == "all") & table["percent"].isin([0, 100])]
        own = own if ranking == "attention" else pd.concat([own, ends])
        if len(own):
            style.band(fig, own.sort_values("percent"), x="percent", name=name, colour=colour, dash=dash, symbol=symbol)
    for band, (name, colour, symbol) in BANDS.items():
        own = table[(table["ranking"] == "attention") & (table["band"] == band)]
        if len(own):
            _points(fig, own, name, colour, symbol)
    style.reference_lines(fig)
    fig.update_xaxes(title_text="Positions after the field cut off (%)", tickvals=sorted(set(table["percent"])))
    fig.update_yaxes(title_text=READOUTS[readout])
    fig.update_layout(legend={"orientation": "h", "x": 0, "xanchor": "left", "y": -0.2, "yanchor": "top"})
    return remember(fig, "knockout", result, table)


def _points(fig: go.Figure, table: pd.DataFrame, name: str, colour: str, symbol: str) -> None:
    fig.add_trace(
        go.Scatter(
            x=list(table["percent"]),
            y=list(table["mean"]),
            name=name,
            mode="markers",
            marker={"size": 9, "symbol": symbol, "color": colour},
            error_y={
                "type": "data",
                "symmetric": False,
                "array": list((table["high"] - table["mean"]).fillna(0)),
                "arrayminus": list((table["mean"] - table["low"]).fillna(0)),
                "thickness": 1.2,
                "width": 3,
            },
            hovertemplate=f"{name}<br>%{{x:.0f}}% cut: %{{y:.3f}}<extra></extra>",
        )
    )
