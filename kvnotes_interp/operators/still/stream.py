"""Compaction again and again: a stream of any length in a cache of constant size. (Still, arXiv 2606.07878.)

    compact = stream(model, still, token_ids, chunk=512, budget=64)

Every chunk is run on top of what is there, and the whole is compacted to the budget. Positions keep growing. At its
largest, while a chunk is run, the cache has budget + chunk slots per KV head.

Beyond the number of passes that a compactor was trained for nothing is known of what is left: measure it
(`probes.compaction_quality(..., passes=(1, 2, 4, 8))`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import torch

from kvnotes_interp import engine
from kvnotes_interp.compact import Cache, CompactCache
from kvnotes_interp.errors import InputError
from kvnotes_interp.operators.blocks import Blocks

if TYPE_CHECKING:
    from kvnotes_interp.model import Model
    from kvnotes_interp.operators.eviction.compacted import Compacted

Tokens = tuple[int, ...]
Pass = Callable[[Cache, Sequence[int], int], CompactCache]
"""One compaction: the cache with a part run on it, the part's token ids, and the number of the pass from 0."""


class Compacting(Protocol):
    """A `Still`, a compactor by name, or any function like them."""

    def __call__(self, model: Model, cache: Cache, *, budget: int) -> Compacted: ...


@torch.no_grad()
def over(model: Model, parts: Sequence[Sequence[int]], compact: Pass) -> Iterator[CompactCache]:
    """The compact cache behind every part: the part is run on top of what is there, and `compact` takes the whole."""
    cache: Cache | None = None
    for number, ids in enumerate(parts):
        grown = engine.prefill(model, ids) if cache is None else engine.extend(model, cache, ids)[0]
        cache = compact(grown, ids, number)
        yield cache


def passes(
    model: Model, compactor: Compacting, token_ids: Sequence[int], *, chunk: int, budget: int
) -> Iterator[CompactCache]:
    """The compact cache behind every chunk of `chunk` tokens (the last may be shorter).

    A compactor that observes tokens observes those of the chunk, run once more behind the cache.

    Raises InputError for no tokens, or a chunk or budget below 1.
    """
    if budget < 1:
        raise InputError(f"chunk={chunk}, budget={budget}: each must be at least 1.")
    observes = getattr(compactor, "takes", lambda option: False)("observe")

    def compact(grown: Cache, ids: Sequence[int], number: int) -> CompactCache:
        return compactor(model, grown, budget=budget, **({"observe": ids} if observes else {})).cache

    return over(model, chunks_of(token_ids, chunk), compact)


def stream(model: Model, compactor: Compacting, token_ids: Sequence[int], *, chunk: int, budget: int) -> CompactCache:
    """The cache behind the last chunk; see `passes`."""
    *_, last = passes(model, compactor, token_ids, chunk=chunk, budget=budget)
    return last


def chunks_of(token_ids: Sequence[int], chunk: int) -> list[Tokens]:
    """The tokens in parts of `chunk`; the last may be shorter. Raises InputError for no tokens or a chunk below 1."""
    if not len(token_ids) or chunk < 1:
        raise InputError(f"{len(token_ids)} tokens, chunk={chunk}: each must be at least 1.")
    ids = tuple(token_ids)
    return [ids[start : start + chunk] for start in range(0, len(ids), chunk)]


def parts_of(blocks: Blocks, n: int) -> list[Tokens]:
    """The context in `n` parts of about equal length, cut between documents where there are as many, else anywhere.

    Where documents allow it no part begins in the middle of a sentence whose subject is gone.

    Raises InputError for fewer tokens than parts.
    """
    context, ends = blocks.context, [stop for _, stop in blocks.spans]
    if len(context) < n:
        raise InputError(
            f"a context of {len(context)} tokens cannot be compacted in {n} parts: ask for fewer passes, or lower the "
            "horizon."
        )
    ends = ends if len(ends) >= n else list(range(1, len(context) + 1))
    cuts = [0]
    for i in range(1, n + 1):
        later = [end for end in ends[i - 1 : len(ends) - n + i] if end > cuts[-1]]
        cuts.append(min(later, key=lambda end: abs(end - i * len(context) / n)))
    return [context[a:b] for a, b in pairwise(cuts)]
