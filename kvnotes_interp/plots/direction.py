"""A direction as a cause: recovery when it is added to the old prompt or taken out of the new one, by layer."""

from __future__ import annotations

from plotly import graph_objects as go

from kvnotes_interp.plots import style
from kvnotes_interp.plots.data import about, intervals, remember, rows_of
from kvnotes_interp.plots.decodability import PLACES
from kvnotes_interp.results import Result

ARMS = {
    "add": ("added to old", "solid", "circle"),
    "add_random": ("random, added", "dot", "circle-open"),
    "remove": ("taken out of new", "dash", "square"),
    "remove_random": ("random, taken out", "dashdot", "square-open"),
}


def draw(result: Result) -> go.Figure:
    """One line per place and arm; random vectors of the same length stand beside each."""
    rows = rows_of(result, "direction", part=None)
    table = intervals(result, rows, ["site", "arm", "layer"], sort=False)
    table["layer"] = table["layer"].astype(int)
    fig = style.figure(
        "Pushing along the difference of means",
        about(result, rows, more="Directions fit on other contents."),
        width=680,
        height=480,
        margin={"b": 150},
    )
    for site in dict.fromkeys(table["site"]):
        label, colour, _ = PLACES.get(site, (site.replace("_", " "), style.PURPLE, ""))
        for arm, (what, dash, symbol) in ARMS.items():
            own = table[(table["site"] == site) & (table["arm"] == arm)].sort_values("layer")
            if len(own):
                style.band(fig, own, x="layer", name=f"{label}: {what}", colour=colour, dash=dash, symbol=symbol)
    style.reference_lines(fig)
    fig.update_xaxes(title_text="Layer at whose input the vector is added")
    fig.update_yaxes(title_text=style.RECOVERY)
    fig.update_layout(legend={"orientation": "h", "x": 0, "xanchor": "left", "y": -0.2, "yanchor": "top"})
    return remember(fig, "direction", result, table)
