"""Attention deviation by place in a document, and by region, all operators in one: the figure of SemPIC.

Left: against relative position, layers averaged. Right: prefix, interior and suffix at one edge ratio.
(SemPIC, arXiv 2607.28069: boundary against interior.)

What this does not show: layers, which may differ by more than operators do; see the kind "deviation" for those.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd
from plotly import graph_objects as go

from kvnotes_interp.errors import InputError
from kvnotes_interp.plots import splicing, style
from kvnotes_interp.plots.data import about, intervals, remember, rows_of

if TYPE_CHECKING:
    from kvnotes_interp.results import Result

UNITS = {"deviation": "Mean |Δ attention| in the document", "deviation_raw": "Mean |Δ attention|"}
REGIONS = ("prefix", "interior", "suffix")
FULL = "full_recompute"


def draw(result: Result, *, readout: str = "deviation", edge: float | None = None) -> go.Figure:
    """One line and one group of bars per operator.

    Args:
        readout: "deviation" (renormalised inside the document) or "deviation_raw".
        edge: ratio of the regions; the smallest that was measured by default.
    """
    rows = rows_of(result, "deviation", readout=readout)
    strip = rows_of(result, "region", readout=readout)
    edges = sorted({float(e) for e in strip["edge"]})
    edge = edges[0] if edge is None else float(edge)
    if edge not in edges:
        raise InputError(f"edge={edge}: this result was measured at {', '.join(f'{e:g}' for e in edges)}.")
    names = [name for name in splicing.in_order([str(s) for s in rows["site"]]) if name != FULL]
    if not names:
        raise InputError("only full recompute was measured, and it does not deviate from itself.")
    curves = intervals(result, rows[rows["site"].isin(names)], ["site", "relative"])
    bars = intervals(result, strip[strip["site"].isin(names) & (strip["edge"] == edge)], ["site", "region"])
    fig = style.figure(
        "Where a document's cache is read differently",
        about(result, rows, interval="Bands and bars"),
        width=style.WIDE,
        height=440,
        margin={"b": 120},
    )
    for index, operator in enumerate(names):
        name, colour, dash, symbol = splicing.look(operator, index)
        own = curves[curves["site"] == operator].sort_values("relative")
        style.band(fig, own, x="relative", name=name, colour=colour, dash=dash, symbol=symbol)
        _bars(fig, bars[bars["site"] == operator].set_index("region").reindex(list(REGIONS)), name, colour, dash)
    fig.update_layout(
        xaxis={"domain": [0, 0.58], "range": [0, 1], "title": {"text": "Relative position in the document"}},
        yaxis={"title": {"text": UNITS.get(readout, readout)}, "rangemode": "tozero"},
        xaxis2={"domain": [0.68, 1], "anchor": "y2", "title": {"text": f"Region (edge ratio {edge:g})"}},
        yaxis2={"anchor": "x2", "rangemode": "tozero"},
        barmode="group",
        legend={"orientation": "h", "x": 0, "xanchor": "left", "y": -0.22, "yanchor": "top"},
    )
    table = pd.concat([curves.assign(drawn="curve"), bars.assign(drawn="bar", edge=edge)], ignore_index=True)
    return remember(fig, "deviation_curve", result, table)


def _bars(fig: go.Figure, rows: pd.DataFrame, name: str, colour: str, dash: str) -> None:
    # Two kinds may share a colour and differ by the dash of their line: the bar of the dashed one is hatched.
    fig.add_trace(
        go.Bar(
            x=list(rows.index),
            y=list(rows["mean"]),
            name=name,
            legendgroup=name,
            showlegend=False,
            marker={
                "color": colour,
                "line": {"width": 0},
                "pattern": {"shape": "" if dash == "solid" else "/", "bgcolor": colour, "fgcolor": "white", "size": 6},
            },
            error_y={
                "type": "data",
                "symmetric": False,
                "array": list((rows["high"] - rows["mean"]).fillna(0)),
                "arrayminus": list((rows["mean"] - rows["low"]).fillna(0)),
                "color": style.INK,
                "thickness": 1.3,
                "width": 3,
            },
            customdata=rows[["n", "n_effective"]].to_numpy(dtype=float),
            hovertemplate=f"{name}, %{{x}}: %{{y:.4g}}<br>n = %{{customdata[0]}} prompts, %{{customdata[1]}} contents"
            "<extra></extra>",
            xaxis="x2",
            yaxis="y2",
        )
    )
