"""The staleness signature: what a probe of clean runs reads in the decision token on top of other caches, by layer."""

from __future__ import annotations

from plotly import graph_objects as go

from kvnotes_interp.plots import style
from kvnotes_interp.plots.data import about, intervals, remember, rows_of
from kvnotes_interp.plots.decodability import chosen
from kvnotes_interp.results import Result

STATES = {
    "stale": ("stale", style.GREY, "square"),
    "field_only": ("field only", style.RED, "circle"),
    "downstream_only": ("downstream only", style.BLUE, "circle"),
    "oracle": ("oracle", style.INK, "diamond"),
}
_SPARE = (style.GREEN, style.ORANGE, style.PURPLE, style.SKY)


def draw(result: Result, *, classifier: str | None = None) -> go.Figure:
    """Share of pairs in which the new conclusion is read, per cache state, with 95 % bands."""
    rows = rows_of(result, "staleness", part=None, readout="reads_new")
    name = chosen("classifier", classifier, list(dict.fromkeys(rows["classifier"])))
    rows = rows[rows["classifier"] == name]
    table = intervals(result, rows, ["site", "layer"], sort=False)
    table["layer"] = table["layer"].astype(int)
    fig = style.figure(
        "What the decision token holds to be true, by cache",
        about(result, rows, more=f"Probe ({name.replace('_', ' ')}) of clean runs of other contents."),
        width=600,
        height=420,
        margin={"b": 100},
    )
    others = [site for site in dict.fromkeys(table["site"]) if site not in STATES]
    spare = {site: (site.replace("_", " "), _SPARE[i % 4], "triangle-up") for i, site in enumerate(others)}
    for site, (label, colour, symbol) in (STATES | spare).items():
        own = table[table["site"] == site].sort_values("layer")
        if len(own):
            style.band(fig, own, x="layer", name=label, colour=colour, symbol=symbol)
    fig.add_hline(y=0.5, line={"color": style.GREY, "width": 1, "dash": "dot"}, layer="below")
    fig.update_xaxes(title_text="Layer (0 = embedding, last = before the final norm)")
    fig.update_yaxes(title_text="New conclusion read (share)", range=[-0.04, 1.04])
    fig.update_layout(legend={"orientation": "h", "x": 0, "xanchor": "left", "y": -0.22, "yanchor": "top"})
    return remember(fig, "staleness", result, table)
