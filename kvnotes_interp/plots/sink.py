"""Sink density: how much attention the first token of every block draws, against the middle of its block.

A block that was prefilled alone had its first token as its sink, and keeps it in the join. (SemPIC, arXiv 2607.28069.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from plotly import graph_objects as go
from plotly.subplots import make_subplots

from kvnotes_interp.plots import style
from kvnotes_interp.plots.data import about, intervals, remember, rows_of, seed_of
from kvnotes_interp.stats import bootstrap_ratio

if TYPE_CHECKING:
    from kvnotes_interp.results import Result

PLACES = {"first_token": "first<br>token", "leading": "leading<br>10 %", "middle": "middle<br>80 %"}
COLOURS = (style.BLUE, style.ORANGE, style.GREEN, style.RED, style.PURPLE, style.SKY)
FULL = "full_recompute"


def draw(result: Result, *, log: bool = True) -> go.Figure:
    """Left: attention per token in three parts of a block. Right: first token over middle, by layer.

    The ratio is one of means over blocks and prompts, with a bootstrap over contents.
    """
    rows = pd.concat([rows_of(result, "sink", readout=name) for name in PLACES], ignore_index=True)
    names = [*(n for n in (FULL,) if n in set(rows["site"])), *sorted(set(rows["site"]) - {FULL})]
    density = intervals(result, rows, ["site", "readout"])
    ratios = _ratios(rows, seed_of(result))
    fig = style.figure(
        "Attention that the first token of a block draws",
        about(result, rows, interval="Bars and bands", more="Blocks that start the prompt are left out."),
        width=style.WIDE,
        height=400,
        extra_top=24,
    )
    panels = make_subplots(cols=2, column_widths=[0.42, 0.58], horizontal_spacing=0.1).layout.to_plotly_json()
    fig.update_layout({k: v for k, v in panels.items() if k.startswith(("xaxis", "yaxis"))})
    colours = {name: style.INK if name == FULL else COLOURS[i % len(COLOURS)] for i, name in enumerate(names, -1)}
    for place, name in enumerate(names):
        own = density[density["site"] == name].set_index("readout").loc[list(PLACES)]
        shift = (place - (len(names) - 1) / 2) * 0.8 / len(names)
        fig.add_trace(
            go.Scatter(
                x=np.arange(len(PLACES)) + shift,
                y=own["mean"],
                mode="markers",
                name=name.replace("_", " "),
                legendgroup=name,
                showlegend=False,
                marker={"size": 10, "color": colours[name]},
                error_y={
                    "type": "data",
                    "symmetric": False,
                    "array": (own["high"] - own["mean"]).fillna(0),
                    "arrayminus": (own["mean"] - own["low"]).fillna(0),
                    "color": colours[name],
                    "thickness": 1.5,
                    "width": 4,
                },
                hovertemplate="%{y:.4g} of the attention per token<extra>" + name.replace("_", " ") + "</extra>",
            )
        )
        count = len(fig.data)
        style.band(fig, ratios[ratios["site"] == name], x="layer", name=name.replace("_", " "), colour=colours[name])
        for trace in fig.data[count:]:
            trace.update(xaxis="x2", yaxis="y2")
    kind = {"type": "log", "dtick": 1, "tickformat": "~g"} if log else {"type": "linear"}
    unit = " (log)" if log else ""
    fig.update_layout(
        xaxis={"tickvals": list(range(len(PLACES))), "ticktext": list(PLACES.values()), "range": [-0.6, 2.6]},
        yaxis={"title": {"text": f"Attention per token{unit}"}, **kind},
        xaxis2={"title": {"text": "Layer (0 = first)"}},
        yaxis2={"title": {"text": f"First token / middle 80 %{unit}"}, **kind},
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
    )
    fig.update_xaxes(showgrid=False)
    fig.add_shape(
        type="line",
        **{"x0": 0, "x1": 1, "y0": 1, "y1": 1, "xref": "x2 domain", "yref": "y2"},
        line={"color": style.GREY, "width": 1, "dash": "dot"},
        layer="below",
    )
    table = pd.concat(
        [density.assign(drawn="density"), ratios.assign(drawn="ratio", readout="first_token / middle")],
        ignore_index=True,
    )
    return remember(fig, "sink", result, table)


def _ratios(rows: pd.DataFrame, seed: int) -> pd.DataFrame:
    """First token over middle per operator and layer: sums over blocks and prompts, clustered by content."""
    means = rows.groupby(["site", "layer", "pair", "content", "readout"], as_index=False)["value"].mean()
    wide = means.pivot(index=["site", "layer", "pair", "content"], columns="readout", values="value").reset_index()
    out = []
    for (site, layer), own in wide.groupby(["site", "layer"]):
        interval = bootstrap_ratio(
            own["first_token"].to_numpy(float), own["middle"].to_numpy(float), own["content"].tolist(), seed=seed
        )
        out.append({"site": site, "layer": int(layer), **interval.to_dict()})
    # A layer whose window does not reach the blocks has no middle to compare with.
    return pd.DataFrame(out).dropna(subset=["mean"]).reset_index(drop=True)
