"""Dose-response: how many positions of a false note it takes until the decision follows it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from plotly import graph_objects as go

from kvnotes_interp.errors import InputError, nearest
from kvnotes_interp.plots import style
from kvnotes_interp.plots.data import about, intervals, remember, rows_of

if TYPE_CHECKING:
    from kvnotes_interp.results import Result

RANKINGS = {
    "other_half": ("top positions (other half)", style.BLUE, "solid", "circle"),
    "random": ("random positions, same k", style.INK, "dot", "x-thin-open"),
}
READOUTS = {"flip": "Share that follow the note", "recovery": style.RECOVERY}


def draw(result: Result, *, readout: str = "flip") -> go.Figure:
    """Both directions together, draws averaged first.

    Args:
        readout: "flip" (share that follows) or "recovery".
    """
    if readout not in READOUTS:
        raise InputError(f"readout={readout!r}: choose from {', '.join(READOUTS)}.{nearest(readout, READOUTS)}")
    rows = rows_of(result, "dose", readout=readout)
    table = intervals(result, rows, ["ranking", "k"])
    table["k"] = table["k"].astype(int)
    # The last k differs between prompts of unequal length.
    table = table[table["n"] >= table["n"].max() / 2]
    fig = style.figure(
        "A false note in an otherwise consistent cache",
        about(result, rows, more="Old to new and new to old."),
        height=420,
        margin={"b": 100},
    )
    for ranking, (name, colour, dash, symbol) in RANKINGS.items():
        own = table[table["ranking"] == ranking].sort_values("k")
        if len(own):
            style.band(fig, own, x="k", name=name, colour=colour, dash=dash, symbol=symbol)
    style.reference_lines(fig)
    ks = sorted(set(table["k"]))
    fig.update_xaxes(
        type="log",
        title_text="Positions of the note, k (log scale)",
        tickvals=ks,
        ticktext=[str(k) for k in ks],
        range=[math.log10(ks[0]) - 0.05, math.log10(ks[-1]) + 0.06],
    )
    fig.update_yaxes(title_text=READOUTS[readout], range=[-0.06, 1.06] if readout == "flip" else None)
    fig.update_layout(legend={"orientation": "h", "x": 0, "xanchor": "left", "y": -0.22, "yanchor": "top"})
    return remember(fig, "dose", result, table)
