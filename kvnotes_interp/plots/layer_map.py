"""The memoization map: recovery when the K and V of one token at one layer are patched, layer x position."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from plotly import graph_objects as go

from kvnotes_interp.plots import style
from kvnotes_interp.plots.data import about, has, model_name, pair_row, remember, rows_of
from kvnotes_interp.plots.tokens import label, visible

if TYPE_CHECKING:
    from kvnotes_interp.results import Result

PARTS = {"kv": "K and V", "k": "K", "v": "V"}


def draw(result: Result, *, pair: str | None = None, part: str = "kv", profile: bool = True) -> go.Figure:
    """Heat map with the first layer at the bottom.

    Args:
        pair: one pair by its key; None averages over pairs aligned by anchor where most pairs share most anchors,
            and shows the median pair otherwise.
        part: "kv", "k" or "v".
        profile: bars above the map with the recovery of the same token patched at all layers, where it was measured.
    """
    rows = rows_of(result, "layer_position", part=part)
    columns = None if pair is not None else _shared_columns(result, rows)
    if columns is None:
        chosen = pair_row(result, rows, pair)
        rows = rows[rows["pair"] == chosen["pair"]]
        columns = _own_columns(chosen, rows)
        subtitle = ", ".join(x for x in (model_name(result), f"pair {chosen['pair']}") if x) + "."
    else:
        rows = rows[rows["anchor"].isin(set(columns["anchor"]))]
        subtitle = about(result, rows, interval="", more="Mean over pairs, aligned by place in the template.")
        if columns["varies"].any():
            subtitle += " ‹…›: the word differs between pairs."
    grid, layers = _grid(rows, columns)
    bars = _profile(result, rows, columns, part) if profile and has(result, "position") else None
    fig = _canvas(
        f"Where the answer is kept: {PARTS.get(part, part)} of one token at one layer patched", subtitle, grid
    )
    _heat(fig, grid, layers, columns)
    if bars is not None:
        _bars(fig, bars, columns)
    _regions(fig, columns, len(layers), top=bars is not None)
    _axes(fig, columns, layers, bars=bars is not None)
    flat = columns.loc[columns.index.repeat(len(layers)), ["anchor", "token", "region"]].reset_index(drop=True)
    flat["layer"] = layers * len(columns)
    flat["mean"] = grid.T.reshape(-1)
    return remember(fig, "map", result, flat)


def _shared_columns(result: Result, rows: pd.DataFrame) -> pd.DataFrame | None:
    """The anchors that at least half of the pairs have, in the order of the prompt; None when pairs hardly align."""
    cells = rows.drop_duplicates(["pair", "anchor"])
    n_pairs = cells["pair"].nunique()
    if n_pairs < 2 or (cells["anchor"] == "").any():
        return None
    counts = cells["anchor"].value_counts()
    kept = counts[counts >= n_pairs / 2].index
    # Anchors shared by most pairs must make up most of what a typical pair has, or the mean is one of fragments.
    if len(kept) < 0.6 * len(cells) / n_pairs:
        return None
    spans = result.pairs.set_index("pair")
    out = []
    for anchor, group in cells[cells["anchor"].isin(set(kept))].groupby("anchor", sort=False):
        # Counted from the end: the tokens of a long value push everything after them, not what stands before it.
        place = (group["pair"].map(spans["length"]).astype(float) - group["position"].astype(float)).median()
        token, count = Counter(group["token"]).most_common(1)[0]
        varies = count < 0.6 * len(group)
        slot = str(anchor).rpartition(":")[0]
        out.append(
            {
                "anchor": anchor,
                "place": -place,
                "token": token,
                "varies": varies,
                "label": f"‹{label(slot)}›" if varies and slot and not slot.isdigit() else label(token),
                "region": Counter(group["region"]).most_common(1)[0][0],
            }
        )
    return pd.DataFrame(out).sort_values(["place", "anchor"], kind="stable").reset_index(drop=True)


def _own_columns(chosen: pd.Series, rows: pd.DataFrame) -> pd.DataFrame:
    """The patched positions of one pair."""
    out = []
    for position in sorted({int(p) for p in rows["position"]}):
        token = chosen["tokens"][position]
        out.append(
            {
                "anchor": chosen["anchors"][position] or str(position),
                "place": position,
                "token": token,
                "varies": False,
                "label": label(token),
                "region": chosen["regions"][position],
            }
        )
    return pd.DataFrame(out)


def _grid(rows: pd.DataFrame, columns: pd.DataFrame) -> tuple[np.ndarray, list[int]]:
    """Mean recovery [layer column], and the layers."""
    layers = sorted({int(v) for v in rows["layer"]})
    key = "position" if columns["place"].ge(0).all() else "anchor"
    order = columns["place"] if key == "position" else columns["anchor"]
    mean = rows.groupby([key, "layer"])["value"].mean()
    grid = np.full((len(layers), len(columns)), np.nan)
    for x, name in enumerate(order):
        for y, layer in enumerate(layers):
            grid[y, x] = mean.get((name, layer), np.nan)
    return grid, layers


def _profile(result: Result, rows: pd.DataFrame, columns: pd.DataFrame, part: str) -> list[float] | None:
    position = rows_of(result, "position", part=None)
    position = position[(position["part"] == part) & position["pair"].isin(set(rows["pair"]))]
    if not len(position):
        return None
    single = columns["place"].ge(0).all()
    mean = position.groupby("position" if single else "anchor")["value"].mean()
    return [float(mean.get(name, np.nan)) for name in columns["place" if single else "anchor"]]


def _canvas(title: str, subtitle: str, grid: np.ndarray) -> go.Figure:
    n_layers, n_columns = grid.shape
    width = int(min(max(620, 150 + 21 * n_columns), 1400))
    height = int(min(max(190, 15 * n_layers), 420))
    fig = style.figure(title, subtitle, width=width, height=height, margin={"l": 64, "r": 84, "b": 110}, extra_top=26)
    style.fit_height(fig, height)
    return fig


def _heat(fig: go.Figure, grid: np.ndarray, layers: list[int], columns: pd.DataFrame) -> None:
    scale, low, reach = style.recovery_scale(list(grid.reshape(-1)))
    hover = [[f"{visible(t)} ({r})" for t, r in zip(columns["token"], columns["region"], strict=True)]] * len(layers)
    fig.add_trace(
        go.Heatmap(
            x=list(range(len(columns))),
            y=layers,
            z=grid,
            colorscale=scale,
            zmin=low,
            zmax=reach,
            xgap=0.6,
            ygap=0.6,
            text=hover,
            hovertemplate="%{text}, layer %{y}<br>recovery %{z:.3f}<extra></extra>",
            colorbar=style.colour_bar("Recovery", x=1.01, len=0.78, y=0, yanchor="bottom", nticks=6),
        )
    )


def _bars(fig: go.Figure, bars: list[float], columns: pd.DataFrame) -> None:
    fig.add_trace(
        go.Bar(
            x=list(range(len(bars))),
            y=bars,
            yaxis="y2",
            width=0.8,
            marker={"color": [style.REGION_COLOURS.get(r, style.GREY) for r in columns["region"]]},
            text=[visible(t) for t in columns["token"]],
            textposition="none",
            hovertemplate="%{text}, all layers<br>recovery %{y:.3f}<extra></extra>",
            showlegend=False,
        )
    )


def _regions(fig: go.Figure, columns: pd.DataFrame, n_layers: int, *, top: bool) -> None:
    """A thin strip over the map in the colours of the regions, and an outline round the field."""
    edge = 0.745 if top else 0.985
    regions = list(columns["region"])
    start = 0
    for index in range(1, len(regions) + 1):
        if index < len(regions) and regions[index] == regions[start]:
            continue
        colour = style.REGION_COLOURS.get(regions[start], style.GREY)
        fig.add_shape(
            type="rect",
            x0=start - 0.5,
            x1=index - 0.5,
            y0=edge - 0.03,
            y1=edge,
            yref="paper",
            fillcolor=colour,
            line={"color": "white", "width": 1},
        )
        if regions[start] == "field":
            fig.add_shape(
                type="rect",
                x0=start - 0.5,
                x1=index - 0.5,
                y0=0,
                y1=edge - 0.035,
                yref="paper",
                line={"color": style.INK, "width": 2},
            )
        start = index
    for region in dict.fromkeys(regions):
        colour = style.REGION_COLOURS.get(region, style.GREY)
        fig.add_trace(
            go.Scatter(
                x=[None],
                y=[None],
                mode="markers",
                name=region,
                marker={"symbol": "square", "size": 11, "color": colour},
            )
        )


def _axes(fig: go.Figure, columns: pd.DataFrame, layers: list[int], *, bars: bool) -> None:
    shown = _labelled(fig, columns)
    size = 13 if len(columns) <= 45 else 12
    text = [
        f"<b>{columns['label'][i]}</b>" if columns["region"][i] in ("field", "delimiter") else columns["label"][i]
        for i in shown
    ]
    fig.update_xaxes(
        tickvals=shown,
        ticktext=text,
        tickangle=-90,
        range=[-0.6, len(columns) - 0.4],
        showgrid=False,
        showline=False,
        tickfont={"family": style.MONO, "size": size},
        title=None,
        anchor="y",
    )
    step = next(s for s in (1, 2, 3, 4, 5, 8, 10, 16, 20) if len(layers) / s <= 12)
    fig.update_layout(
        yaxis={
            "title_text": "Layer (0 = first)",
            "domain": [0, 0.705 if bars else 0.945],
            "range": [layers[0] - 0.6, layers[-1] + 0.6],
            "tickvals": layers[::step],
            "showgrid": False,
            "showline": False,
        },
        legend={"orientation": "h", "x": 0, "xanchor": "left", "y": 1.0, "yanchor": "bottom"},
    )
    if bars:
        fig.update_layout(
            yaxis2={
                "domain": [0.78, 1.0],
                "anchor": "x",
                "title": {"text": "All<br>layers", "font": {"size": 13}},
                "nticks": 4,
                "zeroline": True,
                "zerolinecolor": style.GREY,
            }
        )


def _labelled(fig: go.Figure, columns: pd.DataFrame) -> list[int]:
    """Which columns get a label: all where they fit; in a long prompt the strongest, a label's width apart."""
    n = len(columns)
    per_column = (fig.layout.width - 150) / n
    if per_column >= 15:
        return list(range(n))
    grid = np.asarray(fig.data[0].z, dtype=float)
    strength = np.nan_to_num(np.nanmax(np.abs(np.where(np.isnan(grid), 0.0, grid)), axis=0))
    strong = strength >= 0.08 * strength.max()
    field = [i for i, r in enumerate(columns["region"]) if r == "field"]
    strength[field], strong[field] = np.inf, True
    apart, chosen = 15 / per_column, []
    for index in np.argsort(-strength, kind="stable"):
        if strong[index] and all(abs(index - other) >= apart for other in chosen):
            chosen.append(int(index))
    return sorted(chosen)
