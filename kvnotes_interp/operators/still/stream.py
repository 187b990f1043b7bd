"""Compaction again and again: a stream of any length in a cache of constant size. (Still, arXiv 2606.07878.)

    compact = stream(model, still, token_ids, chunk=512, budget=64)

Every chunk is run on top of what is there, and the whole is compacted to the budget. Positions keep growing. At its
largest, while a chunk is run, the cache has budget + chunk slots per KV head.

Beyond the number of passes that a compactor was trained for nothing is known of what is left: measure it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from kvnotes_interp import engine
from kvnotes_interp.compact import Cache, CompactCache
from kvnotes_interp.errors import InputError

if TYPE_CHECKING:
    from kvnotes_interp.model import Model
    from kvnotes_interp.operators.eviction.compacted import Compacted


class Compacting(Protocol):
    """A `Still`, a compactor by name, or any function like them."""

    def __call__(self, model: Model, cache: Cache, *, budget: int) -> Compacted: ...


@torch.no_grad()
def passes(
    model: Model, compactor: Compacting, token_ids: Sequence[int], *, chunk: int, budget: int
) -> Iterator[CompactCache]:
    """The compact cache behind every chunk of `chunk` tokens (the last may be shorter).

    A compactor that observes tokens observes those of the chunk, run once more behind the cache.

    Raises InputError for no tokens, or a chunk or budget below 1.
    """
    if not len(token_ids) or chunk < 1 or budget < 1:
        raise InputError(f"{len(token_ids)} tokens, chunk={chunk}, budget={budget}: each must be at least 1.")
    observes = getattr(compactor, "takes", lambda option: False)("observe")
    cache: Cache | None = None
    for start in range(0, len(token_ids), chunk):
        ids = token_ids[start : start + chunk]
        grown = engine.prefill(model, ids) if cache is None else engine.extend(model, cache, ids)[0]
        cache = compactor(model, grown, budget=budget, **({"observe": ids} if observes else {})).cache
        yield cache


def stream(model: Model, compactor: Compacting, token_ids: Sequence[int], *, chunk: int, budget: int) -> CompactCache:
    """The cache behind the last chunk; see `passes`."""
    *_, last = passes(model, compactor, token_ids, chunk=chunk, budget=budget)
    return last
