"""Attention-deviation map: layer x relative position per operator, under a strip of prefix, interior and suffix.

(SemPIC, arXiv 2607.28069: boundary against interior.)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from plotly import graph_objects as go
from plotly.subplots import make_subplots

from kvnotes_interp.errors import InputError
from kvnotes_interp.plots import style
from kvnotes_interp.plots.data import about, intervals, remember, rows_of

if TYPE_CHECKING:
    from kvnotes_interp.results import Result

UNITS = {"deviation": "Mean |Δ attention|, renormalised in the chunk", "deviation_raw": "Mean |Δ attention|"}
REGIONS = {"prefix": style.ORANGE, "interior": style.BLUE, "suffix": style.GREEN}
PANEL = 340  # pixels per operator
DECADES = 2.5  # of the colours at most: below that a cell deviates by rounding, or by nothing that is ever read
STRIP, GAP, MAP = 110, 34, 300  # heights in pixels


def draw(
    result: Result, *, readout: str = "deviation", edge: float | None = None, log: bool = True, operators: str = ""
) -> go.Figure:
    """One panel per operator, first layer at the bottom.

    Args:
        readout: "deviation" (renormalised inside the chunk) or "deviation_raw".
        edge: ratio of the region strip; the smallest that was measured by default.
        log: colours by powers of ten, since a chunk's first tokens deviate many times more than its interior.
        operators: names to show, separated by commas; all but full recompute by default.
    """
    rows = rows_of(result, "deviation", readout=readout)
    names = _operators(rows, operators)
    rows = rows[rows["site"].isin(names)]
    strip = rows_of(result, "region", readout=readout)
    edges = sorted({float(e) for e in strip["edge"]})
    edge = edges[0] if edge is None else float(edge)
    if edge not in edges:
        raise InputError(f"edge={edge}: this result was measured at {', '.join(f'{e:g}' for e in edges)}.")
    cells = rows.groupby(["site", "layer", "position", "relative"])["value"].mean().reset_index()
    bars = intervals(result, strip[strip["site"].isin(names) & (strip["edge"] == edge)], ["site", "region"])
    width = max(style.COLUMN, 64 + PANEL * len(names) + 96)
    fig = style.figure(
        "Where a composed cache is read differently",
        about(
            result,
            rows,
            interval="Bars",
            more=f"Mean over chunks, then prompts. Strip: first {edge:.0%}, middle and last {edge:.0%} of each chunk.",
        ),
        width=width,
        height=STRIP + GAP + MAP,
        margin={"r": 96},
        extra_top=24,
    )
    layout = make_subplots(
        rows=2,
        cols=len(names),
        shared_xaxes=True,
        row_heights=[STRIP, MAP],
        vertical_spacing=GAP / (STRIP + GAP + MAP),
        horizontal_spacing=0.04,
        column_titles=[name.replace("_", " ") for name in names],
    ).layout
    fig.update_layout({k: v for k, v in layout.to_plotly_json().items() if k.startswith(("xaxis", "yaxis", "ann"))})
    fig.update_annotations(font={"size": 14, "color": style.INK}, yshift=4)  # the operators' names
    style.fit_height(fig, STRIP + GAP + MAP)
    scale = _scale(cells["value"].to_numpy(dtype=float), log)
    top = float(bars["high"].fillna(bars["mean"]).max()) * 1.12
    for column, name in enumerate(names):
        _strip(fig, bars[bars["site"] == name], edge, column, len(names), top, first=column == 0)
        _map(
            fig,
            cells[cells["site"] == name],
            column,
            len(names),
            scale,
            UNITS.get(readout, readout),
            last=column == len(names) - 1,
        )
    fig.update_layout(showlegend=False)
    return remember(fig, "deviation", result, _flat(cells, bars, edge))


def _operators(rows: pd.DataFrame, wanted: str) -> list[str]:
    found = list(dict.fromkeys(rows["site"]))
    if not wanted:
        return [name for name in found if name != "full_recompute"] or found
    names = [name.strip() for name in wanted.split(",")]
    for name in names:
        if name not in found:
            raise InputError(f"operators={wanted!r}: {name!r} was not measured; there are {', '.join(found)}.")
    return names


def _scale(values: np.ndarray, log: bool) -> dict[str, Any]:
    """Colour scale of deviations, white at the low end; on a logarithmic scale zeros count as the lowest."""
    positive = values[values > 0]
    stops = [[i / 40, style.recovery_colour(i / 40)] for i in range(41)]
    if not log or not len(positive):
        return {"log": False, "colorscale": stops, "zmin": 0.0, "zmax": style.nice(max(float(values.max()), 1e-9))}
    low, high = math.log10(np.quantile(positive, 0.02)), math.log10(positive.max())
    low = min(max(low, high - DECADES), high - 1)
    ticks = [t for p in range(math.floor(low), math.ceil(high) + 1) for t in (p, p + math.log10(3)) if low <= t <= high]
    return {"log": True, "colorscale": stops, "zmin": low, "zmax": high, "ticks": ticks}


def _strip(
    fig: go.Figure, bars: pd.DataFrame, edge: float, column: int, n_columns: int, top: float, *, first: bool
) -> None:
    """Bars as wide as their regions, so that they stand over the columns of the map that they sum up."""
    bounds = {"prefix": (0.0, edge), "interior": (edge, 1 - edge), "suffix": (1 - edge, 1.0)}
    own = bars.set_index("region").loc[[r for r in REGIONS if r in set(bars["region"])]]
    fig.add_trace(
        go.Bar(
            x=[sum(bounds[r]) / 2 for r in own.index],
            width=[bounds[r][1] - bounds[r][0] for r in own.index],
            y=own["mean"],
            marker={"color": [REGIONS[r] for r in own.index], "line": {"width": 0}},
            error_y={
                "type": "data",
                "symmetric": False,
                "array": (own["high"] - own["mean"]).fillna(0),
                "arrayminus": (own["mean"] - own["low"]).fillna(0),
                "color": style.INK,
                "thickness": 1.3,
                "width": 3,
            },
            text=[f"{v:.2g}" for v in own["mean"]],
            textposition="none",
            customdata=np.stack([own.index.to_numpy(), own["n"].to_numpy(), own["n_effective"].to_numpy()], axis=1),
            hovertemplate="%{customdata[0]}: %{y:.4f}<br>n = %{customdata[1]} prompts, %{customdata[2]} contents"
            "<extra></extra>",
            xaxis=_axis("x", column),
            yaxis=_axis("y", column),
        )
    )
    for region, row in own.iterrows():
        fig.add_annotation(
            x=sum(bounds[str(region)]) / 2,
            y=row["high"] if row["high"] == row["high"] else row["mean"],
            xref=_axis("x", column),
            yref=_axis("y", column),
            text=f"{row['mean']:.2g}",
            showarrow=False,
            yanchor="bottom",
            yshift=2,
            font={"size": 12, "color": REGIONS[str(region)]},
        )
    fig.update_layout(
        {
            _layout("yaxis", column): {
                "range": [0, top * 1.15],
                "nticks": 4,
                "showticklabels": first,
                "title": {"text": "mean |Δ|"} if first else None,
            },
            _layout("xaxis", column): {"range": [0, 1], "showticklabels": False, "ticks": "", "showgrid": False},
        }
    )


def _map(
    fig: go.Figure,
    cells: pd.DataFrame,
    column: int,
    n_columns: int,
    scale: dict[str, Any],
    unit: str,
    *,
    last: bool,
) -> None:
    table = cells.pivot(index="layer", columns="relative", values="value").sort_index()
    values = table.to_numpy(dtype=float)
    shown = np.log10(np.maximum(values, 10.0 ** scale["zmin"])) if scale["log"] else values
    bar = style.colour_bar(unit, len=MAP / (STRIP + GAP + MAP), y=0, yanchor="bottom")
    if scale["log"]:
        bar |= {"tickvals": scale["ticks"], "ticktext": [f"{10**t:.2g}" for t in scale["ticks"]]}
    place = n_columns + column
    fig.add_trace(
        go.Heatmap(
            x=[float(c) for c in table.columns],
            y=[int(i) for i in table.index],
            z=shown,
            customdata=values,
            colorscale=scale["colorscale"],
            zmin=scale["zmin"],
            zmax=scale["zmax"],
            showscale=last,
            colorbar=bar if last else None,
            hovertemplate="layer %{y}, relative position %{x:.3f}<br>%{customdata:.4g}<extra></extra>",
            xaxis=_axis("x", place),
            yaxis=_axis("y", place),
        )
    )
    fig.update_layout(
        {
            _layout("xaxis", place): {
                "range": [0, 1],
                "tickvals": [0, 0.25, 0.5, 0.75, 1],
                "title": {"text": "Relative position in the chunk"},
                "showgrid": False,
            },
            _layout("yaxis", place): {
                "showgrid": False,
                "showticklabels": column == 0,
                "title": {"text": "Layer (0 = first)"} if column == 0 else None,
            },
        }
    )


def _axis(name: str, place: int) -> str:
    return name if place == 0 else f"{name}{place + 1}"


def _layout(name: str, place: int) -> str:
    return name if place == 0 else f"{name}{place + 1}"


def _flat(cells: pd.DataFrame, bars: pd.DataFrame, edge: float) -> pd.DataFrame:
    """What is drawn: cells of the maps, then bars of the strips."""
    maps = cells.rename(columns={"value": "mean"}).assign(drawn="map")
    return pd.concat([maps, bars.assign(drawn="strip", edge=edge)], ignore_index=True)
