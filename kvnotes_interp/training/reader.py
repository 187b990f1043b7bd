"""The Reader: the frozen model on many caches at once, in one differentiable pass."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from kvnotes_interp import attention, compat
from kvnotes_interp.cache import KVCache
from kvnotes_interp.compact import Cache, CompactCache
from kvnotes_interp.errors import InputError

if TYPE_CHECKING:
    from kvnotes_interp.model import Model


def answer_logits(
    model: Model, caches: Sequence[Cache], tails: Sequence[Sequence[int]], *, rows: Sequence[int]
) -> list[Float[Tensor, "row token"]]:
    """Logits of the last `rows[i]` tokens of `tails[i]`, run on `caches[i]`, for every i, in at least float32.

    Caches (batch 1) are padded in front, tails behind, both out of sight; every tail goes on from its own cache's
    `end`. The values are those of `engine.extend` on each cache alone, but gradients flow into the caches. Key biases
    and layers of different lengths go through `attention.Plan`; else the model's own attention runs.

    Raises InputError for caches of other models or batches, and for numbers that do not match.
    """
    _check(model, caches, tails, rows)
    if any(isinstance(cache, CompactCache) for cache in caches) and _has_windows(model):
        # A window counts the positions of a compact cache, which differ from row to row: one pass for each.
        return [_alone(model, *one) for one in zip(caches, tails, rows, strict=True)]
    found = run(model, caches, tails)
    row = [i for i, n in enumerate(rows) for _ in range(n)]
    column = [at for tail, n in zip(tails, rows, strict=True) for at in range(len(tail) - n, len(tail))]
    return list(_unembed(model, found.hidden[row, column]).split(list(rows)))


@dataclass(frozen=True, eq=False)
class Pass:
    """One pass over several rows, each with its own cache; behind a row's own tokens stands padding.

    Attributes:
        hidden: final hidden states. keys, values: per layer, of the new tokens alone.
        token_ids, positions: of the new tokens.
    """

    hidden: Float[Tensor, "row pos d_model"]
    keys: tuple[Float[Tensor, "row kv_head pos d_head"], ...]
    values: tuple[Float[Tensor, "row kv_head pos d_head"], ...]
    token_ids: Int[Tensor, "row pos"]
    positions: Int[Tensor, "row pos"]

    def appended(self, cache: CompactCache, row: int, n: int) -> CompactCache:
        """The row's cache with its first `n` new tokens behind it."""
        return cache.appended(
            [key[row : row + 1, :, :n] for key in self.keys],
            [value[row : row + 1, :, :n] for value in self.values],
            self.token_ids[row : row + 1, :n],
            self.positions[row, :n],
        )


def run(model: Model, caches: Sequence[Cache], tails: Sequence[Sequence[int]]) -> Pass:
    """Every tail on its own cache (batch 1), all in one differentiable pass.

    Caches are padded in front, tails behind, both out of sight; every tail goes on from its own cache's `end`. A window
    would count the padded slots of a compact cache: the caller keeps models away whose layers slide over these lengths.
    """
    width = max(key.shape[2] for cache in caches for key in cache.keys)
    longest = max(map(len, tails))
    layers = range(len(caches[0].keys))
    keys = [torch.cat([_in_front(c.keys[layer], width) for c in caches]) for layer in layers]
    values = [torch.cat([_in_front(c.values[layer], width) for c in caches]) for layer in layers]
    slots = [[key.shape[2] for key in cache.keys] for cache in caches]
    # Where the layers of a cache differ in length no single mask tells padding apart: the bias does.
    ragged = any(len(set(one)) > 1 for one in slots)
    biased = ragged or any(cache.bias is not None for cache in caches)
    bias = tuple(torch.cat([_bias_in_front(c, layer, width) for c in caches]) for layer in layers) if biased else None
    mask = None
    if any(n < width for one in slots for n in one):
        first = torch.tensor([width - max(one) for one in slots], device=model.device)
        mask = torch.arange(width + longest, device=model.device) >= first[:, None]
    ids = _padded_behind(model, tails)
    positions = torch.tensor([cache.end for cache in caches])[:, None] + torch.arange(longest)
    fork = compat.new_cache(keys, values)
    with attention.using(model.hf, attention.Plan(bias=bias)) if bias is not None else nullcontext():
        hidden = compat.forward(model.hf, ids, fork, positions, mask=mask)
    new = [tuple(tensor[:, :, width:] for tensor in part) for part in compat.read_cache(fork)]
    return Pass(hidden, new[0], new[1], ids, positions)


@torch.no_grad()
def prefilled(model: Model, rows: Sequence[Sequence[int]]) -> list[KVCache]:
    """Every row of tokens run alone at positions 0, 1, ..., all in one batch padded behind; one cache each."""
    ids, fork = _padded_behind(model, rows), compat.new_cache()
    compat.forward(model.hf, ids, fork, torch.arange(ids.shape[1]))
    keys, values = compat.read_cache(fork)
    return [
        KVCache(
            tuple(key[i : i + 1, :, : len(row)] for key in keys),
            tuple(value[i : i + 1, :, : len(row)] for value in values),
            ids[i : i + 1, : len(row)],
            torch.arange(len(row)),
            model.rope,
            model.model_id,
        )
        for i, row in enumerate(rows)
    ]


def _padded_behind(model: Model, rows: Sequence[Sequence[int]]) -> Int[Tensor, "row pos"]:
    """Token ids; padding stands where no token of the row can see it."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=model.device)


def _unembed(model: Model, hidden: Float[Tensor, "row d_model"]) -> Float[Tensor, "row token"]:
    with torch.autocast(model.device.type, enabled=False):  # logits are never taken in 16 bits
        return compat.unembed(model.hf, hidden)


def _has_windows(model: Model) -> bool:
    return getattr(compat.text_config(model.hf), "sliding_window", None) is not None


def _alone(model: Model, cache: Cache, tail: Sequence[int], rows: int) -> Float[Tensor, "row token"]:
    positions = torch.arange(cache.end, cache.end + len(tail))
    compact = attention.KeyPositions(cache.positions, positions) if isinstance(cache, CompactCache) else None
    fork, ids = compat.new_cache(cache.keys, cache.values), torch.tensor([[*tail]], device=model.device)
    with attention.using(model.hf, attention.Plan(bias=cache.bias, compact=compact)):
        hidden = compat.forward(model.hf, ids, fork, positions)
    return _unembed(model, hidden[0, -rows:])


def _check(model: Model, caches: Sequence[Cache], tails: Sequence[Sequence[int]], rows: Sequence[int]) -> None:
    if not caches or not len(caches) == len(tails) == len(rows):
        raise InputError(
            f"{len(caches)} caches, {len(tails)} tails and {len(rows)} numbers of rows: give one of each per example."
        )
    for index, (cache, tail, n) in enumerate(zip(caches, tails, rows, strict=True)):
        model.require_own(cache, f"cache {index}")
        if cache.batch != 1:
            raise InputError(f"cache {index} is {cache!r}; a cache of batch 1 is needed.")
        if not 1 <= n <= len(tail):
            raise InputError(f"rows[{index}] is {n}, but its tail has {len(tail)} tokens; ask for 1 to all of them.")


def _in_front(tensor: Tensor, width: int, value: float = 0.0) -> Tensor:
    """`[1 kv_head slot d_head]` padded in front to `width` slots."""
    return nn.functional.pad(tensor, (0, 0, width - tensor.shape[2], 0), value=value)


def _bias_in_front(cache: Cache, layer: int, width: int) -> Float[Tensor, "1 kv_head slot"]:
    """One layer's key bias, zeros where there is none, padded in front with -inf: slots that nobody sees."""
    own = None if cache.bias is None else cache.bias[layer]
    own = cache.keys[layer].new_zeros(cache.keys[layer].shape[:3]) if own is None else own
    return _in_front(own[..., None], width, float("-inf"))[..., 0]
