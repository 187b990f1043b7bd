"""Slow, plain references: one forward, one cache, one site at a time. Nothing of kvnotes_interp is used here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

KV = tuple[Tensor, Tensor]  # keys and values of one layer, [batch kv_head pos d_head]


@torch.no_grad()
def full_logits(hf: PreTrainedModel, ids: Tensor, positions: Tensor | None = None) -> Tensor:
    """Logits `[batch pos vocab]` of one plain forward without any cache.

    `positions` `[pos]` need the mask of ones that goes with them: without it, transformers would take a gap in them
    for the seam between two packed sequences.
    """
    if positions is None:
        return hf(input_ids=ids, use_cache=False).logits
    mask = torch.ones_like(ids)
    return hf(input_ids=ids, position_ids=_rows(positions, ids), attention_mask=mask, use_cache=False).logits


@torch.no_grad()
def full_cache(hf: PreTrainedModel, ids: Tensor, positions: Tensor | None = None) -> list[KV]:
    """Keys and values per layer after one plain forward at `positions` (default 0, 1, ...)."""
    cache = DynamicCache()
    positions = torch.arange(ids.shape[1]) if positions is None else positions
    hf(input_ids=ids, position_ids=_rows(positions, ids), past_key_values=cache, use_cache=True)
    return [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]


@torch.no_grad()
def answer_with_cache(hf: PreTrainedModel, kvs: Sequence[KV], ids_tail: Tensor, positions: Tensor) -> Tensor:
    """Logits `[batch tail vocab]` of the tail on top of a fresh cache that holds copies of `kvs`."""
    cache = DynamicCache()
    for index, (key, value) in enumerate(kvs):
        cache.update(key.clone(), value.clone(), index)
    hf_out = hf(input_ids=ids_tail, position_ids=_rows(positions, ids_tail), past_key_values=cache, use_cache=True)
    return hf_out.logits


def patched(
    base: Sequence[KV],
    donor: Sequence[KV],
    *,
    layers: Iterable[int] | None,
    positions: Iterable[int],
    part: str = "kv",
    kv_heads: Iterable[int] | None = None,
) -> list[KV]:
    """A copy of `base` with the named cells overwritten from `donor`, cell by cell. None means all."""
    out = [(key.clone(), value.clone()) for key, value in base]
    every_layer = range(len(out)) if layers is None else layers
    every_head = range(out[0][0].shape[1]) if kv_heads is None else list(kv_heads)
    every_position = list(positions)
    for layer in every_layer:
        for position in every_position:
            for head in every_head:
                if "k" in part:
                    out[layer][0][:, head, position] = donor[layer][0][:, head, position]
                if "v" in part:
                    out[layer][1][:, head, position] = donor[layer][1][:, head, position]
    return out


def patched_logits(
    hf: PreTrainedModel,
    base_kvs: Sequence[KV],
    donor_kvs: Sequence[KV],
    *,
    layers: Iterable[int] | None,
    positions: Sequence[int],
    part: str,
    kv_heads: Sequence[int] | None,
    tail_ids: Tensor,
    tail_positions: Tensor,
) -> Tensor:
    """Logits `[batch tail vocab]` of the tail after one site of `base` was overwritten from `donor`."""
    kvs = patched(base_kvs, donor_kvs, layers=layers, positions=positions, part=part, kv_heads=kv_heads)
    return answer_with_cache(hf, kvs, tail_ids, tail_positions)


def _rows(positions: Tensor, ids: Tensor) -> Tensor:
    return positions[None].expand(ids.shape[0], -1)
