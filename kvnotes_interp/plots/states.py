"""Four cache states: does the answer follow the field, or what was written after it?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from plotly import graph_objects as go

from kvnotes_interp.plots import style
from kvnotes_interp.plots.data import about, has, intervals, per_pair, remember, rows_of

if TYPE_CHECKING:
    from kvnotes_interp.results import Result

SITES = {
    "stale": "stale",
    "field_only": "field<br>only",
    "random": "random<br>sites",
    "downstream_only": "downstream<br>only",
    "field_and_downstream": "field +<br>downstream<br>(control)",
    "oracle": "oracle",
}
PARTS = {"kv": ("K and V", style.BLUE), "k": ("K only", style.ORANGE), "v": ("V only", style.GREEN)}
REFERENCE = {"stale", "random", "field_and_downstream", "oracle"}


def draw(result: Result, *, part: str | None = None, points: bool = True) -> go.Figure:
    """Bars of mean recovery with 95 % intervals and a faint point per pair.

    Args:
        part: "kv", "k" or "v" alone; None groups the bars by all parts there are.
        points: draw the pairs.
    """
    rows = rows_of(result, "state", part=part)
    if has(result, "random"):
        extra = rows_of(result, "random", part=None)
        rows = pd.concat([rows, extra[extra["part"].isin(set(rows["part"]))].assign(site="random")])
    table = intervals(result, rows, ["part", "site"])
    parts = [p for p in PARTS if p in set(table["part"])]
    sites = [s for s in SITES if s in set(table["site"])]
    single = len(parts) == 1
    fig = style.figure(
        "Recovery by cache state" + (f" ({PARTS[parts[0]][0]})" if single else ""),
        about(result, rows, interval="Bars"),
        width=style.COLUMN if single else 640,
        height=400 if single else 430,
    )
    width = 0.62 if single else 0.8 / len(parts)
    data = per_pair(rows, ["part", "site"])
    for index, name in enumerate(parts):
        title, colour = PARTS[name]
        shift = (index - (len(parts) - 1) / 2) * width
        own = table[table["part"] == name].set_index("site")
        here = [s for s in sites if s in own.index]
        own = own.loc[here].reset_index()
        x = np.array([sites.index(s) for s in here]) + shift
        faint = [style.faded(colour, 0.35 if s in REFERENCE else 0.85) for s in here]
        fig.add_trace(
            go.Bar(
                x=x,
                y=own["mean"],
                width=width * 0.92,
                name=title,
                marker={"color": faint, "line": {"color": colour, "width": 1}},
                showlegend=False,
                error_y={
                    "type": "data",
                    "symmetric": False,
                    "array": (own["high"] - own["mean"]).fillna(0),
                    "arrayminus": (own["mean"] - own["low"]).fillna(0),
                    "color": style.INK,
                    "thickness": 1.3,
                    "width": 4,
                },
                customdata=own[["low", "high", "n", "n_effective", "site"]].to_numpy(),
                hovertemplate=(
                    f"%{{customdata[4]}}, {title}<br>mean %{{y:.3f}}<br>95%: %{{customdata[0]:.3f}} to "
                    "%{customdata[1]:.3f}<br>n = %{customdata[2]} pairs, %{customdata[3]} contents<extra></extra>"
                ),
            )
        )
        if not single:
            # A bar takes its legend colour from its first, faded, bar; a square of the full colour reads better.
            fig.add_trace(
                go.Scatter(
                    x=[None],
                    y=[None],
                    mode="markers",
                    name=title,
                    marker={"color": colour, "symbol": "square", "size": 11},
                )
            )
        if points:
            _points(fig, data[data["part"] == name], here, x, width, title)
        if single:
            _numbers(fig, own, x)
    style.reference_lines(fig)
    fig.update_xaxes(
        tickvals=list(range(len(sites))),
        ticktext=[SITES[s] for s in sites],
        range=[-0.6, len(sites) - 0.4],
        showgrid=False,
        ticks="",
        tickangle=0,
        tickfont={"size": 12 if single else 13},
    )
    fig.update_yaxes(title_text=style.RECOVERY, range=_range(table, data))
    fig.update_layout(legend={"orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom"}, bargap=0)
    if not single:
        fig.update_layout(margin_t=fig.layout.margin.t + 26)
    return remember(fig, "states", result, table)


def _points(fig: go.Figure, data: pd.DataFrame, sites: list[str], x: np.ndarray, width: float, title: str) -> None:
    """One dot per pair, spread sideways in the order of the pairs so that a redrawn figure is the same."""
    for site, centre in zip(sites, x, strict=True):
        own = data[data["site"] == site]
        if site in {"stale", "oracle"} or not len(own):
            continue  # 0 and 1 by definition
        spread = np.linspace(-0.3, 0.3, len(own)) * width if len(own) > 1 else np.zeros(1)
        fig.add_trace(
            go.Scatter(
                x=centre + spread,
                y=own["value"],
                mode="markers",
                marker={"size": 4.5, "color": "rgba(34,34,34,0.38)"},
                text=own["pair"],
                hovertemplate=f"%{{text}}, {title}: %{{y:.3f}}<extra></extra>",
                showlegend=False,
            )
        )


def _numbers(fig: go.Figure, table: pd.DataFrame, x: np.ndarray) -> None:
    """The mean in a row under the title, clear of bars, bounds and dots."""
    for centre, mean in zip(x, table["mean"], strict=True):
        fig.add_annotation(
            x=centre,
            y=1,
            yref="paper",
            yanchor="bottom",
            text=f"{mean:.2f}".replace("-0.00", "0.00"),
            showarrow=False,
            font={"size": 13},
        )


def _range(table: pd.DataFrame, data: pd.DataFrame) -> list[float]:
    """Room for every bound; single pairs far outside are cut at -1 and 2, where they would flatten the rest."""
    values = [*table["mean"], *table["low"].dropna(), *table["high"].dropna()]
    low = min([-0.1, *values, max(-1.0, data["value"].min())])
    high = max([1.1, *values, min(2.0, data["value"].max())])
    return [low - 0.04, high + 0.04]
