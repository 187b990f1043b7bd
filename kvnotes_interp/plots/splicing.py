"""What the figures of a splice-quality run share: looks of the operators, and means per operator with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from kvnotes_interp.errors import InputError, nearest
from kvnotes_interp.plots import style
from kvnotes_interp.plots.data import seed_of
from kvnotes_interp.stats import bootstrap_mean, bootstrap_ratio

if TYPE_CHECKING:
    from kvnotes_interp.results import Result

# operator -> name, colour, dash, marker; the order is that of the legend.
LOOKS = {
    "full_recompute": ("full recompute", style.INK, "solid", "circle"),
    "splice": ("splice, seams repaired", style.BLUE, "solid", "circle"),
    "epic": ("EPIC", style.SKY, "dash", "square"),
    "cacheblend": ("CacheBlend", style.ORANGE, "solid", "diamond"),
    "random_recompute": ("random tokens", style.GREY, "dot", "x-thin-open"),
    "sempic": ("SemPIC", style.PURPLE, "solid", "star"),
    "joint": ("SemPIC and KV Packet", style.BLUE, "dash", "hexagon"),
    "packet": ("KV Packet", style.SKY, "solid", "pentagon"),
    "no_recompute": ("no recompute", style.GREEN, "solid", "triangle-up"),
    "no_recompute_unmoved": ("no recompute, keys not moved", style.RED, "dot", "triangle-down"),
}
READOUTS = {
    "micro_f1": "Micro-F1 of the answers",
    "exact_match": "Exact match",
    "first_token": "First token right",
    "same_answer": "Same answer as full recompute",
    "kl": "KL to full recompute (nats)",
    "top1_agreement": "Top-1 agreement with full recompute",
    "logit_cosine": "Logit cosine to full recompute",
    "margin": "Margin of the right first token (logits)",
}
DASHES = ("solid", "dash", "dot", "dashdot")
SPARE = (style.PURPLE, style.GREEN, style.SKY)


def look(operator: str, index: int = 0) -> tuple[str, str, str, str]:
    """Name, colour, dash and marker; an operator of the user's own gets a spare colour.

    A learned one, named with its folder, has the look of its kind; `index` tells two of a kind apart by the dash.
    """
    kind, _, folder = operator.partition("@")
    if folder and kind in LOOKS:
        name, colour, _, symbol = LOOKS[kind]
        return f"{name} ({folder})", colour, DASHES[index % len(DASHES)], symbol
    return LOOKS.get(operator, (operator.replace("_", " "), SPARE[index % 3], "dashdot", "cross"))


def in_order(operators: Sequence[str]) -> list[str]:
    """Operators in the order of the legend, others behind them."""
    rank = {name: place for place, name in enumerate(LOOKS)}
    return sorted(set(operators), key=lambda name: (rank.get(name.partition("@")[0], len(rank)), name))


def check_readout(readout: str) -> str:
    """`readout`. Raises InputError for one that a splice-quality run does not hold."""
    if readout not in READOUTS:
        raise InputError(f"readout={readout!r}: choose from {', '.join(READOUTS)}.{nearest(readout, READOUTS)}")
    return readout


def quality(result: Result, readout: str, by: list[str], *, view: str = "quality") -> pd.DataFrame:
    """Mean of a readout per group, with its interval over contents; micro-F1 is pooled over the group.

    Columns: those of `by`, mean, low, high, n (questions), n_effective (contents).
    """
    frame = result.frame[result.frame["view"] == view]
    if readout != "micro_f1":
        return mean_by(result, frame[frame["readout"] == readout], by)
    names = list(dict.fromkeys(["pair", "content", "site", *by]))
    wide = (
        frame[frame["readout"].isin(("f1_common", "f1_words"))]
        .pivot_table(index=names, columns="readout", values="value", dropna=False, observed=True)
        .dropna(subset=["f1_words"])
        .reset_index()
    )
    seed = seed_of(result)
    return _each(wide, by, lambda r: bootstrap_ratio(r["f1_common"], r["f1_words"], r["content"], seed=seed))


def mean_by(result: Result, rows: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Mean of the rows' values per group, as `quality`."""
    seed = seed_of(result)
    return _each(rows, by, lambda r: bootstrap_mean(r["value"], r["content"], seed=seed))


def _each(frame: pd.DataFrame, by: list[str], interval: Any) -> pd.DataFrame:
    out = []
    for keys, rows in frame.groupby(by, sort=True, dropna=False):
        out.append({**dict(zip(by, keys, strict=True)), **interval(rows).to_dict()})
    return pd.DataFrame(out, columns=[*by, "mean", "low", "high", "n", "n_effective"])
