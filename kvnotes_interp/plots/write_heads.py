"""Write heads: how much each head's contribution to the aggregators changes between the two prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plotly import graph_objects as go

from kvnotes_interp.plots import _head_grid
from kvnotes_interp.plots.data import about, remember, rows_of

if TYPE_CHECKING:
    from kvnotes_interp.results import Result


def draw(result: Result) -> go.Figure:
    """Layer x head, mean over pairs. A ranking, not a cause: the cumulative curve patches these heads."""
    rows = rows_of(result, "write_head", part=None, readout="change")
    panel = _head_grid.Panel("Change at the aggregators", "Change / residual norm", rows, signed=False)
    fig, table = _head_grid.draw(
        "Which heads write at the aggregators",
        about(result, rows, interval="", more=f"Mean over {int(rows['size'].max())} aggregators."),
        [panel],
    )
    return remember(fig, "write_heads", result, table)
