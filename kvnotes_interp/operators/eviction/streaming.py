"""StreamingLLM: the first slots, which serve as attention sinks, and the most recent ones.

(Xiao et al., "Efficient Streaming Language Models with Attention Sinks", arXiv 2309.17453, section 3.2.)

What it does not do: nothing between sinks and recent slots is kept, so a fact told there can only survive as a note in
later tokens.
"""

from __future__ import annotations

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
    with_last,
)

if TYPE_CHECKING:
    from kvnotes_interp.model import Model


def streaming(
    model: Model,
    cache: Cache,
    *,
    budget: Budget,
    sliding: Sliding = "keep",
    sinks: int = 4,
    renumber: bool = False,
) -> Compacted:
    """Keep the first `sinks` slots and fill the budget with the last ones, the same in every head.

    Args:
        renumber: turn the keys to positions 0, 1, ... and let the next token follow at once, as the paper does.
            Otherwise every key stays where it stood, and so does the next token.

    Raises InputError for negative sinks, and for `renumber` when layers keep different numbers of slots: the next token
    has one position in all of them.
    """
    if sinks < 0:
        raise InputError(f"sinks={sinks}: give 0 or more.")
    counts, slots = counts_of(model, cache, budget, sliding), slots_of(cache)
    chosen = {}
    for layer in compacted_layers(cache, counts):
        first = min(sinks, counts[layer])
        head = torch.arange(first).expand(cache.n_kv_heads, -1)
        chosen[layer] = with_last(head, slots[layer], counts[layer] - first)
    out = kept(cache, chosen)
    if renumber and chosen:
        if len(set(out.slots)) > 1:
            raise InputError(
                f"renumber needs the same number of slots in every layer, these keep {out.slots}; give one budget, and "
                'sliding="compact" where layers slide.'
            )
        out = out.renumbered()
    return Compacted(out)
