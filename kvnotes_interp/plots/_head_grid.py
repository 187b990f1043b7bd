"""Layer x head maps, one panel per quantity, that share their axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from plotly import graph_objects as go

from kvnotes_interp.plots import style

_MARKED = 3  # heads whose numbers are written into a panel


@dataclass(frozen=True)
class Panel:
    """One map: rows with the columns layer, head, value; `signed` maps have white at 0 and reds above it."""

    title: str
    bar: str
    rows: pd.DataFrame
    signed: bool = True


def grid_of(rows: pd.DataFrame) -> np.ndarray:
    """Mean over pairs, `[layer head]`; NaN where a head was not measured."""
    mean = rows.groupby(["layer", "head"])["value"].mean()
    where = [(int(layer), int(head)) for layer, head in mean.index]
    out = np.full((max(w[0] for w in where) + 1, max(w[1] for w in where) + 1), np.nan)
    for (layer, head), value in zip(where, mean.to_numpy(float), strict=True):
        out[layer, head] = value
    return out


def draw(title: str, subtitle: str, panels: Sequence[Panel]) -> tuple[go.Figure, pd.DataFrame]:
    """The figure, first layer at the bottom, and its table with the columns panel, layer, head, mean."""
    grids = [grid_of(panel.rows) for panel in panels]
    n_layers, n_heads = (max(g.shape[i] for g in grids) for i in (0, 1))
    inner = int(min(max(200, 13 * n_layers), 460))
    width = int(min(max(style.COLUMN, 190 + len(panels) * max(230, 30 * n_heads)), 1300))
    fig = style.figure(title, subtitle, width=width, height=inner, margin={"l": 60, "r": 92, "b": 52}, extra_top=22)
    style.fit_height(fig, inner)
    gap = 0.16
    each = (1 - gap * (len(panels) - 1)) / len(panels)
    tables = []
    for index, (panel, grid) in enumerate(zip(panels, grids, strict=True)):
        start, stop = index * (each + gap), index * (each + gap) + each
        scale, low, high = _scale(grid, signed=panel.signed)
        axis = "" if index == 0 else str(index + 1)
        fig.add_trace(
            go.Heatmap(
                z=grid,
                x=list(range(grid.shape[1])),
                y=list(range(grid.shape[0])),
                xaxis=f"x{axis}",
                yaxis=f"y{axis}",
                colorscale=scale,
                zmin=low,
                zmax=high,
                xgap=0.8,
                ygap=0.8,
                hovertemplate=f"layer %{{y}}, head %{{x}}<br>{panel.bar.lower()} %{{z:.3f}}<extra></extra>",
                # A title along a bar between two panels would run into the second; theirs stands over the panel.
                colorbar=style.colour_bar(
                    panel.bar if len(panels) == 1 else "", x=stop + 0.008, len=1.0, y=0.5, nticks=5
                ),
            )
        )
        ticks = {"tickvals": list(range(0, n_heads, 1 if n_heads <= 12 else 4)), "range": [-0.6, n_heads - 0.4]}
        place = {"showgrid": False, "showline": False}
        fig.update_layout(
            {
                f"xaxis{axis}": {**ticks, **place, "domain": [start, stop], "anchor": f"y{axis}", "title": "Head"},
                f"yaxis{axis}": {
                    **place,
                    "range": [-0.6, n_layers - 0.4],
                    "anchor": f"x{axis}",
                    "title": "Layer (0 = first)" if index == 0 else None,
                },
            }
        )
        _name_strongest(fig, grid, axis)
        fig.add_annotation(
            text=panel.title if len(panels) == 1 else f"{panel.title}: {panel.bar.lower()}",
            x=start,
            y=1,
            xref="paper",
            yref="paper",
            xanchor="left",
            yanchor="bottom",
            showarrow=False,
            font={"size": 13},
        )
        layers, heads = np.nonzero(~np.isnan(grid))
        tables.append(pd.DataFrame({"panel": panel.title, "layer": layers, "head": heads, "mean": grid[layers, heads]}))
    return fig, pd.concat(tables, ignore_index=True)


def _scale(grid: np.ndarray, *, signed: bool) -> tuple[list[list[object]], float, float]:
    values = grid[~np.isnan(grid)].tolist()
    if signed:
        return style.recovery_scale(values)
    high = style.nice(max([*values, 1e-6]))
    return [[s / 20, style.recovery_colour(s / 20)] for s in range(21)], 0.0, high


def _name_strongest(fig: go.Figure, grid: np.ndarray, axis: str) -> None:
    """`layer.head` in the strongest cells."""
    strength = np.nan_to_num(np.abs(grid))
    for flat in np.argsort(-strength, axis=None, kind="stable")[:_MARKED]:
        layer, head = np.unravel_index(flat, grid.shape)
        if strength[layer, head] < 0.25 * strength.max() or strength.max() == 0:
            continue
        fig.add_annotation(
            text=f"{layer}.{head}",
            x=int(head),
            y=int(layer),
            xref=f"x{axis}",
            yref=f"y{axis}",
            showarrow=False,
            font={"size": 11, "color": "white" if strength[layer, head] > 0.55 * strength.max() else style.INK},
        )
