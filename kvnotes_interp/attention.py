"""The one attention function this package registers, and what it can do that sdpa cannot.

`with using(hf, plan):` switches a model to it and back. A plan may
- add a per-key bias to the logits (compacted caches),
- cut edges: chosen queries no longer see chosen keys, in chosen layers and heads,
- let layers hold other numbers of keys than one another, each at a position of its own (compact caches),
- record the attention rows and the queries themselves of chosen slots in float32 (never a T x T matrix),
- attend to one shared base cache from many patched rows at once (the sweep).

Queries and keys are named by *slot*: their place in the whole sequence, the cache first, then the new tokens.

It proves that it took place: `using` counts the layers that called it, and refuses by name a model whose layers did
not, or which hand over a mask of their own where the plan would replace it.

Queries arrive post-rotary `[batch head pos d_head]`, keys and values `[batch kv_head pos d_head]`, heads not repeated.
Scaling, soft-cap and masks are the model's own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from kvnotes_interp import compat
from kvnotes_interp.attention_plan import Cut, KeyPositions, LayerPatch, Plan, Recorder, SharedBase
from kvnotes_interp.errors import InputError, KVNotesError, UnsupportedError

__all__ = [
    "Cut",
    "KeyPositions",
    "LayerPatch",
    "Plan",
    "Recorder",
    "SharedBase",
    "attend",
    "refusal",
    "require",
    "using",
]

NAME = "kvnotes"
# Tensors that transformers hands to every attention function and that a mask or a rotation has already taken in.
_TAKEN_IN = frozenset(
    [
        "position_ids",
        "position_embeddings",
        "cache_position",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
    ]
)
# How many bytes of attention scores one tile of rows may take. Tiles this size stay near a CPU's cache.
_TILE_BYTES = {"cpu": 8 << 20, "cuda": 256 << 20}

_ACTIVE: ContextVar[Plan | None] = ContextVar("kvnotes_attention_plan", default=None)
_REFUSALS: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


@contextmanager
def using(hf: PreTrainedModel, plan: Plan, *, layers: Iterable[int] | None = None) -> Iterator[Plan]:
    """Run `hf` with this attention function and `plan`; what the model used before is put back on the way out.

    `layers` are those that the passes inside go through, all by default. Raises UnsupportedError, naming the model and
    the layer, unless every one of them called the function, before anything is run where that is known already.
    """
    require(hf)
    with _switched(hf, plan):
        yield plan
    _require(hf, plan, range(compat.text_config(hf).num_hidden_layers) if layers is None else layers)


def require(hf: PreTrainedModel) -> None:
    """Raise UnsupportedError, before anything runs, where this function cannot stand in for the model's own."""
    if reason := refusal(hf):
        raise UnsupportedError(reason)


def refusal(hf: PreTrainedModel) -> str:
    """Why nothing can be cut, biased, recorded or recomputed in this model's attention, or an empty string.

    Tried on three tokens, once per model. Patched caches, which need no attention of ours, can be read all the same.
    """
    if hf not in _REFUSALS:
        _REFUSALS[hf] = _try(hf)
    return _REFUSALS[hf]


@torch.no_grad()
def _try(hf: PreTrainedModel) -> str:
    plan = Plan()
    try:
        with _switched(hf, plan):
            compat.forward(hf, torch.arange(3, 6, device=hf.device)[None], compat.new_cache(), torch.arange(3))
        _require(hf, plan, range(compat.text_config(hf).num_hidden_layers))
    except KVNotesError as error:
        return str(error)
    return ""


def _require(hf: PreTrainedModel, plan: Plan, layers: Iterable[int]) -> None:
    missing = [layer for layer in layers if not plan.ran[layer]]
    if missing:
        raise UnsupportedError(
            f"{type(hf).__name__}: layer {missing[0]} did not call the attention function that this package registers "
            f"({len(missing)} such layer{'s' if len(missing) > 1 else ''}). Cuts, key biases, attention records, "
            "recomputes and compact caches would silently not be applied there, so they are refused on this model; "
            "patching and reading whole caches is not affected."
        )


@contextmanager
def _switched(hf: PreTrainedModel, plan: Plan) -> Iterator[None]:
    _register()
    before = hf.config._attn_implementation or "eager"
    token = _ACTIVE.set(plan)
    try:
        hf.set_attn_implementation(NAME)
        yield
    finally:
        _ACTIVE.reset(token)
        hf.set_attn_implementation(before)
        plan.masks.clear()


def _register() -> None:
    # Both must be registered: without a mask function transformers hands over no mask, and a suffix over a cache would
    # silently see its own future.
    if NAME not in AttentionInterface._global_mapping:
        AttentionInterface.register(NAME, attend)
        AttentionMaskInterface.register(NAME, _full_mask)


def _full_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """sdpa's boolean mask, always spelled out: never skipped in favour of `is_causal`."""
    made = sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
    plan = _ACTIVE.get()
    if plan is not None and made is not None:
        plan.masks.append(made)
    return made


def attend(
    module: nn.Module,
    query: Float[Tensor, "batch head pos d_head"],
    key: Float[Tensor, "batch kv_head key d_head"],
    value: Float[Tensor, "batch kv_head key d_head"],
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "batch pos head d_head"], None]:
    """Attention as transformers calls it; what else happens is in the active plan."""
    plan = _ACTIVE.get() or Plan()
    _refuse_unknown(module, attention_mask, plan, kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    if plan.slots is not None:
        window = kwargs.get("sliding_window")
        attention_mask = _seen(plan.slots.to(key.device), key.shape[-2], window)
    if plan.compact is not None:
        groups = query.shape[1] // key.shape[1]
        attention_mask = _seen_compact(plan.compact, layer, kwargs.get("sliding_window"), groups).to(key.device)
    held = None if plan.bias is None else plan.bias[layer]
    cached = held if plan.compact is None else plan.compact.keys[layer][None]
    if cached is not None and cached.shape[1] != key.shape[1]:
        raise UnsupportedError(
            f"{type(module).__name__} of layer {layer} attends to {key.shape[1]} key heads and caches "
            f"{cached.shape[1]}: key biases and compact caches are refused on this model."
        )
    plan.ran[layer] += 1
    if plan.shared is not None:
        return _attend_shared(plan.shared, layer, query, key, value, scale, softcap), None
    out = _attend_plain(plan, layer, query, key, value, attention_mask, scale, softcap)
    return out.transpose(1, 2).contiguous(), None


def _refuse_unknown(module: nn.Module, mask: Tensor | None, plan: Plan, given: dict[str, Any]) -> None:
    """Refuse by name what a model asks of its attention and this function would leave out."""
    name = f"{type(module).__name__} of layer {module.layer_idx}"
    if given.get("s_aux") is not None or getattr(module, "sinks", None) is not None:
        raise UnsupportedError(
            f"{name} has attention sinks (an extra softmax column), which this attention function does not model."
        )
    unknown = [key for key, value in given.items() if isinstance(value, Tensor) and key not in _TAKEN_IN]
    if unknown:
        raise UnsupportedError(f"{name} hands {unknown[0]!r} to its attention, which this function does not model.")
    if mask is None or given.get("is_causal") is False:
        raise UnsupportedError(f"{name} attends without a causal mask, so its attention cannot be stood in for.")
    own = any(mask is m or (mask.dtype == m.dtype and mask.data_ptr() == m.data_ptr()) for m in plan.masks)
    if plan.replaces_mask and not own:
        raise UnsupportedError(
            f"{name} puts something of its own into the attention mask. Recomputed slots, compact caches and the "
            "shared sweep replace that mask and would lose it, so they are refused on this model."
        )


def _seen(slots: Tensor, n_keys: int, window: int | None) -> Bool[Tensor, "1 1 query key"]:
    """Causality, and the layer's window, counted in slots as transformers counts them."""
    keys = torch.arange(n_keys, device=slots.device)
    seen = keys <= slots[:, None]
    if window is not None:
        seen = seen & (keys > slots[:, None] - window)
    return seen[None, None]


def _seen_compact(where: KeyPositions, layer: int, window: int | None, groups: int) -> Bool[Tensor, "1 head query key"]:
    """All cached keys, those new tokens that come no later than the query, and of these what the window holds."""
    cached, queries = where.keys[layer], where.queries
    keys = torch.cat((cached, queries.expand(cached.shape[0], -1)), dim=1)[:, None]  # [kv_head 1 key]
    seen = keys <= queries[:, None]
    seen[..., : cached.shape[1]] = True
    if window is not None:
        seen = seen & (keys > queries[:, None] - window)
    return seen.repeat_interleave(groups, 0)[None]


def _capped(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def _attend_plain(
    plan: Plan,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
) -> Float[Tensor, "batch head pos d_head"]:
    groups = query.shape[1] // key.shape[1]
    exact = torch.promote_types(query.dtype, torch.float32)
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = _capped((query.to(exact) @ key.to(exact).mT) * scale, softcap)
    if plan.bias is not None and (bias := plan.bias[layer]) is not None:
        # A bias covers the cached keys; the new tokens behind them have none.
        scores[..., : bias.shape[-1]] += bias.to(exact).repeat_interleave(groups, 1)[:, :, None]
    if mask is not None:
        mask = mask[..., : key.shape[-2]]
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    start = key.shape[-2] - query.shape[-2]  # slot of the first query
    if (cut := _cut(plan.cuts, layer, scores, start)) is not None:
        scores = scores.masked_fill(cut, float("-inf"))
        if bool(torch.isneginf(scores).all(-1).any()):
            raise InputError(f"layer {layer}: a cut leaves a query without any key to attend to; spare its own slot.")
    weights = scores.softmax(-1)
    if plan.recorder is not None:
        _record(plan.recorder, layer, weights, query, start)
    return (weights @ value.to(exact)).to(query.dtype)


def _cut(
    cuts: Sequence[Sequence[Cut]], layer: int, scores: Tensor, start: int
) -> Bool[Tensor, "batch head query key"] | None:
    """Which scores of this layer are cut; batch and head are 1 where they make no difference."""
    here = [[c for c in row if (c.layers is None or layer in c.layers) and c.keys] for row in cuts]
    if not any(here):
        return None
    n_heads, n_queries, n_keys = scores.shape[1:]
    by_head = any(c.heads is not None for row in here for c in row)
    mask = torch.zeros(len(here), n_heads if by_head else 1, n_queries, n_keys, dtype=torch.bool)
    for index, row in enumerate(here):
        for c in row:
            heads = torch.tensor(range(mask.shape[1]) if c.heads is None else c.heads, dtype=torch.long)
            queries = torch.tensor(range(n_queries) if c.queries is None else [q - start for q in c.queries])
            mask[index, heads[:, None, None], queries[:, None], torch.tensor(c.keys)] = True
    return mask.to(scores.device)


def _record(recorder: Recorder, layer: int, weights: Tensor, query: Tensor, start: int) -> None:
    index = torch.tensor([s - start if s >= 0 else query.shape[2] + s for s in recorder.slots], device=query.device)
    if "patterns" in recorder.want:
        recorder.patterns[layer] = weights[:, :, index]
    if "queries" in recorder.want:
        recorder.queries[layer] = query[:, :, index].to(weights.dtype)


def _attend_shared(
    base: SharedBase,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    softcap: float | None,
) -> Float[Tensor, "row tail head d_head"]:
    """Every row's tail attends to the shared base, with its own patches put in, and to itself.

    Exact, not an approximation: a patched key replaces the base's logit at its slot, and its probability is taken from
    the base's value and given to the donor's. Nothing of size rows x pos x d_head is ever made; scores are tiled.
    """
    rows, heads, tail, d_head = query.shape
    kv_heads, n_pos = base.keys[layer].shape[:2]
    groups = heads // kv_heads
    # One pass per KV head over the rows of all its query heads: [kv_head (row group tail) d_head].
    query = query.reshape(rows, kv_heads, groups, tail, d_head).transpose(0, 1)
    # Empty columns at the end make room for each row's own tail, so that no score is ever copied.
    base_k = nn.functional.pad(base.keys[layer], (0, 0, 0, tail)).mT
    base_v = base.values[layer]
    width = kv_heads * groups * tail * (n_pos + tail) * 4
    tile = max(1, _TILE_BYTES.get(query.device.type, 64 << 20) // width)
    out = query.new_empty(rows, tail, heads, base_v.shape[-1])
    for start in range(0, rows, tile):
        part = slice(start, min(start + tile, rows))
        n = part.stop - part.start
        q = query[:, part].reshape(kv_heads, n * groups * tail, d_head)
        scores = torch.bmm(q, base_k).view(kv_heads, n, groups, tail, n_pos + tail)
        own_k, own_v = key[part].transpose(0, 1), value[part].transpose(0, 1)  # [kv_head row tail d_head]
        by_row = q.view(kv_heads, n, groups * tail, d_head)
        scores[..., n_pos:] = (by_row @ own_k.mT).view(kv_heads, n, groups, tail, tail)
        patch = base.patch
        if patch is not None and patch.k_rows is not None:
            theirs = torch.matmul(q, patch.keys.mT).view(kv_heads, n, groups, tail, -1)
            take = patch.k_rows[:, part, None, None]
            scores[..., patch.slots] = torch.where(take, theirs, scores[..., patch.slots])
        weights = _softmax(base, layer, scores, scale, softcap, n_pos, part)
        moved = None
        if patch is not None and patch.v_rows is not None:
            here = weights[..., patch.slots]
            moved = here * patch.v_rows[:, part, None, None]
            weights[..., patch.slots] = here - moved
        flat = weights.view(kv_heads, n * groups * tail, n_pos + tail)
        mixed = torch.bmm(flat[..., :n_pos], base_v).view(kv_heads, n, groups * tail, -1)
        mixed = mixed + weights[..., n_pos:].reshape(kv_heads, n, groups * tail, tail) @ own_v
        if moved is not None:
            mixed = mixed + torch.matmul(moved.flatten(1, 3), patch.values).view_as(mixed)  # type: ignore[union-attr]
        mixed = mixed.view(kv_heads, n, groups, tail, -1).permute(1, 3, 0, 2, 4)
        out[part] = mixed.reshape(n, tail, heads, -1)
    return out


def _softmax(
    base: SharedBase, layer: int, scores: Tensor, scale: float, softcap: float | None, n_pos: int, rows: slice
) -> Float[Tensor, "kv_head row group tail key"]:
    scores = _capped(scores.mul_(scale), softcap)
    if base.bias is not None and (bias := base.bias[layer]) is not None:
        scores[..., :n_pos] += bias[:, None, None, None]
    patch = base.patch
    if patch is not None and patch.bias is not None and patch.k_rows is not None:
        scores[..., patch.slots] += (patch.bias[:, None] * patch.k_rows[:, rows])[:, :, None, None]
    if base.masked is not None:
        scores = scores.masked_fill(base.masked.to(scores.device), float("-inf"))
    return scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)
