"""What survives compaction: decisions of derived against verbatim families, by compactor and ratio."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plotly import graph_objects as go

from kvnotes_interp.errors import InputError
from kvnotes_interp.plots import compaction, style
from kvnotes_interp.plots.data import about, intervals, remember, rows_of

if TYPE_CHECKING:
    from kvnotes_interp.results import Result

READOUTS = {
    "gap": "Score gap left (1 = full cache)",
    "decided": "Pairs still decided",
    "decided_new": "New prompt still decided",
}


def draw(result: Result, *, readout: str = "gap") -> go.Figure:
    """One panel per kind of family, one line per compactor; `readout` is "gap", "decided" or "decided_new"."""
    if readout not in READOUTS:
        raise InputError(f"readout={readout!r}: choose from {', '.join(READOUTS)}.")
    rows = rows_of(result, "survival", readout=readout)
    rows = rows[~rows["compactor"].isin(compaction.REFERENCES)]
    kind = result.pairs.drop_duplicates("pair").set_index("pair")["kind"]
    rows = rows.assign(kind=rows["pair"].map(kind).astype(str), ratio=rows["ratio"].astype(float))
    table = intervals(result, rows, ["kind", "compactor", "ratio"])
    kinds = [k for k in ("derived", "verbatim") if k in set(table["kind"])]
    fig = style.figure(
        f"What survives compaction: {READOUTS[readout].split(' (')[0].lower()}",
        about(result, rows),
        width=520 if len(kinds) == 1 else 900,
        height=470,
        margin={"b": 140},
        extra_top=16,
    )
    fig.set_subplots(1, len(kinds), subplot_titles=kinds, shared_yaxes=True, horizontal_spacing=0.04)
    ticks = sorted(table["ratio"].unique().tolist())
    for column, name in enumerate(kinds, 1):
        here = table[table["kind"] == name]
        for compactor, index in compaction.in_order(table["compactor"].tolist()):
            label, colour, dash, symbol = compaction.look(compactor, index)
            own = here[here["compactor"] == compactor].sort_values("ratio")
            fig.add_trace(
                go.Scatter(
                    x=own["ratio"].tolist(),
                    y=own["mean"].tolist(),
                    error_y={
                        "type": "data",
                        "symmetric": False,
                        "array": (own["high"] - own["mean"]).tolist(),
                        "arrayminus": (own["mean"] - own["low"]).tolist(),
                        "thickness": 1,
                        "width": 2,
                    },
                    name=label,
                    legendgroup=compactor,
                    showlegend=column == 1,
                    mode="lines+markers",
                    line={"color": colour, "dash": dash, "width": 2},
                    marker={"symbol": symbol, "size": 8, "color": colour, "line": {"color": colour, "width": 1}},
                    hovertemplate=f"{label}, {name}<br>%{{x:g}}x: %{{y:.3f}}<extra></extra>",
                ),
                row=1,
                col=column,
            )
        fig.update_xaxes(
            title_text="Slots before / slots after",
            type="log",
            tickvals=ticks,
            ticktext=[f"{t:g}x" for t in ticks],
            row=1,
            col=column,
        )
    for level in (0, 1):
        fig.add_hline(y=level, line={"color": style.GREY, "width": 1, "dash": "dot"}, layer="below")
    fig.update_yaxes(title_text=READOUTS[readout], row=1, col=1)
    fig.update_layout(legend={"orientation": "h", "x": 0, "xanchor": "left", "y": -0.2, "yanchor": "top"})
    compaction.make_room(fig, len(set(table["compactor"]) - set(compaction.REFERENCES)))
    return remember(fig, "survival", result, table)
