"""Held-out accuracy of linear probes by layer: a line per place, controls dashed, write and commit depth marked."""

from __future__ import annotations

import pandas as pd
from plotly import graph_objects as go

from kvnotes_interp.errors import InputError, nearest
from kvnotes_interp.plots import style
from kvnotes_interp.plots.data import about, intervals, remember, rows_of
from kvnotes_interp.results import Result

PLACES = {
    "before": ("before the field", style.GREY, "square"),
    "field": ("field", style.INK, "circle"),
    "rule_end": ("end of the rule", style.BLUE, "diamond"),
    "aggregator": ("last delimiter", style.ORANGE, "circle"),
    "decision": ("decision token", style.GREEN, "circle"),
}
CONTROLS = {
    "shuffled": ("shuffled labels (all places)", style.GREY),
    "random_direction": ("random direction (decision)", style.RED),
    "field_identity": ("field's value (decision)", style.PURPLE),
}
PARTS = {"residual": "residual stream", "keys": "keys, un-rotated", "values": "values"}
_SPARE = ((style.SKY, "triangle-up"), (style.PURPLE, "triangle-down"), (style.BLUE, "x"))


def curves(result: Result, *, feature: str | None = None, classifier: str | None = None) -> pd.DataFrame:
    """Columns readout, site, layer, mean, low, high, n, n_effective; controls for the places that are drawn.

    `feature` and `classifier` default to the first that was measured.
    """
    rows = rows_of(result, "decodability", part=None, readout="accuracy")
    part = chosen("feature", feature, list(dict.fromkeys(rows["part"])))
    name = chosen("classifier", classifier, list(dict.fromkeys(rows["classifier"])))
    rows = rows[(rows["part"] == part) & (rows["classifier"] == name)]
    tables = [intervals(result, rows, ["site", "layer"], sort=False).assign(readout="accuracy")]
    everything = result.frame[(result.frame["view"] == "decodability") & (result.frame["part"] == part)]
    for readout in CONTROLS:
        here = everything[(everything["readout"] == readout) & everything["pair"].isin(set(rows["pair"]))]
        here = here[here["classifier"] == name] if readout == "shuffled" else here[here["site"] == "decision"]
        if len(here):
            tables.append(
                intervals(result, here, ["layer"]).assign(
                    readout=readout, site="all" if readout == "shuffled" else "decision"
                )
            )
    table = pd.concat(tables, ignore_index=True)
    table["layer"] = table["layer"].astype(int)
    return table.assign(part=part, classifier=name)


def chosen(kind: str, value: str | None, known: list[str]) -> str:
    """`value`, or the first of `known`. Raises InputError for one that was not measured."""
    if value is not None and value not in known:
        raise InputError(
            f"{kind}={value!r} was not measured; this result holds {', '.join(known)}.{nearest(value, known)}"
        )
    return known[0] if value is None else value


def draw(result: Result, *, feature: str | None = None, classifier: str | None = None) -> go.Figure:
    """Accuracy by layer with 95 % bands; dashed lines are what the same procedure reads where there is nothing."""
    rows = rows_of(result, "decodability", part=None, readout="accuracy")
    table = curves(result, feature=feature, classifier=classifier)
    part, name = str(table["part"].iloc[0]), str(table["classifier"].iloc[0]).replace("_", " ")
    fig = style.figure(
        f"Where the conclusion can be read: {PARTS.get(part, part)}, {name} probe",
        about(result, rows, more="Held out by content; dashed: controls."),
        width=720,
        height=500,
        margin={"b": 150, "r": 30},
        extra_top=24,
    )
    for readout, (label, colour) in CONTROLS.items():
        own = table[table["readout"] == readout].sort_values("layer")
        if len(own):
            _dashed(fig, own, label, colour)
    mine = table[table["readout"] == "accuracy"]
    others = [site for site in dict.fromkeys(mine["site"]) if site not in PLACES]
    spare = {site: (site.replace("aggregator:", "delimiter "), *_SPARE[i % 3]) for i, site in enumerate(others)}
    for site, (label, colour, symbol) in (PLACES | spare).items():
        own = mine[mine["site"] == site].sort_values("layer")
        if len(own):
            style.band(fig, own, x="layer", name=label, colour=colour, symbol=symbol)
    _depths(fig, result, mine)
    for level in (0.5, 1.0):
        fig.add_hline(y=level, line={"color": style.GREY, "width": 1, "dash": "dot"}, layer="below")
    top = max(int(table["layer"].max()), 1)
    fig.update_xaxes(title_text="Layer (0 = embedding, last = before the final norm)", range=[-0.4, top + 0.4])
    fig.update_yaxes(title_text="Held-out accuracy (chance 0.5)", range=[0.0, 1.04])
    fig.update_layout(legend={"orientation": "h", "x": 0, "xanchor": "left", "y": -0.2, "yanchor": "top"})
    return remember(fig, "decodability", result, table)


def _dashed(fig: go.Figure, table: pd.DataFrame, name: str, colour: str) -> None:
    fig.add_trace(
        go.Scatter(
            x=list(table["layer"]),
            y=list(table["mean"]),
            name=name,
            mode="lines",
            line={"color": colour, "width": 1.5, "dash": "dash"},
            customdata=table[["low", "high"]].to_numpy(dtype=float),
            hovertemplate=f"{name}<br>%{{x}}: %{{y:.3f}}<br>95%: %{{customdata[0]:.3f}} to "
            "%{customdata[1]:.3f}<extra></extra>",
        )
    )


def _depths(fig: go.Figure, result: Result, table: pd.DataFrame) -> None:
    """Write depth (accuracy 0.9 at the last delimiter) and commit depth (logit lens), as the run's summary has them."""
    margins = result.frame[(result.frame["view"] == "lens") & (result.frame["readout"] == "margin_new")]
    if margins.empty or table.empty:
        return
    n_layers = int(margins["layer"].max())
    known = result.summary().rows.set_index("quantity")["mean"]
    for name, colour, height in (("write_depth", style.ORANGE, 1.0), ("commit_depth", style.GREEN, 1.055)):
        depth = float(known.get(name, float("nan")))
        if depth == depth:
            fig.add_vline(x=depth * n_layers, line={"color": colour, "width": 1.5, "dash": "dot"}, layer="below")
            fig.add_annotation(
                x=depth * n_layers,
                y=height,
                yref="paper",
                yanchor="bottom",
                xanchor="center",
                text=f"{name.replace('_', ' ')} {depth:.2f}",
                showarrow=False,
                font={"size": 12, "color": colour},
            )
