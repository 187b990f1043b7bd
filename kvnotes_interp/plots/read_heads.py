"""Read heads: what each head adds to the change of the score, and what patching it alone at the decision recovers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plotly import graph_objects as go

from kvnotes_interp.errors import InputError
from kvnotes_interp.plots import _head_grid
from kvnotes_interp.plots.data import about, remember, rows_of

if TYPE_CHECKING:
    from kvnotes_interp.results import Result


def draw(result: Result, *, patched: bool = True) -> go.Figure:
    """Layer x head: direct logit attribution of all pairs and, where it was measured, recovery of the patched head.

    Args:
        patched: add the panel of patched heads.
    """
    shares = rows_of(result, "read_head", part=None, readout="dla_share")
    panels = [_head_grid.Panel("Attribution", "Share of the change", shares)]
    more = "Heads of the decision token."
    if patched and (rows := _patched(result)) is not None:
        panels.append(_head_grid.Panel("Patched alone", "Recovery", rows))
        more += f" Patched alone into the old run: n = {rows['pair'].nunique()}."
    fig, table = _head_grid.draw(
        "Which heads bring the conclusion to the decision", about(result, shares, interval="", more=more), panels
    )
    return remember(fig, "read_heads", result, table)


def _patched(result: Result):
    try:
        return rows_of(result, "read_head", part=None)
    except InputError:
        return None
