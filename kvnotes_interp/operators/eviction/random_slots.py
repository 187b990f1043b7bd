"""Random slots: what any choice at the same budget must beat."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import torch

from kvnotes_interp.compact import Cache
from kvnotes_interp.errors import InputError
from kvnotes_interp.operators.eviction.compacted import (
    Budget,
    Compacted,
    Sliding,
    compacted_layers,
    counts_of,
    kept,
    slots_of,
)

if TYPE_CHECKING:
    from kvnotes_interp.model import Model


def random_slots(
    model: Model, cache: Cache, *, budget: Budget, sliding: Sliding = "keep", sinks: int = 0, seed: int = 0
) -> Compacted:
    """Keep slots drawn at random, anew in every layer and KV head; the last slot has no privilege.

    Args:
        sinks: this many first slots are kept before any is drawn. Without them the attention sink is lost in most
            heads, and a method may beat this control by keeping that one slot; 4 is the control without this flaw.

    The draw depends on the seed and the number of slots; a smaller budget's slots are part of a larger one's.
    """
    if sinks < 0:
        raise InputError(f"sinks={sinks}: give 0 or more.")
    counts, slots = counts_of(model, cache, budget, sliding), slots_of(cache)
    chosen = {}
    for layer in compacted_layers(cache, counts):
        rows = []
        for head in range(cache.n_kv_heads):
            first, rest = range(min(sinks, slots[layer])), range(min(sinks, slots[layer]), slots[layer])
            order = [*first, *Random(f"random_slots|{seed}|{layer}|{head}").sample(rest, len(rest))]
            rows.append(sorted(order[: counts[layer]]))
        chosen[layer] = torch.tensor(rows)
    return Compacted(kept(cache, chosen))
