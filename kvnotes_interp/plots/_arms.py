"""Named arms as dots with intervals, one above the other, each with its random control."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
from plotly import graph_objects as go

from kvnotes_interp.plots import style


def draw(
    fig: go.Figure, table: pd.DataFrame, arms: Mapping[str, str], *, chosen: str, colour: str = style.BLUE
) -> None:
    """Dots for every arm of `arms` (site -> label) found in `table` (site, ranking, mean, low, high, n), top first.

    `chosen` is the label of the arm itself in the legend; rows ranked "random" are drawn open, beside it.
    """
    sites = [s for s in arms if s in set(table["site"])]
    for name, is_random, symbol, shade, shift in (
        (chosen, False, "circle", colour, 0.0),
        ("random, same size", True, "circle-open", style.INK, 0.24),
    ):
        own = table[(table["ranking"] == "random") == is_random]
        own = own[own["site"].isin(sites)]
        if not len(own):
            continue
        fig.add_trace(
            go.Scatter(
                x=list(own["mean"]),
                y=[sites.index(s) + shift for s in own["site"]],
                mode="markers",
                name=name,
                marker={"size": 9, "symbol": symbol, "color": shade},
                error_x={
                    "type": "data",
                    "symmetric": False,
                    "array": list((own["high"] - own["mean"]).fillna(0)),
                    "arrayminus": list((own["mean"] - own["low"]).fillna(0)),
                    "thickness": 1.3,
                    "width": 4,
                    "color": shade,
                },
                customdata=own[["n", "n_effective"]].to_numpy(dtype=float),
                hovertemplate="%{x:.3f}<br>n = %{customdata[0]} pairs, %{customdata[1]} contents<extra></extra>",
            )
        )
    fig.update_yaxes(
        tickvals=list(range(len(sites))),
        ticktext=[arms[s] for s in sites],
        range=[len(sites) - 0.4, -0.6],
        showgrid=False,
        ticks="",
    )
    for value in (0, 1):
        fig.add_vline(x=value, line={"color": style.GREY, "width": 1, "dash": "dot"}, layer="below")
    fig.update_xaxes(title_text=style.RECOVERY)
    fig.update_layout(legend={"orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom"})
