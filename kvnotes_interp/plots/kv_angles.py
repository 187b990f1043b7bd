"""How far keys and values of a composed cache are turned away from full recompute, by layer.

In layer 0 both come from the tokens alone: what differs there is the position, not the context.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pandas as pd
from plotly import graph_objects as go

from kvnotes_interp.plots import style
from kvnotes_interp.plots.data import about, intervals, remember, rows_of

if TYPE_CHECKING:
    from kvnotes_interp.results import Result

PARTS = {"k": ("keys", "solid", "circle"), "v": ("values", "dash", "square")}
COLOURS = (style.BLUE, style.ORANGE, style.GREEN, style.RED, style.PURPLE, style.SKY)


def draw(result: Result) -> go.Figure:
    """Mean angle in degrees over tokens and KV heads; keys solid, values dashed, one colour per operator."""
    rows = rows_of(result, "kv", part=None, readout="angle")
    rows = rows[rows["site"] != "full_recompute"] if set(rows["site"]) != {"full_recompute"} else rows
    rows = rows.assign(value=rows["value"].astype(float) * 180 / math.pi)
    table = intervals(result, rows, ["site", "part", "layer"])
    table["layer"] = table["layer"].astype(int)
    names = list(dict.fromkeys(rows["site"]))
    fig = style.figure(
        "Keys and values: angle to full recompute",
        about(result, rows, more="Mean over tokens, KV heads and chunks that stand behind something."),
        height=400,
        extra_top=24 * (1 + len(names) // 2),
    )
    for place, name in enumerate(names):
        for part, (word, dash, symbol) in PARTS.items():
            own: pd.DataFrame = table.loc[(table["site"] == name) & (table["part"] == part)]
            label = f"{name.replace('_', ' ')}, {word}"
            colour = COLOURS[place % len(COLOURS)]
            style.band(fig, own, x="layer", name=label, colour=colour, dash=dash, symbol=symbol)
    top = int(table["layer"].max())
    fig.update_xaxes(title_text="Layer (0 = first)", range=[-0.5, top + 0.5], dtick=1 if top < 13 else None)
    fig.update_yaxes(title_text="Angle (degrees)", rangemode="tozero")
    fig.update_layout(legend={"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"})
    return remember(fig, "kv_angles", result, table)
