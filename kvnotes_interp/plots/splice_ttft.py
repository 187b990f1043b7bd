"""Time to the first token against the length of what was composed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pandas as pd
from plotly import graph_objects as go

from kvnotes_interp.plots import splicing, style
from kvnotes_interp.plots.data import about, remember, rows_of

if TYPE_CHECKING:
    from kvnotes_interp.results import Result


def draw(result: Result, *, readout: str = "speedup", bins: int = 6) -> go.Figure:
    """Full recompute's time to the first token over each operator's ("speedup"), or "seconds", against tokens.

    Questions are put into at most `bins` groups of equal size by length; a point stands at its group's mean length.
    """
    rows = rows_of(result, "ttft", readout=readout)
    lengths = rows.drop_duplicates("pair").set_index("pair")["size"].astype(float)
    group = pd.qcut(lengths.rank(method="first"), min(bins, lengths.nunique()), labels=False)
    rows = rows.assign(group=rows["pair"].map(group), tokens=rows["pair"].map(lengths))
    table = splicing.mean_by(result, rows, ["site", "operator", "group"])
    table["tokens"] = table["group"].map(rows.groupby("group")["tokens"].mean()).astype(float)
    what = "speed-up over full recompute" if readout == "speedup" else "seconds"
    fig = style.figure(
        f"Time to the first token against length: {what}",
        about(result, rows, more="Chunks compiled beforehand are not timed."),
        width=620,
        height=480,
        margin={"b": 150},
    )
    for index, operator in enumerate(splicing.in_order(table["operator"].tolist())):
        own = table[table["operator"] == operator]
        name, colour, dash, symbol = splicing.look(operator, index)
        for site, line in own.groupby("site", sort=True):
            setting = str(site).removeprefix(operator).removeprefix("@")
            label = f"{name} @{setting}" if setting else name
            style.band(fig, line.sort_values("tokens"), x="tokens", name=label, colour=colour, dash=dash, symbol=symbol)
    if readout == "speedup":
        fig.add_hline(y=1, line={"color": style.GREY, "width": 1, "dash": "dot"}, layer="below")
    low, high = float(table["tokens"].min()), float(table["tokens"].max())
    ticks = [2**i for i in range(int(math.log2(low)), int(math.log2(high)) + 2)]
    fig.update_xaxes(
        type="log", title_text="Tokens of prefix and documents", tickvals=ticks, ticktext=[f"{t}" for t in ticks]
    )
    fig.update_yaxes(
        title_text="Speed-up (1 = full recompute)" if readout == "speedup" else "Seconds to the first token"
    )
    fig.update_layout(legend={"orientation": "h", "x": 0, "xanchor": "left", "y": -0.2, "yanchor": "top"})
    return remember(fig, "splice_ttft", result, table)
