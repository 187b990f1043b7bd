"""The sweep's shared path: thousands of patched caches that attend to one base.

1. The base's tail is run once; each decoder layer's input and keyword arguments are kept.
2. A row whose first patched layer is l starts there, from the base's hidden state: below l nothing differs.
3. Layers are walked once per batch, and rows join as their first layer comes up, so that the weights are read once and
   each layer is one large matrix product. Layers are the model's own modules, called as the model called them.
4. Rows hold their tail only. The attention function (see `attention.py`) reads the base for all of them at once.
5. Only the answer tokens' rows of the unembedding are multiplied.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from kvnotes_interp import attention, compat
from kvnotes_interp.cache import KVCache, full_bias
from kvnotes_interp.errors import UnsupportedError
from kvnotes_interp.sites import Site

if TYPE_CHECKING:
    from kvnotes_interp.model import Model

# Beyond this many rows a matrix product is no faster. On a CPU more are slower: activations leave the processor's
# caches, and tensors of several MB are handed back to the system and faulted in again on every call.
MAX_ROWS = {"cpu": 256, "cuda": 2048}

# Masks of a batch by the rows that patch, so that they are built once and not once per layer.
_Memo = dict[tuple[tuple[int, ...], int, torch.device], tuple[Tensor | None, ...]]

_REFUSALS: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class _Call:
    """How the model called one decoder layer on the base's tail."""

    hidden: Float[Tensor, "1 tail d_model"]
    kwargs: dict[str, Any]


def refusal(model: Model) -> str:
    """Why this model cannot take the shared path, or an empty string. Tried once per model, then remembered.

    The trial replays the layers on a tiny prompt and compares with the model's own forward.
    """
    if model.hf not in _REFUSALS:
        _REFUSALS[model.hf] = _try(model)
    return _REFUSALS[model.hf]


def _try(model: Model) -> str:
    from kvnotes_interp.engine.forward import decide, noise_floor, prefill

    ids = list(range(3, 11))
    cache, answers = prefill(model, ids[:-2]), (1, 2)
    tail = torch.tensor([ids[-2:]], device=model.device)
    try:
        site = Site(positions=(0, 2), layers=(0,))
        donor = prefill(model, list(reversed(ids[:-2])))
        got = run(model, cache, donor, [Site(()), site], tail, answers, 2, None)
        want = torch.cat([decide(model, c, tail, answers).cpu() for c in (cache, cache.patched(site, donor))])
    except Exception as error:  # whatever a foreign layer raises, the plain path still serves it
        return f"its decoder layers cannot be replayed one by one ({type(error).__name__}: {error})."
    gap, scale = float((got - want).abs().max()), max(1.0, float(want.abs().max()))
    # A float64 model is held to float32: transformers' eager attention takes its softmax there. On some processors the
    # model's own forward differs by more than that between batches, and no replay can be nearer to it than that.
    rounding = max(8 * torch.finfo(model.dtype).eps, 64 * torch.finfo(torch.float32).eps) * scale
    limit = max(rounding, 4 * noise_floor(model, cache, tail, answers))
    return "" if gap <= limit else f"replayed layers miss its own forward by {gap:.2g} (limit {limit:.2g})."


@torch.no_grad()
def run(
    model: Model,
    base: KVCache,
    donor: KVCache,
    sites: Sequence[Site],
    tail: Tensor,
    answers: Sequence[int],
    rows: int,
    progress: Any,
) -> Float[Tensor, "site answer"]:
    """Scores `[site answer]` of every site, on the CPU, in the order given."""
    n = base.n_layers
    first = [min(s.layers_of(n)) if s.positions and s.layers_of(n) else n for s in sites]
    order = sorted(range(len(sites)), key=first.__getitem__)
    index = torch.as_tensor(list(answers))
    head = _Base(base, donor)
    # The plan's bias makes the recorded hidden states those of the biased base; from then on the shared base has it.
    with attention.using(model.hf, attention.Plan(bias=base.bias)) as plan:
        calls, last = _record(model, base, tail)
        plan.shared = attention.SharedBase(
            head.keys, head.values, head.bias, masked=_masked(calls[0].kwargs, len(base), tail.shape[1])
        )
        masks: dict[int, Tensor | None] = {}
        out: list[Tensor] = []
        for start in range(0, len(order), rows):
            batch = [sites[i] for i in order[start : start + rows]]
            begin = [first[i] for i in order[start : start + rows]]
            hidden = _walk(model, plan, head, calls, masks, batch, begin)
            if hidden.shape[0] < len(batch):  # rows that patch nothing are the base itself
                rest = last.expand(len(batch) - hidden.shape[0], -1, -1)
                hidden = torch.cat((hidden.to(rest.device), rest))
            normed = compat.final_norm(model.hf)(hidden[:, -1])
            out.append(compat.unembed(model.hf, normed, index))
            if progress is not None:
                progress(len(batch))
    scores = torch.cat(out).cpu()
    return scores[torch.tensor(order).argsort()]


class _Base:
    """Base and donor as `[kv_head pos d_head]` per layer."""

    def __init__(self, base: KVCache, donor: KVCache) -> None:
        self.keys = tuple(k[0] for k in base.keys)
        self.values = tuple(v[0] for v in base.values)
        self.donor_keys = tuple(k[0] for k in donor.keys)
        self.donor_values = tuple(v[0] for v in donor.values)
        self.bias = None if base.bias is None else tuple(None if b is None else b[0] for b in base.bias)
        self.more_bias = None  # the donor's over the base's
        if base.bias is not None or donor.bias is not None:
            self.more_bias = tuple(b[0] - a[0] for a, b in zip(full_bias(base), full_bias(donor), strict=True))
        self.n_layers, self.n_kv_heads = base.n_layers, base.n_kv_heads


def _record(model: Model, base: KVCache, tail: Tensor) -> tuple[list[_Call], Float[Tensor, "1 tail d_model"]]:
    """Run the base's tail once, keeping how each layer was called and what the last one returned (before the norm)."""
    calls: list[_Call] = []
    last: list[Tensor] = []

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kwargs = dict(kwargs)
        hidden = args[0] if args else kwargs.pop("hidden_states")
        calls.append(_Call(hidden, kwargs))

    def after(_module: nn.Module, _args: Any, output: Any) -> None:
        last.append(output[0] if isinstance(output, tuple) else output)

    layers = compat.layers(model.hf)
    handles = [layer.register_forward_pre_hook(before, with_kwargs=True) for layer in layers]
    handles.append(layers[-1].register_forward_hook(after))
    try:
        fork = compat.new_cache(base.keys, base.values)
        positions = torch.arange(base.end, base.end + tail.shape[1])
        compat.forward(model.hf, tail, fork, positions)
    finally:
        for handle in handles:
            handle.remove()
    if len(calls) != len(layers) or len(last) != 1:
        raise UnsupportedError(
            f"{model.name} called {len(calls)} of its {len(layers)} layers; they cannot be replayed."
        )
    return calls, last[0]


def _masked(kwargs: dict[str, Any], n_pos: int, n_tail: int) -> Bool[Tensor, "tail key"] | None:
    mask = kwargs.get("attention_mask")
    if mask is None:
        return None
    forbidden = ~mask[0, 0, -n_tail:, : n_pos + n_tail]
    return forbidden if bool(forbidden.any()) else None


def _walk(
    model: Model,
    plan: attention.Plan,
    head: _Base,
    calls: list[_Call],
    masks: dict[int, Tensor | None],
    sites: Sequence[Site],
    first: Sequence[int],
) -> Float[Tensor, "row tail d_model"]:
    """Hidden states after the last layer of every site that patches something; `first` is sorted."""
    hidden: Tensor | None = None
    joined, shared = 0, plan.shared
    shape_memo: _Memo = {}
    empty = compat.PassThroughCache()
    ran = plan.ran
    for index, layer in enumerate(compat.layers(model.hf)):
        call = calls[index]
        arriving = sum(1 for f in first[joined:] if f == index)
        if arriving:
            joined += arriving
            start = call.hidden.expand(arriving, -1, -1)
            hidden = start if hidden is None else torch.cat((hidden, start.to(hidden.device)))
        if hidden is None:
            continue
        assert shared is not None
        shared.patch = _layer_patch(head, sites[:joined], index, shape_memo)
        kind = id(call.kwargs.get("attention_mask"))
        if kind not in masks:
            masks[kind] = _masked(call.kwargs, shared.keys[index].shape[1], call.hidden.shape[1])
        shared.masked = masks[kind]
        before = ran[index]
        output = layer(hidden, **compat.replay_arguments(call.kwargs, empty))
        if ran[index] != before + 1:
            raise UnsupportedError(
                f"layer {index} of {model.name} did not read the patched caches when it was replayed."
            )
        hidden = output[0] if isinstance(output, tuple) else output
    return calls[0].hidden[:0] if hidden is None else hidden


def _layer_patch(head: _Base, sites: Sequence[Site], layer: int, memo: _Memo) -> attention.LayerPatch | None:
    """Which of these rows patch which slots of this layer, and with what."""
    here = tuple(row for row, s in enumerate(sites) if s.positions and (s.layers is None or layer in s.layers))
    if not here:
        return None
    device = head.keys[layer].device
    key = (here, len(sites), device)
    if key not in memo:  # sites that span layers ask for the same masks in each
        memo[key] = tuple(None if t is None else t.to(device) for t in _rows_and_slots(head, sites, here))
    slots, k_rows, v_rows = memo[key]
    assert slots is not None
    keys, values = head.donor_keys[layer][:, slots], head.donor_values[layer][:, slots]
    bias = None if head.more_bias is None else head.more_bias[layer][:, slots]
    return attention.LayerPatch(slots, keys, values, k_rows, v_rows, bias)


def _rows_and_slots(head: _Base, sites: Sequence[Site], here: Sequence[int]) -> tuple[Tensor | None, ...]:
    """The union of the slots that rows `here` patch `[slot]`, and masks `[kv_head|1 row slot]` over it for K and V."""
    slots = sorted({p for row in here for p in sites[row].positions})
    column = {p: i for i, p in enumerate(slots)}
    by_head = any(sites[row].kv_heads is not None for row in here)
    shape = (head.n_kv_heads if by_head else 1, len(sites), len(slots))
    masks: list[Tensor | None] = []
    for part in ("k", "v"):
        cells = [
            (h, row, column[p])
            for row in here
            if part in sites[row].part
            for h in (range(shape[0]) if sites[row].kv_heads is None else sites[row].kv_heads or ())
            for p in sites[row].positions
        ]
        mask = torch.zeros(shape, dtype=torch.bool)
        if cells:
            mask[tuple(torch.tensor(cells).T)] = True
        masks.append(mask if cells else None)
    return torch.tensor(slots), *masks
