"""Plain forward passes over caches. Every pass runs on a fork: the cache handed in is never changed.

A `CompactCache` runs like a `KVCache`, and comes back as one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvnotes_interp import attention, compat, live
from kvnotes_interp.cache import KVCache, indices
from kvnotes_interp.compact import Cache, CompactCache
from kvnotes_interp.errors import NOT_FINITE, InputError, NotFiniteError, whole_numbers

if TYPE_CHECKING:
    from kvnotes_interp.model import Model

C = TypeVar("C", bound=Cache)

TokenIds = Sequence[int] | Sequence[Sequence[int]] | Tensor
"""Token ids of one row, `[pos]`, or of several, `[batch pos]`."""


def as_ids(model: Model, token_ids: TokenIds) -> Int[Tensor, "batch pos"]:
    """Token ids as `[batch pos]` on the model's device; a flat list is one row.

    Raises InputError on none, and on one that the model has no embedding for.
    """
    live.require_dtype(model.hf)
    ids = indices("token_ids", token_ids)
    ids = ids[None] if ids.ndim == 1 else ids
    if ids.ndim != 2 or ids.numel() == 0:
        raise InputError(f"token ids of shape {tuple(ids.shape)}: expected [batch pos] with at least one token.")
    check_tokens(model, ids, "token_ids")
    return ids.to(model.device)


def check_tokens(model: Model, ids: Tensor, name: str) -> None:
    """Raise InputError unless the model has an embedding for every id; `name` says what they are."""
    if not ids.numel():
        return
    vocab = model.hf.get_input_embeddings().weight.shape[0]  # type: ignore[union-attr]
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab:
        raise InputError(f"{name} holds {low if low < 0 else high}; {model.name} has tokens 0 to {vocab - 1}.")


def rows_for(model: Model, cache: Cache, token_ids: TokenIds) -> Int[Tensor, "batch pos"]:
    """Token ids to run on top of `cache`, one row for each of its rows; a single row stands for all.

    Raises InputError for another number of rows, and for another model's cache.
    """
    model.require_own(cache)
    ids = as_ids(model, token_ids)
    ids = ids.expand(cache.batch, -1) if ids.shape[0] == 1 else ids
    if ids.shape[0] != cache.batch:
        raise InputError(f"{ids.shape[0]} rows of tokens for a cache of batch {cache.batch}.")
    return ids


@torch.no_grad()
def prefill(model: Model, token_ids: TokenIds, *, positions: Sequence[int] | Tensor | None = None) -> KVCache:
    """Run a prompt from nothing and keep its cache.

    Args:
        token_ids: `[batch pos]` or `[pos]`.
        positions: rotary position of each token, `[pos]`; 0, 1, 2, ... by default. Gaps are honoured.
    """
    ids = as_ids(model, token_ids)
    positions = places_of(model, ids, 0, positions)
    fork = compat.new_cache()
    hidden = compat.forward(model.hf, ids, fork, positions)
    keys, values = compat.read_cache(fork)
    cache = KVCache(keys, values, ids, positions, model.rope, model.model_id)
    require_finite_pass(model, hidden, cache)
    return cache


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
    ids = rows_for(model, cache, token_ids)
    positions = places_of(model, ids, cache.end, positions)
    hidden, keys, values = run(model, cache, ids, positions, attention.Plan())
    grown = cast(C, cache.appended(keys, values, ids, positions))
    require_finite_pass(model, hidden, grown)
    return grown, hidden


def places_of(
    model: Model, ids: Int[Tensor, "batch pos"], end: int, positions: Sequence[int] | Tensor | None
) -> Int[Tensor, " pos"]:
    """Positions from `end` on, or those given.

    Raises InputError when they do not fit the tokens, do not rise, lie before `end`, or lie beyond what the model has.
    """
    if positions is None:
        positions = range(end, end + ids.shape[1])
    places = indices("positions", positions).cpu()
    if places.shape != ids.shape[1:]:
        raise InputError(f"{tuple(places.shape)} positions for {ids.shape[1]} tokens.")
    if int(places[0]) < end:
        raise InputError(f"position {int(places[0])} lies before the cache's end {end}; new tokens go behind it.")
    if bool((places.diff() <= 0).any()):
        raise InputError("positions must rise from token to token.")
    if (limit := model.n_positions) is not None and int(places[-1]) >= limit:
        raise InputError(
            f"position {int(places[-1])} lies beyond the {limit} positions that {model.name} was made for "
            "(max_position_embeddings); shorten the prompt."
        )
    return places


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
    return logits_of(model, hidden[:, -1], answers)


def logits_of(
    model: Model, hidden: Float[Tensor, "*rows d_model"], answers: Sequence[int] | None = None
) -> Float[Tensor, "*rows answer"]:
    """Logits of the answer tokens (None: of all) from final hidden states, in at least float32: every probe's way.

    Raises NotFiniteError when a logit is NaN or infinite, InputError for a token that there is not.
    """
    index = None
    if answers is not None:
        index = torch.tensor(whole_numbers("answers", answers), dtype=torch.long)
        check_tokens(model, index, "answers")
    logits = compat.unembed(model.hf, hidden, index)
    require_finite(logits, model, "the logits")
    return logits


def require_finite_pass(model: Model, hidden: Float[Tensor, "batch pos d_model"], cache: Cache) -> None:
    """Raise NotFiniteError, naming the layer that went wrong first, unless a pass ended in numbers.

    `hidden` are the final states of the new tokens, `cache` what holds them at its end.
    """
    if not _finite(hidden):
        require_finite(hidden, model, "the final hidden states", layer=_culprit(cache, hidden.shape[1]))


def require_finite(numbers: Tensor, model: Model, what: str, *, layer: int | None = None) -> None:
    """Raise NotFiniteError, naming what is not finite, the layer and the dtype, unless all numbers are."""
    if _finite(numbers):
        return
    dtype = str(model.dtype).removeprefix("torch.")
    where = "" if layer is None else f" in layer {layer}"
    wider = {"float16": "bfloat16 or float32", "bfloat16": "float32"}.get(dtype)
    advice = f"Load it in {wider}, in case it overflows." if wider else "Look at its weights, or at what was put there."
    raise NotFiniteError(
        f"{NOT_FINITE}{where} ({dtype})",
        f"{model.name}: {what} are not finite in {dtype}{where and f', first{where}'}. {advice}",
    )


def _culprit(cache: Cache, new: int) -> int:
    """The layer that first gave a number that is not finite, told from the cache that the pass wrote."""
    for layer, (key, value) in enumerate(zip(cache.keys, cache.values, strict=True)):
        bad = [~torch.isfinite(t).cpu() for t in (key, value)]
        if any(bool(b.any()) for b in bad):
            # A new token whose keys and values are bad throughout read bad numbers: the layer below wrote them.
            read = bad[0][:, :, -new:].all(dim=(0, 1, 3)) & bad[1][:, :, -new:].all(dim=(0, 1, 3))
            return max(layer - 1, 0) if bool(read.any()) else layer
    return cache.n_layers - 1


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


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
    if not 0 <= temperature < math.inf:
        raise InputError(f"temperature={temperature}: 0 is greedy, above it tokens are drawn.")
    generator = torch.Generator().manual_seed(seed)
    stops = set(model.stop_ids if stop is None else stop)
    out: list[int] = []
    ids = as_ids(model, token_ids)
    last = cache.end + ids.shape[1] + max_new_tokens - 1  # the last token is not run
    if (limit := model.n_positions) is not None and last > limit:
        raise InputError(
            f"max_new_tokens={max_new_tokens} behind position {cache.end + ids.shape[1] - 1} goes beyond the {limit} "
            f"positions that {model.name} was made for; ask for fewer."
        )
    while len(out) < max_new_tokens:
        cache, hidden = extend(model, cache, ids)
        logits = logits_of(model, hidden[:, -1])[0].cpu()
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
    ids = rows_for(model, cache, tail)
    if cache.batch != 1 or not 1 <= rows <= ids.shape[1]:
        raise InputError(
            f"rows={rows} of a tail of {ids.shape[1]} tokens in batch {cache.batch}: 1 to all, of one row."
        )
    recorder = attention.Recorder(tuple(range(-rows, 0)))
    run(model, cache, ids, places_of(model, ids, cache.end, None), attention.Plan(recorder=recorder))
    for layer, seen in recorder.patterns.items():
        require_finite(seen, model, "the attention rows", layer=layer)
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
