"""Concentration: how few downstream positions carry the effect, for several rankings, against random ones."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pandas as pd
from plotly import graph_objects as go

from kvnotes_interp.plots import style
from kvnotes_interp.plots.data import about, intervals, remember, rows_of

if TYPE_CHECKING:
    from kvnotes_interp.results import Result

# name, colour, dash, marker; the order is that of the legend.
RANKINGS = {
    "same_pair": ("same pair (upper bound)", style.GREY, "dash", "diamond"),
    "other_pairs": ("ranked on other pairs", style.BLUE, "solid", "circle"),
    "attention": ("old run's attention", style.ORANGE, "solid", "square"),
    "random": ("random, same k", style.INK, "dot", "x-thin-open"),
    "bottom": ("lowest ranked", style.RED, "dot", "triangle-down"),
}
_SPARE = (style.GREEN, style.PURPLE, style.SKY)


def curve(result: Result, *, part: str = "kv") -> pd.DataFrame:
    """Columns ranking, k, mean, low, high, n, n_effective. A k that fewer than half the pairs reach is left out.

    A pair with fewer positions than k counts with all that it has, as in the summary: else the curve of prompts of
    unequal length would be a mean over other pairs at every k.
    """
    rows = rows_of(result, "cumulative", part=part)
    reach = rows.groupby(["ranking", "k"])["pair"].nunique()
    pairs = rows.groupby("ranking")["pair"].nunique()
    ends = rows.groupby(["ranking", "pair"])["k"].transform("max")
    filled = [rows]
    for ranking, k in reach.index[(reach / pairs.reindex(reach.index, level="ranking") >= 0.5).to_numpy()]:
        over = (rows["ranking"] == ranking) & (rows["k"] == ends) & (ends < k)
        filled.append(rows[over].assign(k=k))
    table = intervals(result, pd.concat(filled, ignore_index=True), ["ranking", "k"])
    table["k"] = table["k"].astype(int)
    kept = [reach[ranking, k] >= pairs[ranking] / 2 for ranking, k in zip(table["ranking"], table["k"], strict=True)]
    return table[kept].reset_index(drop=True)


def draw(result: Result, *, part: str = "kv", mark: str = "other_pairs") -> go.Figure:
    """Recovery when the top k positions are patched, k on a log2 axis.

    k50 and k90 of the ranking `mark` are marked as the run's summary has them: each pair's first measured k that
    recovers this share of what all its downstream positions recover, then the mean over pairs.
    """
    rows = rows_of(result, "cumulative", part=part)
    table = curve(result, part=part)
    table = table[table["k"] > 0]
    fig = style.figure(
        "Recovery when the top k downstream positions are patched",
        about(result, rows),
        width=600,
        height=470,
        margin={"b": 118},
        extra_top=20,
    )
    others = [r for r in dict.fromkeys(table["ranking"]) if r not in RANKINGS]
    looks = RANKINGS | {r: (r.replace("_", " "), _SPARE[i % 3], "dashdot", "cross") for i, r in enumerate(others)}
    for ranking, (name, colour, dash, symbol) in looks.items():
        own = table[table["ranking"] == ranking].sort_values("k")
        if len(own):
            style.band(fig, own, x="k", name=name, colour=colour, dash=dash, symbol=symbol)
    style.reference_lines(fig)
    marked = next((r for r in (mark, "attention", "same_pair") if r in set(table["ranking"])), None)
    if marked is not None and part == "kv":  # the summary has them for keys and values together
        _mark(fig, result, marked, looks[marked][1])
    low, high = int(table["k"].min()), int(table["k"].max())
    ticks = [2**i for i in range(int(math.log2(low)), int(math.log2(high)) + 1)]
    if high > 1.3 * ticks[-1]:
        ticks.append(high)
    fig.update_xaxes(
        type="log",
        title_text="Positions patched, k (log scale)",
        tickvals=ticks,
        ticktext=[str(t) for t in ticks],
        range=[math.log10(low) - 0.04, math.log10(high) + 0.06],
    )
    fig.update_yaxes(title_text=style.RECOVERY)
    fig.update_layout(legend={"orientation": "h", "x": 0, "xanchor": "left", "y": -0.21, "yanchor": "top"})
    return remember(fig, "concentration", result, table)


def _mark(fig: go.Figure, result: Result, ranking: str, colour: str) -> None:
    """Lines at the summary's k50 and k90, named clear of the curves; none where no pair could measure them."""
    known = result.summary().rows.set_index("quantity")["mean"]
    for level, side in ((50, "right"), (90, "left")):
        k = float(known.get(f"k{level}_{ranking}", math.nan))
        if math.isnan(k):
            continue
        fig.add_vline(x=k, line={"color": colour, "width": 1, "dash": "dot"}, layer="below")
        fig.add_annotation(
            x=math.log10(k),
            y=1,
            yref="paper",
            yanchor="bottom",
            xanchor=side,
            xshift=6 if side == "right" else -6,
            text=f"k<sub>{level}</sub> = {k:.0f}" if k >= 10 else f"k<sub>{level}</sub> = {k:.1f}",
            showarrow=False,
            font={"size": 13, "color": colour},
        )
