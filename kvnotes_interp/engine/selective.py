"""Recomputing some slots of a cache: their hidden states are run again, layer by layer, on the mixed cache.

Each chosen token attends to what the cache now holds before it: recomputed keys where a token was recomputed, the old
ones elsewhere. This is what a serving engine can do; copying slots out of a full prefill of the new prompt (an oracle
patch, `KVCache.patched`) is not, since it needs the very pass that was to be saved. (CacheBlend, arXiv 2405.16444.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from kvnotes_interp import attention, compat
from kvnotes_interp.cache import KVCache
from kvnotes_interp.engine.forward import as_ids
from kvnotes_interp.errors import InputError, UnsupportedError, whole_numbers

if TYPE_CHECKING:
    from kvnotes_interp.model import Model


@dataclass(frozen=True)
class Recomputed:
    """A cache with some slots computed anew.

    Attributes:
        slots: the slots that went through every layer, rising.
        layer_tokens: tokens run, counted once per layer they went through.
    """

    cache: KVCache
    slots: tuple[int, ...]
    layer_tokens: int


@torch.no_grad()
def recompute(
    model: Model, cache: KVCache, slots: Sequence[int], *, token_ids: Sequence[int] | None = None
) -> Recomputed:
    """Compute keys and values of `slots` anew, in all layers, attending to the mixed cache.

    Args:
        cache: batch 1, one slot per token. slots: which ones; every slot gives a plain prefill.
        token_ids: what the slots, in rising order, hold now; by default the cache's own tokens.

    Raises InputError when a slot lies outside the cache or the cache is not this model's.
    """
    chosen, ids = _checked(model, cache, slots, token_ids)
    if not chosen:
        return Recomputed(cache, (), 0)
    keys, values, _ = _run(model, cache, chosen, ids, first=0, hidden=None, stop=None)
    mixed = _with(cache, keys, values, chosen, ids)
    return Recomputed(mixed, chosen, len(chosen) * cache.n_layers)


@torch.no_grad()
def blend(
    model: Model,
    cache: KVCache,
    candidates: Sequence[int],
    keep: int,
    *,
    token_ids: Sequence[int] | None = None,
    always: Sequence[int] = (),
    check_layer: int = 1,
) -> Recomputed:
    """CacheBlend: run all candidates through the first layers, then only those whose keys and values changed most.

    Candidates go through layers 0 to `check_layer`; there the squared change of K plus that of V, summed over heads,
    against what the cache held ranks them. The `keep` highest, and those in `always`, go on through the other layers;
    the others keep their new K, V in the first layers and the cache's in the rest. (CacheBlend, arXiv 2405.16444.)

    Args:
        candidates: slots, usually all that may be stale. token_ids: what they hold now, in rising order.
        always: candidates that are kept whatever their rank (the field, whose token changed), counted in `keep`.

    Raises InputError as `recompute`, and when `check_layer` is not a layer, or `keep` or `always` not possible.
    """
    chosen, ids = _checked(model, cache, candidates, token_ids)
    if not 0 <= check_layer < cache.n_layers:
        raise InputError(f"check_layer={check_layer}: the model has layers 0 to {cache.n_layers - 1}.")
    if not set(always) <= set(chosen):
        raise InputError(f"always holds {min(set(always) - set(chosen))}, which is none of the candidates.")
    if not len(set(always)) <= keep <= len(chosen):
        raise InputError(f"keep={keep}: choose from {len(set(always))} (always kept) to {len(chosen)} (candidates).")
    if not chosen:
        return Recomputed(cache, (), 0)
    keys, values, hidden = _run(model, cache, chosen, ids, first=0, hidden=None, stop=check_layer + 1)
    shallow = _with(cache, keys, values, chosen, ids)
    at = torch.tensor(chosen)
    change = sum(
        (new[0][:, at] - old[0][:, at]).double().square().sum((0, 2))
        for new, old in ((keys[check_layer], cache.keys[check_layer]), (values[check_layer], cache.values[check_layer]))
    )
    assert isinstance(change, Tensor)
    forced = torch.tensor([slot in set(always) for slot in chosen], device=change.device)
    order = torch.where(forced, torch.inf, change).argsort(descending=True, stable=True)
    rows = sorted(order[:keep].tolist())
    kept = tuple(chosen[row] for row in rows)
    cost = len(chosen) * (check_layer + 1) + len(kept) * (cache.n_layers - check_layer - 1)
    if not kept or check_layer == cache.n_layers - 1:
        return Recomputed(shallow, kept, cost)
    assert hidden is not None
    pick = torch.tensor(rows, device=ids.device)
    keys, values, _ = _run(
        model, shallow, kept, ids[pick], first=check_layer + 1, hidden=hidden[:, pick.to(hidden.device)], stop=None
    )
    return Recomputed(_with(shallow, keys, values, kept, ids[pick]), kept, cost)


def _checked(
    model: Model, cache: KVCache, slots: Sequence[int], token_ids: Sequence[int] | None
) -> tuple[tuple[int, ...], Int[Tensor, " slot"]]:
    chosen = tuple(sorted(set(whole_numbers("slots", slots))))
    model.require_own(cache)
    if not isinstance(cache, KVCache):
        raise InputError(f"slots of a compact cache are no tokens and cannot be recomputed; this one is {cache!r}.")
    if cache.batch != 1 or cache.bias is not None:
        raise InputError(f"slots are recomputed in a cache of batch 1 without key bias; this one is {cache!r}.")
    bad = [s for s in chosen if not 0 <= s < len(cache)]
    if bad:
        raise InputError(f"slots holds {bad[0]}, but the cache has {len(cache)} (0 to {len(cache) - 1}).")
    if token_ids is not None and len(token_ids) != len(chosen):
        raise InputError(f"{len(token_ids)} token ids for {len(chosen)} slots: give one for each, in rising order.")
    ids = cache.token_ids[0, list(chosen)] if token_ids is None else torch.as_tensor(list(token_ids))
    return chosen, as_ids(model, ids)[0] if chosen else ids


def _with(cache: KVCache, keys: Any, values: Any, slots: tuple[int, ...], ids: Tensor) -> KVCache:
    tokens = cache.token_ids.clone()
    tokens[0, list(slots)] = ids.to(tokens.device)
    return replace(cache, keys=tuple(keys), values=tuple(values), token_ids=tokens)


class _Stop(Exception):
    pass


def _run(
    model: Model,
    cache: KVCache,
    slots: tuple[int, ...],
    ids: Tensor,
    *,
    first: int,
    hidden: Float[Tensor, "1 slot d_model"] | None,
    stop: int | None,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Float[Tensor, "1 slot d_model"] | None]:
    """Run the tokens of `slots` through layers `first` up to `stop`; K, V of all layers, and what `stop` reads."""
    at = torch.tensor(slots)
    fork = compat.SlotCache(cache.keys, cache.values, at)
    layers = compat.layers(model.hf)
    read: list[Tensor] = []

    def halt(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        read.append(args[0] if args else kwargs["hidden_states"])
        raise _Stop

    def enter(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})

    handles = []
    if stop is not None and stop < len(layers):
        handles.append(layers[stop].register_forward_pre_hook(halt, with_kwargs=True))
    if hidden is not None:
        handles.append(layers[first].register_forward_pre_hook(enter, with_kwargs=True))
    through = range(first, len(layers) if stop is None else min(stop, len(layers)))
    try:
        with (
            _skipped(layers[:first]),
            attention.using(model.hf, attention.Plan(slots=at), layers=through),
            suppress(_Stop),
        ):
            compat.forward(model.hf, ids[None], fork, cache.positions[list(slots)])
    finally:
        for handle in handles:
            handle.remove()
    if fork.written != set(through):
        raise UnsupportedError(
            f"{model.name} wrote new keys in layers {sorted(fork.written)}, and {through} were to be recomputed."
        )
    return *compat.read_cache(fork), read[0] if read else None


@contextmanager
def _skipped(layers: Sequence[nn.Module]) -> Iterator[None]:
    """These layers hand their input on and run nothing; what they were is put back on the way out."""
    before = [vars(layer).get("forward") for layer in layers]

    def hand_on(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states

    try:
        for layer in layers:
            layer.forward = hand_on
        yield
    finally:
        for layer, own in zip(layers, before, strict=True):
            if own is None:
                del layer.forward
            else:
                layer.forward = own
