"""How tokens attend to the slots of a cache, handed on layer by layer and block by block.

No matrix of all queries by all keys is ever held: tokens are run in blocks small enough for `ROWS_BYTES`, and each
layer's rows are given to a function and forgotten. Scale, soft-cap, masks, windows and biases are the model's own,
since the rows are those of its forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from kvnotes_interp import attention
from kvnotes_interp.compact import Cache
from kvnotes_interp.engine.forward import TokenIds, as_ids, run
from kvnotes_interp.errors import InputError
from kvnotes_interp.operators.eviction.compacted import own_tokens, slots_of

if TYPE_CHECKING:
    from kvnotes_interp.model import Model

ROWS_BYTES = 64 << 20
"""How many bytes the attention rows of one block and layer may take."""

Each = Callable[[int, int, Float[Tensor, "batch head query key"]], None]
"""Called with the layer, the place of the block's first token among all, and its rows over the cached keys."""


class _HandedOn(dict[int, Tensor]):
    """Takes the place of a recorder's patterns: every layer's rows are handed on and nothing is kept."""

    def __init__(self, take: Callable[[int, Tensor], None]) -> None:
        super().__init__()
        self._take = take

    def __setitem__(self, layer: int, rows: Tensor) -> None:
        self._take(layer, rows)


@torch.no_grad()
def watch_behind(model: Model, cache: Cache, token_ids: TokenIds, each: Each) -> int:
    """Run tokens behind the cache; their rows cover the cached keys alone. Returns the layer-tokens that were run.

    Each token sees the cache and the tokens before it, so a row's sum is at most 1.
    """
    ids = as_ids(model, token_ids)
    ids = ids.expand(cache.batch, -1) if ids.shape[0] == 1 else ids
    if ids.shape[0] != cache.batch:
        raise InputError(f"{ids.shape[0]} rows of observed tokens for a cache of batch {cache.batch}.")
    slots, total = slots_of(cache), ids.shape[1]
    block = _block(model, cache.batch, max(slots) + total)
    grown = cache
    for start in range(0, total, block):
        part = ids[:, start : start + block]
        plan = _plan(part.shape[1], lambda layer, rows: each(layer, start, rows[..., : slots[layer]]))  # noqa: B023
        positions = torch.arange(grown.end, grown.end + part.shape[1])
        _, keys, values = run(model, grown, part, positions, plan)
        grown = grown.appended(keys, values, part, positions)
    return total * cache.n_layers


@torch.no_grad()
def watch_again(model: Model, cache: Cache, last: int, each: Each, *, method: str) -> int:
    """Run the cache's own last tokens once more where they stand, each on the slots before it.

    Rows of a block that ends before slot b cover the keys 0 to b - 1. For the plain prefill of these tokens, the rows
    are those of that prefill; in an edited cache, tokens of one block see one another as recomputed. Returns the
    layer-tokens that were run. Raises InputError where slots are no tokens.
    """
    cache, ids = own_tokens(cache, method)
    n = len(cache)
    block = _block(model, cache.batch, n)
    for start in range(n - last, n, block):
        stop = min(start + block, n)
        plan = _plan(stop - start, lambda layer, rows: each(layer, start, rows))  # noqa: B023
        run(model, cache[:start], ids[:, start:stop], cache.positions[start:stop], plan)
    return last * cache.n_layers


def attention_sums(
    model: Model, cache: Cache, observe: TokenIds | None, *, last: int | None = None, method: str
) -> tuple[tuple[Float[Tensor, "batch head slot"], ...], int]:
    """(per layer, the attention that every slot draws from all observed tokens together; layer-tokens run).

    Observed are `observe`, run behind the cache, or without it the cache's own `last` tokens (None: all of them).
    """
    n_heads = model.shape.n_heads
    sums = [torch.zeros(cache.batch, n_heads, n, dtype=torch.float64) for n in slots_of(cache)]

    def add(layer: int, _start: int, rows: Tensor) -> None:
        sums[layer][..., : rows.shape[-1]] += rows.sum(2).cpu()

    if observe is not None:
        return tuple(sums), watch_behind(model, cache, observe, add)
    n = max(slots_of(cache))
    return tuple(sums), watch_again(model, cache, n if last is None else last, add, method=method)


def _block(model: Model, batch: int, keys: int) -> int:
    size = 8 if model.dtype == torch.float64 else 4
    return max(1, ROWS_BYTES // (batch * model.shape.n_heads * keys * size))


def _plan(rows: int, take: Callable[[int, Tensor], None]) -> attention.Plan:
    return attention.Plan(recorder=attention.Recorder(tuple(range(-rows, 0)), patterns=_HandedOn(take)))
