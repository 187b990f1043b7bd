"""SnapKV: what the prompt's last tokens attend to is what the answer will attend to.

(Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation", arXiv 2404.14469, section 4.)

The paper's window holds the question. Here it holds the last tokens of the *cache*, so that a context is compacted
before any question is known; the question may be given as `observe`, which makes the method query-aware.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

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


def snapkv(
    model: Model,
    cache: Cache,
    *,
    budget: Budget,
    sliding: Sliding = "keep",
    window: int = 32,
    kernel: int = 7,
    observe: TokenIds | None = None,
) -> Compacted:
    """Keep the window, and of the slots before it those that the window's tokens attend to most.

    Attention is averaged over the observed tokens, max-pooled along the slots in every query head (neighbours of a slot
    that is attended to are kept with it), and then averaged over the query heads of a KV head's group.

    Args:
        window: tokens at the end of the cache that observe; at most half of the smallest budget.
        kernel: width of the pooling, odd; 1 pools nothing.
        observe: token ids to run behind the cache that observe instead; all slots of the cache are then judged, and
            none is kept for being recent.

    Raises InputError for a window below 1, an even kernel, and without `observe` where slots are no tokens.
    """
    if window < 1 or kernel < 1 or kernel % 2 == 0:
        raise InputError(f"window={window}, kernel={kernel}: give a window of at least 1 and an odd kernel.")
    counts, slots = counts_of(model, cache, budget, sliding), slots_of(cache)
    layers = compacted_layers(cache, counts)
    if not layers:
        return Compacted(whole(cache))
    last = 0 if observe is not None else min(window, max(1, min(counts[layer] for layer in layers) // 2))
    sums, layer_tokens = attention_sums(model, cache, observe, last=last, method="snapkv")
    chosen = {}
    for layer in layers:
        before = sums[layer][..., : slots[layer] - last]
        pooled = nn.functional.max_pool1d(before, kernel, stride=1, padding=kernel // 2)
        best = highest(by_kv_head(pooled, cache.n_kv_heads), counts[layer] - last)
        chosen[layer] = with_last(best, slots[layer], last)
    return Compacted(kept(cache, chosen), layer_tokens)
