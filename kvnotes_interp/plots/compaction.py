"""What the figures of compaction runs share: looks of the compactors, and their quality with intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from kvnotes_interp.plots import splicing, style

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from kvnotes_interp.results import Result

# compactor -> name, colour, dash, marker; the order is that of the legend.
LOOKS = {
    "still": ("Still", style.PURPLE, "solid", "star"),
    "scorer": ("trained choice", style.PURPLE, "dash", "cross"),
    "trained_cache": ("trained cache", style.INK, "dash", "hexagon"),
    "attention_matching": ("Attention Matching", style.BLUE, "solid", "circle"),
    "snapkv": ("SnapKV", style.ORANGE, "solid", "diamond"),
    "h2o": ("H2O", style.GREEN, "solid", "square"),
    "streaming": ("StreamingLLM", style.SKY, "dash", "triangle-up"),
    "key_norm": ("low key norm", style.RED, "dot", "triangle-down"),
    "random": ("random slots", style.GREY, "dot", "x-thin-open"),
}
REFERENCES = ("full", "no_context")


def look(compactor: str, index: int = 0) -> tuple[str, str, str, str]:
    """Name, colour, dash and marker; NAME@VALUE has the look of NAME, and two of a kind differ in the dash.

    Of a folder the last two names are shown, without the `best` of a training run.
    """
    kind, _, value = compactor.partition("@")
    name, colour, dash, symbol = LOOKS.get(kind, (kind.replace("_", " "), style.SKY, "dashdot", "cross"))
    value = "/".join([part for part in value.split("/") if part != "best"][-2:])
    return f"{name} ({value})" if value else name, colour, splicing.DASHES[index % 4] if index else dash, symbol


def in_order(compactors: Sequence[str]) -> list[tuple[str, int]]:
    """(compactor, its number among those of its kind) in the order of the legend; references left out."""
    rank = {name: place for place, name in enumerate(LOOKS)}
    names = sorted(set(compactors) - set(REFERENCES), key=lambda n: (rank.get(n.partition("@")[0], len(rank)), n))
    kinds = [name.partition("@")[0] for name in names]
    return [(name, kinds[:place].count(kinds[place])) for place, name in enumerate(names)]


def answers(result: Result, readout: str) -> pd.DataFrame:
    """Mean of a readout per compactor and ratio, with its interval; references stand at ratio 1 and at none.

    Of arms that differ in their number of passes only those of the fewest are shown: see the plot over passes.
    """
    splicing.check_readout(readout)
    table = splicing.quality(result, readout, ["site", "compactor"], view="compaction")
    frame = result.frame[result.frame["view"] == "compaction"]
    table["ratio"] = table["site"].map(frame.groupby("site")["ratio"].median()).astype(float)
    if "passes" in frame:
        passes = table["site"].map(frame.groupby("site")["passes"].mean())
        kept = table["site"].isin(REFERENCES)
        table = table[kept | (passes == passes[~kept].min())].reset_index(drop=True)
    return table


def make_room(fig: Figure, entries: int) -> None:
    """Lengthen the figure below the plot, so that a legend of so many entries in pairs does not run out of it."""
    extra = 26 * max(0, math.ceil(entries / 2) - 4)
    layout: Any = fig.layout
    fig.update_layout(height=layout.height + extra, margin_b=layout.margin.b + extra)


def reference_lines(fig: Figure, table: pd.DataFrame) -> None:
    """Dotted lines for the full cache and for the prompt without documents."""
    for site, text in (("full", "full cache"), ("no_context", "no documents")):
        value = table.loc[table["site"] == site, "mean"]
        if len(value):
            fig.add_hline(
                y=float(value.iloc[0]),
                line={"color": style.GREY, "width": 1, "dash": "dot"},
                layer="below",
                annotation={"text": text, "font": {"size": 11, "color": style.GREY}},
            )
