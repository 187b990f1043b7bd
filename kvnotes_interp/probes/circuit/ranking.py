"""Rankings that have not seen the pair they are scored on: two halves, each ranked by the other.

Contents, not pairs, are dealt to the halves, so that no content is in both.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pandas as pd

from kvnotes_interp.probes.circuit.decide import Head
from kvnotes_interp.probes.measure import downstream_of
from kvnotes_interp.tasks import EncodedPair

RANKINGS = ("other_half", "same_pair", "random")


def halves(contents: Iterable[str]) -> dict[str, int]:
    """Every second content, in the order of their names, is in half 1."""
    return {content: place % 2 for place, content in enumerate(sorted(set(contents)))}


def other_half(rows: pd.DataFrame, pair: EncodedPair) -> pd.DataFrame:
    """Rows of the half that this pair's content is not in; none where there is a single content."""
    half = halves(rows["content"])
    mine = half.get(pair.pair.content)
    return rows[[half[c] != mine for c in rows["content"]]] if mine is not None else rows.iloc[:0]


def rank_heads(rows: pd.DataFrame, pair: EncodedPair) -> dict[str, list[Head]]:
    """Heads, the highest mean `value` first: over the other half, and over this pair alone (an upper bound).

    `rows` have the columns pair, content, layer, head, value. A ranking without rows is left out.
    """
    sources = {"other_half": other_half(rows, pair), "same_pair": rows[rows["pair"] == pair.pair.key]}
    out: dict[str, list[Head]] = {}
    for name, here in sources.items():
        if len(here):
            mean = here.groupby(["layer", "head"])["value"].mean()
            heads = [(int(layer), int(head)) for layer, head in mean.index]
            values = dict(zip(heads, mean.to_numpy(float), strict=True))
            out[name] = sorted(heads, key=lambda h: (-values[h], h))
    return out


def random_heads(n_layers: int, n_heads: int, *, key: str) -> list[Head]:
    """All heads in a random order that `key` decides; its first k are the random set of k."""
    heads = [(layer, head) for layer in range(n_layers) for head in range(n_heads)]
    random.Random(key).shuffle(heads)
    return heads


def rank_positions(effects: pd.DataFrame, pair: EncodedPair) -> list[int]:
    """Downstream positions of this pair, the best first, by the mean effect at their anchor over the other half.

    `effects` have the columns pair, content, anchor, value. Anchors that the other half lacks come last; an empty list
    where there is no other half.
    """
    here = other_half(effects, pair)
    if here.empty:
        return []
    mean = dict(here.groupby("anchor")["value"].mean().items())
    return _best({p: float(mean.get(pair.anchors[p], -np.inf)) for p in downstream_of(pair)})


def random_positions(where: Sequence[int], *, key: str) -> list[int]:
    """`where` in a random order that `key` decides."""
    order = list(where)
    random.Random(key).shuffle(order)
    return order


def _best(score: Mapping[int, float]) -> list[int]:
    # Ties go by position, so that a ranking is the same on every machine.
    return sorted(score, key=lambda p: (-score[p], p))
