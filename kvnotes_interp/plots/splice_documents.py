"""Quality against the number of documents, per operator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plotly import graph_objects as go

from kvnotes_interp.plots import splicing, style
from kvnotes_interp.plots.data import about, remember, rows_of

if TYPE_CHECKING:
    from kvnotes_interp.results import Result


def draw(result: Result, *, readout: str = "micro_f1", share: float = 0.15, seam_repair: int | str = 4) -> go.Figure:
    """A readout against the number of documents.

    Args:
        readout: one of `splicing.READOUTS`.
        share, seam_repair: which setting to show of operators that were run with several; the nearest one there is.
    """
    splicing.check_readout(readout)
    rows = rows_of(result, "quality", readout="exact_match" if readout == "micro_f1" else readout)
    table = splicing.quality(result, readout, ["operator", "site", "documents"])
    table["documents"] = table["documents"].astype(int)
    chosen = [
        _nearest([str(site) for site in own["site"].unique()], share, seam_repair)
        for _, own in table.groupby("operator", sort=False)
    ]
    table = table[table["site"].isin(chosen)].reset_index(drop=True)
    fig = style.figure(
        f"{splicing.READOUTS[readout]} against the number of documents",
        about(result, rows),
        width=620,
        height=480,
        margin={"b": 140},
    )
    for index, operator in enumerate(splicing.in_order(table["operator"].tolist())):
        own = table[table["operator"] == operator].sort_values("documents")
        name, colour, dash, symbol = splicing.look(operator, index)
        setting = str(own["site"].iloc[0]).removeprefix(operator).removeprefix("@")
        label = f"{name} ({_text(setting)})" if setting else name
        style.band(fig, own, x="documents", name=label, colour=colour, dash=dash, symbol=symbol)
    ticks = sorted(table["documents"].unique().tolist())
    fig.update_xaxes(title_text="Documents", type="log", tickvals=ticks, ticktext=[str(t) for t in ticks])
    fig.update_yaxes(title_text=splicing.READOUTS[readout])
    fig.update_layout(legend={"orientation": "h", "x": 0, "xanchor": "left", "y": -0.2, "yanchor": "top"})
    return remember(fig, "splice_documents", result, table)


def _nearest(sites: list[str], share: float, seam_repair: int | str) -> str:
    """The site whose setting is nearest to the one asked for; the only one there is, whatever it is."""
    if len(sites) == 1:
        return sites[0]

    def distance(site: str) -> float:
        name, _, value = site.partition("@")
        wanted = seam_repair if name == "splice" else share
        if "all" in (value, wanted):
            return float(value != wanted) * 1e9
        return abs(float(value) - float(wanted)) if value else 0.0

    return min(sites, key=distance)


def _text(setting: str) -> str:
    return setting if setting == "all" else f"{float(setting):.0%}" if "." in setting else f"{setting} tokens"
