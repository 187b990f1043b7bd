"""What every compactor shares: budgets per layer, the layers that slide, the slots that are kept, and the account."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvnotes_interp import compat
from kvnotes_interp.cache import KVCache
from kvnotes_interp.compact import Cache, CompactCache
from kvnotes_interp.errors import InputError

if TYPE_CHECKING:
    from kvnotes_interp.model import Model

Budget = int | Sequence[int]
"""Slots that a layer may keep, per KV head: one number for all layers, or one per layer."""

Sliding = Literal["keep", "compact"]
"""What happens to layers whose window is shorter than the context: they stay whole, or are compacted like the rest."""


@dataclass(frozen=True)
class Compacted:
    """A compact cache and what it cost to make, besides arithmetic on the cache itself.

    `layer_tokens`: tokens run forward to observe or to train, counted once per layer that each went through.
    """

    cache: CompactCache
    layer_tokens: int = 0


def budget_of(cache: Cache, ratio: float) -> int | tuple[int, ...]:
    """Slots per layer at a compression ratio, rounded up; one number per layer where layers differ in length.

    Raises InputError for a ratio below 1.
    """
    if not ratio >= 1:
        raise InputError(f"ratio={ratio}: slots before over slots after; give 1 or more.")
    counts = tuple(math.ceil(slots / ratio) for slots in slots_of(cache))
    return counts[0] if len(set(counts)) == 1 else counts


def slots_of(cache: Cache) -> tuple[int, ...]:
    """Number of slots of every layer."""
    return cache.slots if isinstance(cache, CompactCache) else (len(cache),) * cache.n_layers


def sliding_layers(model: Model, end: int) -> tuple[bool, ...]:
    """Whether each layer's window is too short for a token at position `end` to see position 0."""
    config = compat.text_config(model.hf)
    n_layers, window = model.shape.n_layers, getattr(config, "sliding_window", None)
    if window is None or window > end:
        return (False,) * n_layers
    kinds = getattr(config, "layer_types", None)  # families without it slide everywhere or nowhere
    return (True,) * n_layers if kinds is None else tuple(kind == "sliding_attention" for kind in kinds)


def counts_of(model: Model, cache: Cache, budget: Budget, sliding: Sliding) -> tuple[int, ...]:
    """Slots that each layer is to keep: its budget, never more than it has, all of them in a sliding layer left whole.

    Raises InputError for a foreign cache, a budget below 1 or for another number of layers, an unknown `sliding`, and
    when "keep" would leave every layer whole.
    """
    model.require_own(cache)
    if sliding not in ("keep", "compact"):
        raise InputError(f'sliding={sliding!r}: choose "keep" or "compact".')
    slots = slots_of(cache)
    budgets = [budget] * len(slots) if isinstance(budget, int) else list(budget)
    if len(budgets) != len(slots) or min(budgets) < 1:
        raise InputError(
            f"budget={budget}: give one number of slots, or one per layer ({len(slots)}), each at least 1."
        )
    whole = sliding_layers(model, cache.end) if sliding == "keep" else (False,) * len(slots)
    if all(whole):
        raise InputError(
            f"every layer of {model.name} has a window shorter than this context of {cache.end} positions and sliding="
            '"keep" leaves such layers whole; pass sliding="compact".'
        )
    return tuple(n if keep else min(n, count) for n, count, keep in zip(slots, budgets, whole, strict=True))


def compacted_layers(cache: Cache, counts: Sequence[int]) -> tuple[int, ...]:
    """Indices of the layers that lose slots."""
    return tuple(layer for layer, n in enumerate(slots_of(cache)) if counts[layer] < n)


def whole(cache: Cache) -> CompactCache:
    """The cache as a compact one; a compact one is itself."""
    return cache if isinstance(cache, CompactCache) else CompactCache.of(cache)


def kept(cache: Cache, chosen: dict[int, Int[Tensor, "kv_head kept"]]) -> CompactCache:
    """The cache with these slots per layer; layers that are not named stay whole."""
    source = whole(cache)
    if not chosen:
        return source
    every = [torch.arange(n).expand(source.n_kv_heads, -1) for n in source.slots]
    return source.kept([chosen.get(layer, slots) for layer, slots in enumerate(every)])


def highest(scores: Float[Tensor, "kv_head slot"], count: int) -> Int[Tensor, "kv_head count"]:
    """The `count` slots of highest score per KV head, rising; of equal scores the earlier slot wins. On the CPU."""
    order = scores.cpu().argsort(dim=-1, descending=True, stable=True)
    return order[:, :count].sort(dim=-1).values


def with_last(slots: Int[Tensor, "kv_head kept"], n: int, last: int) -> Int[Tensor, "kv_head kept+last"]:
    """The slots, and behind them the last ones of a layer of `n`."""
    return torch.cat((slots, torch.arange(n - last, n).expand(slots.shape[0], -1)), dim=1)


def by_kv_head(scores: Float[Tensor, "batch head slot"], n_kv_heads: int) -> Float[Tensor, "kv_head slot"]:
    """Scores of query heads summed over each KV head's group and over the batch: all rows keep the same slots."""
    return scores.unflatten(1, (n_kv_heads, -1)).sum(dim=(0, 2))


def own_tokens(cache: Cache, method: str) -> tuple[KVCache, Int[Tensor, "batch pos"]]:
    """The cache and the tokens it holds, for methods that read them again when nothing is observed.

    Raises InputError where slots are not tokens.
    """
    if not isinstance(cache, KVCache) or bool((cache.token_ids < 0).any()):
        raise InputError(
            f"{method}: this cache has slots that are no tokens, so it cannot be read again; pass observe= token ids "
            "to run behind it."
        )
    return cache, cache.token_ids
