"""Recovery when one layer alone is patched: at which depth the field is read, and at which the note is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plotly import graph_objects as go

from kvnotes_interp.plots import style
from kvnotes_interp.plots.data import about, intervals, remember, rows_of

if TYPE_CHECKING:
    from kvnotes_interp.results import Result

SITES = {"downstream": (style.BLUE, "solid", "circle"), "field": (style.RED, "dash", "square")}
PARTS = {"kv": "K and V", "k": "K only", "v": "V only"}


def draw(result: Result, *, part: str = "kv") -> go.Figure:
    """One line per site (field, downstream) with its 95 % band over the layers."""
    rows = rows_of(result, "layer", part=part)
    table = intervals(result, rows, ["site", "layer"])
    table["layer"] = table["layer"].astype(int)
    fig = style.figure(
        f"Recovery when a single layer is patched ({PARTS.get(part, part)})",
        about(result, rows),
        height=380,
        extra_top=22,
    )
    others = [s for s in sorted(set(table["site"])) if s not in SITES]
    for site in [*SITES, *others]:
        own = table[table["site"] == site]
        if len(own):
            colour, dash, symbol = SITES.get(site, (style.GREEN, "dot", "diamond"))
            style.band(fig, own, x="layer", name=site, colour=colour, dash=dash, symbol=symbol)
    fig.add_hline(y=0, line={"color": style.GREY, "width": 1, "dash": "dot"}, layer="below")
    top = int(table["layer"].max())
    fig.update_xaxes(title_text="Layer (0 = first)", range=[-0.5, top + 0.5], dtick=1 if top < 13 else None)
    fig.update_yaxes(title_text=style.RECOVERY)
    fig.update_layout(legend={"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"})
    return remember(fig, "layers", result, table)
