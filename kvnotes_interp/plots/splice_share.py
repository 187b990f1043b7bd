"""Quality against cost: what recomputing a share of the layer-tokens buys, per operator."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pandas as pd
from plotly import graph_objects as go

from kvnotes_interp.errors import InputError
from kvnotes_interp.plots import splicing, style
from kvnotes_interp.plots.data import about, remember, rows_of

if TYPE_CHECKING:
    from kvnotes_interp.results import Result


def draw(result: Result, *, readout: str = "micro_f1", documents: int | None = None) -> go.Figure:
    """A readout against the share of full recompute's layer-tokens that were run, all operators in one picture.

    Args:
        readout: one of `splicing.READOUTS`. documents: only this number of documents; None pools all of them.
    """
    splicing.check_readout(readout)
    shown = "exact_match" if readout == "micro_f1" else readout
    rows = rows_of(result, "quality", readout=shown)
    if documents is not None:
        result = _only(result, documents)
        rows = rows_of(result, "quality", readout=shown)
    table = splicing.quality(result, readout, ["site", "operator"])
    share = splicing.mean_by(result, rows_of(result, "cost", readout="layer_share"), ["site"]).set_index("site")["mean"]
    table["share"] = table["site"].map(share).astype(float)
    fig = style.figure(
        f"{splicing.READOUTS[readout]} against what is recomputed",
        about(result, rows, more=f"{documents or 'All numbers of'} documents."),
        width=620,
        height=480,
        margin={"b": 140},
    )
    names = splicing.in_order(table["operator"].tolist())
    for index, operator in enumerate(names):
        name, colour, dash, symbol = splicing.look(operator, index)
        own = table[table["operator"] == operator].sort_values("share")
        style.band(fig, own, x="share", name=name, colour=colour, dash=dash, symbol=symbol)
    whole = table.loc[table["operator"] == "full_recompute", "mean"]
    if len(whole):
        fig.add_hline(y=float(whole.iloc[0]), line={"color": style.GREY, "width": 1, "dash": "dot"}, layer="below")
    fig.update_xaxes(title_text="Layer-tokens run, share of full recompute", tickformat=".0%", range=[-0.03, 1.05])
    fig.update_yaxes(title_text=splicing.READOUTS[readout])
    fig.update_layout(legend={"orientation": "h", "x": 0, "xanchor": "left", "y": -0.2, "yanchor": "top"})
    return remember(fig, "splice_share", result, table)


def _only(result: Result, documents: int) -> Result:
    frame: pd.DataFrame = result.frame[result.frame["documents"] == documents]
    if frame.empty:
        have = sorted(int(n) for n in result.frame["documents"].dropna().unique())
        raise InputError(f"documents={documents}: this result holds {', '.join(map(str, have))}.")
    return replace(result, frame=frame)
