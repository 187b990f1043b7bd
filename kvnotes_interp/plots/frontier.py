"""The editing frontier: how often the decision is right against how much was run for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd
from plotly import graph_objects as go

from kvnotes_interp.errors import InputError
from kvnotes_interp.plots import style
from kvnotes_interp.plots.data import about, intervals, remember, rows_of

if TYPE_CHECKING:
    from kvnotes_interp.results import Result

TITLES = {
    "correct": "Share of decisions that are right",
    "agreement": "Share with the oracle's first token",
    "recovery": style.RECOVERY,
}
POINTS = {
    "stale": ("stale", style.GREY, "x"),
    "field_only": ("field only", style.RED, "square"),
    "hoist": ("hoist", style.PURPLE, "star"),
    "erratum": ("erratum", style.GREEN, "diamond"),
    "field_erratum": ("field + erratum", style.GREEN, "diamond-open"),
    "cacheblend": ("CacheBlend", style.ORANGE, "triangle-up"),
    "oracle": ("oracle (full prefill)", style.INK, "circle"),
}
LINES = {
    "attention": (style.BLUE, "solid"),
    "causal": (style.SKY, "solid"),
    "kv_change": (style.ORANGE, "dash"),
    "hidden_change": (style.PURPLE, "dash"),
    "profiled": (style.GREEN, "dash"),
    "punctuation": (style.RED, "dot"),
    "last": (style.INK, "dot"),
    "random": (style.GREY, "dot"),
}


def draw(result: Result, *, readout: str = "correct") -> go.Figure:
    """Points for edits, lines for field + top-K under each ranking; error bars are 95 % intervals over contents.

    Args:
        readout: "correct", "agreement" or "recovery".
    """
    if readout not in TITLES:
        raise InputError(f"readout={readout!r}: choose from {', '.join(TITLES)}.")
    rows = rows_of(result, "edit", readout=readout)
    table = intervals(result, rows, ["arm", "site", "ranking", "option", "k"])
    cost = intervals(result, rows_of(result, "edit", readout="share"), ["arm"])[["arm", "mean"]]
    table = table.merge(cost.rename(columns={"mean": "share"}), on="arm")
    table["share"] *= 100
    fig = style.figure(
        "What an edit of the cache costs, and whether the decision is right",
        about(result, rows, interval="Bars"),
        width=760,
        height=500,
    )
    for ranking, (colour, dash) in LINES.items():
        own = table[(table["site"] == "recompute_top_k") & (table["ranking"] == ranking)].sort_values("share")
        if len(own):
            _add(fig, own, f"field + top-K, {ranking}", colour, "circle", dash)
    for site, (name, colour, symbol) in POINTS.items():
        own = table[(table["site"] == site) & ((table["option"] == "") | (site == "cacheblend"))]
        if len(own):
            _add(fig, own.sort_values("share"), name, colour, symbol, "dashdot" if len(own) > 1 else None)
    fig.update_xaxes(title_text="Layer-tokens run, % of a full prefill")
    fig.update_yaxes(title_text=TITLES[readout])
    fig.update_layout(legend={"x": 1.02, "y": 1, "xanchor": "left"}, margin_r=210)
    return remember(fig, "frontier", result, table)


def _add(fig: go.Figure, own: pd.DataFrame, name: str, colour: str, symbol: str, dash: str | None) -> None:
    fig.add_trace(
        go.Scatter(
            x=own["share"],
            y=own["mean"],
            name=name,
            mode="markers" if dash is None else "lines+markers",
            line={"color": colour, "width": 1.6, "dash": dash or "solid"},
            marker={"color": colour, "symbol": symbol, "size": 10 if dash is None else 6},
            error_y={
                "type": "data",
                "symmetric": False,
                "array": (own["high"] - own["mean"]).fillna(0),
                "arrayminus": (own["mean"] - own["low"]).fillna(0),
                "thickness": 1,
                "width": 3,
                "color": style.faded(colour, 0.6) if colour.startswith("#") else colour,
            },
            text=own["arm"],
            customdata=own[["low", "high", "n", "n_effective"]].to_numpy(dtype=float),
            hovertemplate=(
                "%{text}<br>%{y:.3f} (%{customdata[0]:.3f} to %{customdata[1]:.3f})<br>%{x:.1f} % of a full prefill"
                "<br>n = %{customdata[2]} pairs, %{customdata[3]} contents<extra></extra>"
            ),
        )
    )
