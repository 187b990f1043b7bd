"""Which tokens feed each slot that a Still compactor wrote, aggregator tokens marked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxtyping import Float
from torch import Tensor

from kvnotes_interp.errors import InputError
from kvnotes_interp.plots import style

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

MARK = "◂"


def draw(
    shares: Float[Tensor, "slot source"],
    tokens: Sequence[str],
    *,
    marked: Sequence[int] = (),
    title: str = "What each compact slot was made of",
) -> Figure:
    """A heat map, one row per token of the source and one column per compact slot; every column sums to 1.

    Args:
        shares: of one layer and KV head, from `operators.still.attribution`.
        tokens: texts of the source's slots. marked: indices of those to mark, such as the delimiters
            (`tasks.encode.is_delimiter`).

    The subtitle says what share of all slots comes from the marked tokens, beside their share of the tokens: without
    that base rate a mark means nothing.

    Raises InputError when tokens and shares do not match.
    """
    from plotly import graph_objects as go

    if shares.ndim != 2 or shares.shape[1] != len(tokens):
        raise InputError(
            f"shares of shape {tuple(shares.shape)} for {len(tokens)} tokens: give those of one layer and KV head, "
            "[slot source], and a text for every source."
        )
    chosen = sorted(set(marked))
    labels = [f"{MARK if i in chosen else ''}{i} {text!r}" for i, text in enumerate(tokens)]
    subtitle = f"{len(tokens)} tokens in {shares.shape[0]} slots."
    if chosen:
        part, base = float(shares[:, chosen].sum() / shares.sum()), len(chosen) / len(tokens)
        subtitle += f" Marked tokens feed {part:.2f} of the slots and are {base:.2f} of the tokens."
    height = min(1600, 160 + 14 * len(tokens))
    fig = style.figure(title, subtitle, width=760, height=height, margin={"l": 150})
    fig.add_trace(
        go.Heatmap(
            z=shares.T.tolist(),
            x=list(range(shares.shape[0])),
            y=labels,
            zmin=0,
            colorscale="Blues",
            colorbar={"title": "share"},
            hovertemplate="slot %{x}<br>%{y}<br>share %{z:.3f}<extra></extra>",
        )
    )
    fig.update_xaxes(title_text="Compact slot", dtick=max(1, shares.shape[0] // 10))
    fig.update_yaxes(autorange="reversed", tickfont={"size": 10}, dtick=1)
    return fig
