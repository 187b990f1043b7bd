"""Token strip: the prompt as text, each token coloured by what patching it alone recovers."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

import pandas as pd
from plotly import graph_objects as go

from kvnotes_interp.plots import style
from kvnotes_interp.plots.data import model_name, pair_row, remember, rows_of
from kvnotes_interp.plots.tokens import cells, label, visible

if TYPE_CHECKING:
    from kvnotes_interp.results import Result

CELL, LINE = 8.6, 30  # pixels of one monospace character at size 14, and of one line of text
PAD, GAP = 0.5, 0.25  # blank inside and between the boxes, in characters


def draw(result: Result, *, pair: str | None = None, part: str = "kv") -> go.Figure:
    """One pair's prompt. `pair` is its key; by default the pair whose score gap is the median."""
    rows = rows_of(result, "position", part=part)
    chosen = pair_row(result, rows, pair)
    rows = rows[rows["pair"] == chosen["pair"]]
    values = {int(p): float(v) for p, v in zip(rows["position"], rows["value"], strict=True)}
    table = _layout(chosen, values, width_cells=(style.WIDE - 110) / CELL)
    scale, low, reach = style.recovery_scale(list(values.values()))
    n_lines = int(table["line"].max()) + 1
    what = {"kv": "K and V", "k": "K", "v": "V"}.get(part, part)
    name = model_name(result)
    fig = style.figure(
        f"Recovery when one token's {what} {'are' if part == 'kv' else 'is'} patched at all layers",
        (f"{name}, " if name else "") + f"pair {chosen['pair']}: {_field(chosen)}, "
        f"answer {label(chosen['answer_old'])} → {label(chosen['answer_new'])} "
        f"(score {chosen['s_old']:.2f} → {chosen['s_new']:.2f}). Outlined: the field. Grey: not patched.",
        width=style.WIDE,
        height=100,
        margin={"l": 16, "r": 94, "b": 14},
    )
    # At least four lines high, or the colour bar has no room for its numbers.
    inner = max(n_lines * LINE, 4 * LINE)
    style.fit_height(fig, inner)
    for row in table.itertuples(index=False):
        _box(fig, row, reach)
    fig.add_trace(
        go.Scatter(
            x=(table["x0"] + table["x1"]) / 2,
            y=table["line"],
            mode="markers",
            marker={
                "size": 22,
                "opacity": 0,
                "color": table["value"].fillna(0.0),
                "colorscale": scale,
                "cmin": low,
                "cmax": reach,
                "showscale": False,
            },
            text=[_hover(row) for row in table.itertuples(index=False)],
            hovertemplate="%{text}<extra></extra>",
            showlegend=False,
        )
    )
    # The bar hangs on a trace of its own, since the opacity of the markers would fade it.
    fig.add_trace(
        go.Scatter(
            x=[None],
            y=[None],
            mode="markers",
            marker={
                "color": [0.0],
                "colorscale": scale,
                "cmin": low,
                "cmax": reach,
                "showscale": True,
                "colorbar": style.colour_bar(
                    "Recovery", x=1.01, y=1, yanchor="top", lenmode="pixels", len=min(inner, 220), nticks=5
                ),
            },
            showlegend=False,
            hoverinfo="skip",
        )
    )
    width = (style.WIDE - 110) / CELL
    # Lines are counted from the top; with few of them the text stands in the middle of the bar's height.
    spare = (inner / LINE - n_lines) / 2
    hidden = {"visible": False, "fixedrange": True}
    fig.update_xaxes(range=[-0.3, width], **hidden)
    fig.update_yaxes(range=[n_lines - 0.5 + spare, -0.5 - spare], **hidden)
    return remember(fig, "strip", result, table.drop(columns=["x0", "x1"]))


def _layout(chosen: pd.Series, values: dict[int, float], *, width_cells: float) -> pd.DataFrame:
    """Place every token like running text: a newline token ends its line, a full line wraps."""
    start, stop = int(chosen["field_start"]), int(chosen["field_stop"])
    x, line, out = 0.0, 0, []
    for index, token in enumerate(chosen["tokens"]):
        text = visible(token)
        width = cells(text) + 2 * PAD
        if x and x + width > width_cells:
            x, line = 0.0, line + 1
        out.append(
            {
                "position": index,
                "token": token,
                "token_new": chosen["tokens_new"][index],
                "region": chosen["regions"][index],
                "value": values.get(index),
                "field": start <= index < stop,
                "line": line,
                "x0": x,
                "x1": x + width,
            }
        )
        x += width + GAP
        if token.endswith("\n"):
            x, line = 0.0, line + 1
    return pd.DataFrame(out).astype({"value": "float64"})


def _box(fig: go.Figure, row: tuple, reach: float) -> None:
    """The coloured box of one token with its text; a token that was not patched has grey text and no box."""
    patched = not pd.isna(row.value)
    if patched or row.field:
        fig.add_shape(
            type="rect",
            x0=row.x0,
            x1=row.x1,
            y0=row.line - 0.38,
            y1=row.line + 0.38,
            fillcolor=style.recovery_colour(row.value, reach) if patched else "white",
            line={"color": style.INK if row.field else style.PALE, "width": 2.5 if row.field else 0.6},
            layer="below",
        )
    dark = patched and abs(row.value) > 0.6 * reach
    fig.add_annotation(
        x=(row.x0 + row.x1) / 2,
        y=row.line,
        text=escape(visible(row.token), quote=False),
        showarrow=False,
        font={"family": style.MONO, "size": 14, "color": "white" if dark else style.INK if patched else "#8a8a8a"},
    )


def _hover(row: tuple) -> str:
    changed = row.token != row.token_new
    text = escape(visible(row.token) + (f" → {visible(row.token_new)}" if changed else ""), quote=False)
    value = "not patched" if pd.isna(row.value) else f"recovery {row.value:.3f}"
    return f"<b>{text}</b><br>{value}<br>position {row.position}, {row.region}"


def _field(chosen: pd.Series) -> str:
    """`John → Mary`."""
    span = slice(int(chosen["field_start"]), int(chosen["field_stop"]))
    old, new = (visible("".join(chosen[name][span])) for name in ("tokens", "tokens_new"))
    return escape(f"{old} → {new}", quote=False)
