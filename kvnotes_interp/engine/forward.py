"""Plain forward passes over caches. Every pass runs on a fork: the cache handed in is never changed.

A `CompactCache` runs like a `KVCache`, and comes back as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvnotes_interp import attention, compat
from kvnotes_interp.cache import KVCache
from kvnotes_interp.compact import Cache, CompactCache
from kvnotes_interp.errors import InputError

if TYPE_CHECKING:
    from kvnotes_interp.model import Model

C = TypeVar("C", bound=Cache)

TokenIds = Sequence[int] | Sequence[Sequence[int]] | Tensor
"""Token ids of one row, `[pos]`, or of several, `[batch pos]`."""


def as_ids(model: Model, token_ids: TokenIds) -> Int[Tensor, "batch pos"]:
    """Token ids as `[batch pos]` on the model's device; a flat list is one row. Raises InputError on an empty one."""
    ids = torch.as_tensor(token_ids, dtype=torch.long, device=model.device)
    ids = ids[None] if ids.ndim == 1 else ids
    if ids.ndim != 2 or ids.shape[1] == 0:
        raise InputError(f"token ids of shape {tuple(ids.shape)}: expected [batch pos] with at least one token.")
    return ids


@torch.no_grad()
def prefill(model: Model, token_ids: TokenIds, *, positions: Sequence[int] | Tensor | None = None) -> KVCache:
    """Run a prompt from nothing and keep its cache.

    Args:
        token_ids: `[batch pos]` or `[pos]`.
        positions: rotary position of each token, `[pos]`; 0, 1, 2, ... by default. Gaps are honoured.
    """
    ids = as_ids(model, token_ids)
    positions = _positions(ids, 0, positions)
    fork = compat.new_cache()
    compat.forward(model.hf, ids, fork, positions)
    keys, values = compat.read_cache(fork)
    return KVCache(keys, values, ids, positions, model.rope, model.model_id)


@torch.no_grad()
def extend(
    model: Model,
    cache: C,
    token_ids: TokenIds,
    *,
    positions: Sequence[int] | Tensor | None = None,
) -> tuple[C, Float[Tensor, "batch pos d_model"]]:
    """Run more tokens on top of a cache; returns the longer cache and the new tokens' final hidden states.

    Positions go on from `cache.end` by default. A single row of tokens is run for every row of the cache.
    """
    ids = as_ids(model, token_ids)
    ids = ids.expand(cache.batch, -1) if ids.shape[0] == 1 else ids
    if ids.shape[0] != cache.batch:
        raise InputError(f"{ids.shape[0]} rows of tokens for a cache of batch {cache.batch}.")
    positions = _positions(ids, cache.end, positions)
    if cache.model_id != model.model_id:
        raise InputError(f"this cache was written by {cache.model_id!r}; the model at hand is {model.model_id!r}.")
    hidden, keys, values = run(model, cache, ids, positions, attention.Plan())
    return cast(C, cache.appended(keys, values, ids, positions)), hidden


def _positions(ids: Tensor, end: int, positions: Sequence[int] | Tensor | None) -> Int[Tensor, " pos"]:
    """Positions from `end` on, or those given. Raises InputError when they do not fit the tokens or lie before it."""
    if positions is None:
        return torch.arange(end, end + ids.shape[1])
    positions = torch.as_tensor(positions, dtype=torch.long).cpu()
    if positions.shape != ids.shape[1:]:
        raise InputError(f"{tuple(positions.shape)} positions for {ids.shape[1]} tokens.")
    if int(positions.min()) < end:
        raise InputError(f"position {int(positions.min())} lies before the cache's end {end}; new tokens go behind it.")
    return positions


def run(
    model: Model, cache: Cache, ids: Tensor, positions: Tensor, plan: attention.Plan
) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """(hidden states, keys, values) of tokens run behind a cache, with whatever of it needs this package's attention.

    Gradients flow where they are enabled; `extend` is what most callers want.
    """
    fork = compat.new_cache(cache.keys, cache.values)
    plan = replace(plan, bias=cache.bias)
    if isinstance(cache, CompactCache):
        plan = replace(plan, compact=attention.KeyPositions(cache.positions, positions))
    own = any(part is not None for part in (plan.bias, plan.recorder, plan.compact))
    with attention.using(model.hf, plan) if own else nullcontext():  # else the model's own attention
        hidden = compat.forward(model.hf, ids, fork, positions)
    keys, values = compat.read_cache(fork)
    new = ids.shape[1]
    return hidden, tuple(k[:, :, -new:] for k in keys), tuple(v[:, :, -new:] for v in values)


@torch.no_grad()
def decide(
    model: Model, cache: Cache, tail: TokenIds, answers: Sequence[int] | None = None
) -> Float[Tensor, "batch answer"]:
    """Logits of the answer tokens (None: of all) after `tail` has been run on top of `cache`, in at least float32."""
    _, hidden = extend(model, cache, tail)
    return compat.unembed(model.hf, hidden[:, -1], None if answers is None else torch.as_tensor(list(answers)))


@dataclass(frozen=True)
class Generated:
    """A continuation: token ids, their text, and the cache that holds them (the last token is not run)."""

    token_ids: tuple[int, ...]
    text: str
    cache: Cache


@torch.no_grad()
def decode(
    model: Model,
    cache: Cache,
    token_ids: TokenIds,
    *,
    max_new_tokens: int,
    stop: Sequence[int] | None = None,
    temperature: float = 0.0,
    seed: int = 0,
) -> Generated:
    """Decoding with explicit positions, after running `token_ids` on top of `cache` (batch 1).

    Greedy at temperature 0; above it, tokens are drawn from the softmax of logits / temperature, from `seed`.

    transformers' own generate() counts cache slots as tokens, so an edited or compacted cache would be fed the wrong
    tokens at the wrong positions; it is not used. `stop` defaults to the model's end-of-sequence tokens.
    """
    if cache.batch != 1:
        raise InputError(f"decode runs one row; this cache has batch {cache.batch}.")
    if temperature < 0:
        raise InputError(f"temperature={temperature}: 0 is greedy, above it tokens are drawn.")
    generator = torch.Generator().manual_seed(seed)
    stops = set(model.stop_ids if stop is None else stop)
    out: list[int] = []
    ids = as_ids(model, token_ids)
    while len(out) < max_new_tokens:
        cache, hidden = extend(model, cache, ids)
        logits = compat.unembed(model.hf, hidden[:, -1])[0].cpu()
        if temperature > 0:
            token = int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
        else:
            token = int(logits.argmax())
        out.append(token)
        if token in stops:
            break
        ids = as_ids(model, [token])
    text = model.tokenizer.decode([t for t in out if t not in stops]) if model.tokenizer is not None else ""
    return Generated(tuple(out), text, cache)


@torch.no_grad()
def attention_rows(
    model: Model, cache: KVCache, tail: TokenIds, *, rows: int = 1
) -> Float[Tensor, "layer head row key"]:
    """Attention probabilities of the last `rows` tokens of `tail` over cache and tail, in float32 (batch 1).

    Memory: layers x heads x rows x keys x 4 bytes; no T x T matrix is made when `tail` is short.
    """
    return torch.stack(attention_by_layer(model, cache, tail, rows=rows))


@torch.no_grad()
def attention_by_layer(
    model: Model, cache: Cache, tail: TokenIds, *, rows: int = 1
) -> tuple[Float[Tensor, "head row key"], ...]:
    """`attention_rows` per layer, for caches whose layers hold different numbers of keys: the cached ones come first.

    Heads are query heads; a compact cache's `positions` and `sources` say per KV head what a key is.
    """
    ids = as_ids(model, tail)
    new = ids.shape[1]
    recorder = attention.Recorder(tuple(range(-rows, 0)))
    run(model, cache, ids, torch.arange(cache.end, cache.end + new), attention.Plan(recorder=recorder))
    return tuple(recorder.patterns[layer][0].float().cpu() for layer in range(cache.n_layers))


@torch.no_grad()
def noise_floor(
    model: Model,
    cache: Cache,
    tail: TokenIds,
    answers: Sequence[int],
    *,
    alone: Tensor | None = None,
    batches: Sequence[int] = (7,),
) -> float:
    """Largest change of any answer logit when the same decision is run in other batch shapes, in logits.

    Nothing smaller than this means anything for this model, dtype and device. `alone` `[answer]` is the decision in a
    batch of one, where it is known already.
    """
    alone = decide(model, cache, tail, answers)[0] if alone is None else alone
    gaps = [(decide(model, cache.repeat(batch=n), tail, answers) - alone).abs().max() for n in batches]
    return float(torch.stack(gaps).max())
