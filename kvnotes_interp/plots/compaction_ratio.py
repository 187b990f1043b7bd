"""Quality against the compression ratio, per compactor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plotly import graph_objects as go

from kvnotes_interp.plots import compaction, splicing, style
from kvnotes_interp.plots.data import about, remember, rows_of

if TYPE_CHECKING:
    from kvnotes_interp.results import Result


def draw(result: Result, *, readout: str = "micro_f1") -> go.Figure:
    """A readout (one of `splicing.READOUTS`) against slots before over slots after."""
    table = compaction.answers(result, readout)
    title = splicing.READOUTS[readout].replace("full recompute", "the full cache")
    rows = rows_of(result, "compaction", readout="exact_match" if readout == "micro_f1" else readout)
    fig = style.figure(
        f"{title} after compaction", about(result, rows), width=620, height=480, margin={"b": 140, "r": 90}
    )
    for name, index in compaction.in_order(table["compactor"].tolist()):
        label, colour, dash, symbol = compaction.look(name, index)
        own = table[table["compactor"] == name].sort_values("ratio")
        style.band(fig, own, x="ratio", name=label, colour=colour, dash=dash, symbol=symbol)
    compaction.reference_lines(fig, table)
    ticks = sorted(table.loc[~table["compactor"].isin(compaction.REFERENCES), "ratio"].unique().tolist())
    fig.update_xaxes(
        title_text="Slots before / slots after", type="log", tickvals=ticks, ticktext=[f"{t:g}x" for t in ticks]
    )
    fig.update_yaxes(title_text=title)
    fig.update_layout(legend={"orientation": "h", "x": 0, "xanchor": "left", "y": -0.2, "yanchor": "top"})
    compaction.make_room(fig, len(set(table["compactor"]) - set(compaction.REFERENCES)))
    return remember(fig, "compaction_ratio", result, table)
