"""Quality against the number of passes that a context was compacted in, per compactor, one panel per ratio."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plotly import graph_objects as go

from kvnotes_interp.errors import InputError
from kvnotes_interp.plots import compaction, splicing, style
from kvnotes_interp.plots.data import about, remember, rows_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from kvnotes_interp.results import Result

_PANEL = 230  # pixels of one panel, and of the axis titles and labels beside them
_BESIDE = 170
_APART = 1.035  # factor between neighbouring lines at one number of passes, so that their bars do not hide each other


def draw(result: Result, *, readout: str = "micro_f1", ratios: Sequence[float] | None = None) -> go.Figure:
    """A readout (one of `splicing.READOUTS`) against passes. `ratios`: only these panels.

    The bytes at the end are the same along a line. Bars: 95 % bootstrap over contents.
    """
    table, panels = passes_table(result, readout), {}
    for name, own in table[~table["compactor"].isin(compaction.REFERENCES)].groupby("panel", sort=False):
        panels[str(name)] = float(own["ratio"].iloc[0])
    if ratios is not None:
        chosen = {name: ratio for name, ratio in panels.items() if ratio in ratios}
        if len(chosen) < len(set(ratios)):
            have = ", ".join(f"{ratio:g}" for ratio in panels.values())
            raise InputError(f"ratios={tuple(ratios)}: this result holds {have}.")
        panels = chosen
    title = splicing.READOUTS[readout].replace("full recompute", "the full cache")
    rows = rows_of(result, "compaction", readout="exact_match" if readout == "micro_f1" else readout)
    fig = style.figure(
        f"{title} after repeated compaction",
        about(result, rows, interval="Bars"),
        width=max(style.COLUMN, _PANEL * len(panels) + _BESIDE),
        height=470,
        margin={"b": 150, "r": 100},
        extra_top=20,
    )
    fig.set_subplots(1, len(panels), subplot_titles=list(panels), shared_yaxes=True, horizontal_spacing=0.03)
    names = compaction.in_order(table["compactor"].tolist())
    for column, panel in enumerate(panels, 1):
        here = table[table["panel"] == panel]
        for place, (name, index) in enumerate(names):
            own = here[here["compactor"] == name].sort_values("passes")
            aside = _APART ** (place - (len(names) - 1) / 2)
            fig.add_trace(_line(own, name, index, aside=aside, legend=column == 1), row=1, col=column)
        ticks = sorted(here["passes"].unique().tolist())
        fig.update_xaxes(
            title_text="Passes", type="log", tickvals=ticks, ticktext=[f"{n:g}" for n in ticks], row=1, col=column
        )
        _references(fig, table, column, labelled=column == len(panels))
    fig.update_yaxes(title_text=title, row=1, col=1)
    fig.update_layout(legend={"orientation": "h", "x": 0, "xanchor": "left", "y": -0.27, "yanchor": "top"})
    compaction.make_room(fig, len(set(table["compactor"]) - set(compaction.REFERENCES)))
    return remember(fig, "compaction_passes", result, table)


def passes_table(result: Result, readout: str) -> pd.DataFrame:
    """Mean per arm and number of passes, with its interval; `panel` is "8x", or "64 slots" of an absolute size."""
    splicing.check_readout(readout)
    table = splicing.quality(result, readout, ["site", "compactor", "passes"], view="compaction")
    frame = result.frame[result.frame["view"] == "compaction"]
    table["ratio"] = table["site"].map(frame.groupby("site")["ratio"].median()).astype(float)
    table["passes"] = table["passes"].astype(int)
    ends = table["site"].str.extract(r"_(\d+)slots$")[0]
    sizes = [f"{n} slots" if isinstance(n, str) else f"{r:g}x" for n, r in zip(ends, table["ratio"], strict=True)]
    return table.assign(panel=sizes).sort_values(["ratio", "site", "passes"]).reset_index(drop=True)


def _line(own: pd.DataFrame, compactor: str, index: int, *, aside: float, legend: bool) -> go.Scatter:
    label, colour, dash, symbol = compaction.look(compactor, index)
    return go.Scatter(
        x=(own["passes"] * aside).tolist(),
        customdata=own["passes"].tolist(),
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
        showlegend=legend,
        mode="lines+markers",
        line={"color": colour, "dash": dash, "width": 2},
        marker={"symbol": symbol, "size": 8, "color": colour, "line": {"color": colour, "width": 1}},
        hovertemplate=f"{label}<br>%{{customdata}} passes: %{{y:.3f}}<extra></extra>",
    )


def _references(fig: go.Figure, table: pd.DataFrame, column: int, *, labelled: bool) -> None:
    """Dotted lines for the full cache and for the prompt without documents, named beside the last panel."""
    for site, text in (("full", "full cache"), ("no_context", "no documents")):
        value = table.loc[table["site"] == site, "mean"]
        if not len(value):
            continue
        font = {"size": 12, "color": style.GREY}
        words = {"text": text, "font": font, "xanchor": "left", "yanchor": "middle"}
        fig.add_hline(
            y=float(value.iloc[0]),
            line={"color": style.GREY, "width": 1, "dash": "dot"},
            layer="below",
            row=1,  # type: ignore[arg-type]
            col=column,  # type: ignore[arg-type]
            **({"annotation": words, "annotation_position": "right"} if labelled else {}),
        )
