"""H2O: heavy hitters, the slots that drew most attention from all tokens so far, and the most recent ones.

(Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference", arXiv 2306.14048, section 4.)

Here the choice is made once, at the end, from the attention of the whole prompt; the paper evicts slot by slot while
the sums grow, so that what was dropped early cannot come back. Early slots are seen by more tokens and have the larger
sums for that reason alone; the paper's score has this bias and so has this one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvnotes_interp.compact import Cache
from kvnotes_interp.engine.forward import TokenIds
from kvnotes_interp.errors import InputError
from kvnotes_interp.operators.eviction.compacted import (
    Budget,
    Compacted,
    Sliding,
    by_kv_head,
    compacted_layers,
    counts_of,
    highest,
    kept,
    slots_of,
    whole,
    with_last,
)
from kvnotes_interp.operators.eviction.observing import attention_sums

if TYPE_CHECKING:
    from kvnotes_interp.model import Model


def h2o(
    model: Model,
    cache: Cache,
    *,
    budget: Budget,
    sliding: Sliding = "keep",
    recent: float = 0.5,
    observe: TokenIds | None = None,
) -> Compacted:
    """Keep the last slots, a share `recent` of the budget (rounded down), and the heaviest of the others.

    Args:
        observe: token ids to run behind the cache whose attention is summed instead. By default the cache's own tokens
            are run once more, in blocks. A question given here makes the method query-aware: say so.

    Attention is summed over tokens, over the query heads of a KV head's group, and over the batch.
    Raises InputError for a share outside 0 to 1, and without `observe` where slots are no tokens.
    """
    if not 0 <= recent <= 1:
        raise InputError(f"recent={recent}: a share of the budget, from 0 to 1.")
    counts, slots = counts_of(model, cache, budget, sliding), slots_of(cache)
    layers = compacted_layers(cache, counts)
    if not layers:
        return Compacted(whole(cache))
    sums, layer_tokens = attention_sums(model, cache, observe, method="h2o")
    chosen = {}
    for layer in layers:
        last = int(recent * counts[layer])
        older = by_kv_head(sums[layer], cache.n_kv_heads)[:, : slots[layer] - last]
        chosen[layer] = with_last(highest(older, counts[layer] - last), slots[layer], last)
    return Compacted(kept(cache, chosen), layer_tokens)
