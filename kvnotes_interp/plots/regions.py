"""Regions: how much of the effect each carries when patched alone, against how many of the positions it has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd
from plotly import graph_objects as go

from kvnotes_interp.plots import style
from kvnotes_interp.plots.data import about, intervals, remember, rows_of

if TYPE_CHECKING:
    from kvnotes_interp.results import Result

NAMES = {
    "decision": "decision prompt",
    "template": "chat template",
    "delimiter": "delimiters",
    "context": "other context",
}


def region_table(result: Result, *, part: str = "kv") -> pd.DataFrame:
    """Per region: recovery with interval, its share of the field and downstream positions, and their ratio.

    Means are over the pairs that have the region. The ratio is of a region that is patched as a whole; the summary's
    `enrichment_<region>` adds up what its positions recover one by one, and is another number.
    """
    rows = rows_of(result, "region", part=part)
    table = intervals(result, rows, ["site"])
    pairs = result.pairs.set_index("pair")
    # Everything that can be patched: from the field's first token to the one before the decision position.
    total = (pairs["length"] - pairs["field_start"] - 1).astype(float)
    share = (rows["size"].astype(float) / rows["pair"].map(total).to_numpy(dtype=float)).groupby(rows["site"])
    # Both means are over the pairs that have the region; over all pairs the ratio would grow with every pair without.
    table["share_of_positions"] = table["site"].map(share.mean())
    table["ratio"] = table["mean"] / table["share_of_positions"]
    return table.sort_values("mean", kind="stable").reset_index(drop=True)


def draw(result: Result, *, part: str = "kv") -> go.Figure:
    """Two marks per region: its share of the positions, and the share of the effect that it recovers alone."""
    rows = rows_of(result, "region", part=part)
    table = region_table(result, part=part)
    names = [NAMES.get(site, site.replace("_", " ")) for site in table["site"]]
    # A few dots take little height whatever the number of regions.
    fig = style.figure(
        "Share of the effect against share of the positions, by region",
        about(
            result,
            rows,
            interval="Bars",
            more="A region is patched alone; shares of the effect need not add up to 100%.",
        ),
        width=560,
        height=190 + 34 * len(table),
        margin={"l": 120, "r": 56},
        extra_top=24,
    )
    effect, positions = 100 * table["mean"], 100 * table["share_of_positions"]
    for index in range(len(table)):
        fig.add_shape(
            type="line",
            x0=positions[index],
            x1=effect[index],
            y0=index,
            y1=index,
            line={"color": style.PALE, "width": 5},
            layer="between",
        )
        fig.add_annotation(
            x=1,
            xref="paper",
            xanchor="left",
            xshift=8,
            y=index,
            text=f"×{table['ratio'][index]:.1f}",
            showarrow=False,
            font={"size": 13},
        )
    fig.add_annotation(
        x=1,
        xref="paper",
        xanchor="left",
        xshift=8,
        y=len(table) - 0.42,
        yanchor="bottom",
        text="ratio",
        showarrow=False,
        font={"size": 12, "color": style.GREY},
    )
    fig.add_trace(
        go.Scatter(
            x=positions,
            y=list(range(len(table))),
            mode="markers",
            name="of the positions",
            marker={"symbol": "line-ns", "size": 14, "line": {"color": style.INK, "width": 2.5}},
            hovertemplate="%{x:.1f}% of the positions<extra></extra>",
        )
    )
    fig.add_trace(
        go.Scatter(
            x=effect,
            y=list(range(len(table))),
            mode="markers",
            name="of the effect (recovery)",
            marker={"size": 10, "color": style.RED},
            error_x={
                "type": "data",
                "symmetric": False,
                "array": (100 * (table["high"] - table["mean"])).fillna(0),
                "arrayminus": (100 * (table["mean"] - table["low"])).fillna(0),
                "color": style.RED,
                "thickness": 1.5,
                "width": 0,
            },
            customdata=table[["n", "n_effective", "ratio"]].to_numpy(dtype=float),
            hovertemplate=(
                "%{x:.1f}% of the effect, ×%{customdata[2]:.2f}<br>n = %{customdata[0]} pairs, "
                "%{customdata[1]} contents<extra></extra>"
            ),
        )
    )
    fig.add_vline(x=0, line={"color": style.GREY, "width": 1, "dash": "dot"}, layer="below")
    fig.update_yaxes(
        tickvals=list(range(len(table))),
        ticktext=names,
        range=[-0.6, len(table) - 0.4],
        showgrid=False,
        ticks="",
    )
    fig.update_xaxes(title_text="Share (%)", nticks=7)
    fig.update_layout(legend={"orientation": "h", "x": 0, "xanchor": "left", "y": 1.0, "yanchor": "bottom"})
    return remember(fig, "regions", result, table)
