"""Quality against the time to compact: the frontier of speed and quality, at one ratio."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plotly import graph_objects as go

from kvnotes_interp.errors import InputError
from kvnotes_interp.plots import compaction, splicing, style
from kvnotes_interp.plots.data import about, remember, rows_of

if TYPE_CHECKING:
    from kvnotes_interp.results import Result


def draw(result: Result, *, readout: str = "micro_f1", ratio: float | None = None, unit: str = "prefills") -> go.Figure:
    """A readout against the mean of the questions' median times, on a log scale.

    Args:
        readout: one of `splicing.READOUTS`. ratio: only this one; None joins all ratios of a compactor.
        unit: "prefills" (time to compact over the time of a prefill, in the same run) or "seconds".
    """
    if unit not in ("prefills", "seconds"):
        raise InputError(f'unit={unit!r}: choose "prefills" or "seconds".')
    times = rows_of(result, "time", part=None, readout=unit)
    table = compaction.answers(result, readout)
    table["time"] = table["site"].map(times.groupby("site")["value"].mean()).astype(float)
    lines = ~table["compactor"].isin(compaction.REFERENCES)
    if ratio is not None:
        have = sorted(table.loc[lines, "ratio"].unique().tolist())
        if ratio not in have:
            raise InputError(f"ratio={ratio:g}: this result holds {', '.join(f'{r:g}' for r in have)}.")
        table = table[~lines | (table["ratio"] == ratio)].reset_index(drop=True)
    title = splicing.READOUTS[readout].replace("full recompute", "the full cache")
    fig = style.figure(
        f"{title} against the time to compact" + ("" if ratio is None else f", {ratio:g}x"),
        about(result, times, more="Points of a line are ratios." if ratio is None else ""),
        width=620,
        height=480,
        margin={"b": 140, "r": 90},
    )
    for name, index in compaction.in_order(table["compactor"].tolist()):
        label, colour, dash, symbol = compaction.look(name, index)
        own = table[table["compactor"] == name].sort_values("ratio")
        style.band(fig, own, x="time", name=label, colour=colour, dash=dash, symbol=symbol)
    compaction.reference_lines(fig, table)
    unit_text = "Time to compact (1 = the prefill)" if unit == "prefills" else "Seconds to compact"
    fig.update_xaxes(title_text=unit_text, type="log", tickvals=style.LOG_TICKS)
    fig.update_yaxes(title_text=title)
    fig.update_layout(legend={"orientation": "h", "x": 0, "xanchor": "left", "y": -0.2, "yanchor": "top"})
    compaction.make_room(fig, len(set(table["compactor"]) - set(compaction.REFERENCES)))
    return remember(fig, "compaction_time", result, table)
