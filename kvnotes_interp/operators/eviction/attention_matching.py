"""Attention Matching: few keys with biases and values of their own that attend as the whole cache does.

(Zweiger et al., arXiv 2602.16284: highest-attention keys, biases, values by least squares.) Per layer and KV head:

1. the slots to which the reference queries attend most (root mean square over queries) lend their keys;
2. a bias per key, the log of non-negative weights with which the kept exponentials sum to those of the whole cache, so
   that the cache keeps its share of attention beside tokens that come later;
3. values with which attention over the kept keys gives the output of attention over all, by least squares.

Reference queries are those of tokens run behind the cache: by default its own tokens once more ("repeat-prefill").
Every query counts alike: sums are matched relative to each query's own. Both solves are pulled, by `ridge`, to what the
kept slots were, weight 1 and their own value, and run in float64. The authors' code holds weights between e^-3 and e^3
and can take a layer's queries from a model that already reads the compacted layers below; neither is done here.

What a match does not prove: it holds for the reference queries. A question that attends elsewhere reads values that
were fitted to others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvnotes_interp.compact import Cache
from kvnotes_interp.engine.forward import TokenIds, as_ids
from kvnotes_interp.errors import InputError
from kvnotes_interp.operators.eviction.compacted import (
    Budget,
    Compacted,
    Sliding,
    by_kv_head,
    compacted_layers,
    counts_of,
    highest,
    kept,
    own_tokens,
    slots_of,
    whole,
)
from kvnotes_interp.operators.eviction.nnls import nnls
from kvnotes_interp.operators.eviction.observing import watch_behind

if TYPE_CHECKING:
    from kvnotes_interp.model import Model

_LEAST_WEIGHT = 1e-6  # a weight of zero would be a bias of minus infinity


def attention_matching(
    model: Model,
    cache: Cache,
    *,
    budget: Budget,
    sliding: Sliding = "keep",
    references: int = 256,
    ridge: float = 1e-6,
    observe: TokenIds | None = None,
) -> Compacted:
    """Keep the keys of highest attention, and fit biases and values.

    Args:
        references: tokens whose queries are matched, evenly spaced among those observed; all of them choose the keys.
        ridge: pull to weight 1 and to the slots' own values, relative to the mean square of what is fitted.
        observe: token ids to run behind the cache; by default the cache's own. They are run twice: for the choice and
            for the fit. A question given here makes the method query-aware: say so.

    Slots are common to the batch (attention is summed over it); biases and values are each row's own. `sources` name
    the slot that lent its key. Raises InputError for options out of range, and without `observe` where slots are no
    tokens.
    """
    if references < 1 or not ridge > 0:
        raise InputError(f"references={references}, ridge={ridge}: give at least one reference and a ridge above 0.")
    counts = counts_of(model, cache, budget, sliding)
    layers = compacted_layers(cache, counts)
    if not layers:
        return Compacted(whole(cache))
    ids = as_ids(model, own_tokens(cache, "attention_matching")[1] if observe is None else observe)
    scores, first = _squares(model, cache, ids)
    chosen = {layer: highest(by_kv_head(scores[layer], cache.n_kv_heads), counts[layer]) for layer in layers}
    total = ids.shape[1]
    among = torch.linspace(0, total - 1, min(references, total)).round().long()
    rows, second = _reference_rows(model, cache, ids, chosen, among)
    out = kept(cache, chosen)
    values = list(out.values)
    biases = list(out.bias or (None,) * out.n_layers)
    for layer in layers:
        weights, values[layer] = fit(*rows.pop(layer), out.values[layer], ridge=ridge)
        bias = weights.clamp_min(_LEAST_WEIGHT).log().to(out.dtype)
        before = biases[layer]
        biases[layer] = bias if before is None else before + bias
    out = replace(out, values=tuple(values), bias=tuple(biases))
    return Compacted(out, first + second)


def fit(
    attention: Float[Tensor, "batch kv_head row slot"],
    outputs: Float[Tensor, "batch kv_head row d_head"],
    values: Float[Tensor, "batch kv_head slot d_head"],
    *,
    ridge: float,
) -> tuple[Float[Tensor, "batch kv_head slot"], Float[Tensor, "batch kv_head slot d_head"]]:
    """(weights in float64, values in their own dtype) with which the kept slots attend as all slots do.

    Args:
        attention: of each reference row to the kept slots, as a share of its attention to all slots of the cache.
        outputs: of attention over all slots. Rows of zeros in `attention` see no kept slot and are left out.
        values: those of the kept slots.
    """
    attention, outputs = attention.double(), outputs.double()
    own, (batch, heads, _, count) = values.to(attention), attention.shape
    seen = (attention.sum(-1, keepdim=True) > 0).double()
    weights = own.new_empty(batch, heads, count)
    for row in range(batch):
        for head in range(heads):
            part = attention[row, head][seen[row, head, :, 0] > 0]
            pull = torch.eye(count, dtype=part.dtype, device=part.device) * _root(part, ridge)
            weights[row, head] = nnls(torch.cat((part, pull)), torch.cat((part.new_ones(len(part)), pull.diagonal())))
    mixed = attention * weights.clamp_min(_LEAST_WEIGHT)[:, :, None]
    mixed = mixed / mixed.sum(-1, keepdim=True).where(seen > 0, 1.0)
    # Fitted is the change of the values, so that the ridge pulls it to nothing.
    pull = torch.eye(count, dtype=mixed.dtype, device=mixed.device) * _root(mixed, ridge)[..., None, None]
    missing = (outputs - mixed @ own) * seen
    change = torch.linalg.lstsq(
        torch.cat((mixed, pull), dim=2), torch.cat((missing, torch.zeros_like(own)), dim=2), driver="gels"
    ).solution
    return weights, (own + change).to(values.dtype)


def _root(part: Tensor, ridge: float) -> Tensor:
    """Square root of the ridge times the mean of the Gram matrix's diagonal; never zero."""
    return (ridge * part.square().sum((-2, -1)) / part.shape[-1]).clamp_min(1e-30).sqrt()


def _shares(rows: Tensor) -> Tensor:
    """Rows over the cached keys as shares of each row's own sum; rows that see none of them stay zero."""
    mass = rows.sum(-1, keepdim=True)
    return rows / mass.where(mass > 0, 1.0)


def _squares(model: Model, cache: Cache, ids: Tensor) -> tuple[list[Float[Tensor, "batch head slot"]], int]:
    """Per layer, the sum over observed tokens of squared attention shares; layer-tokens run."""
    n_heads = model.shape.n_heads
    sums = [torch.zeros(cache.batch, n_heads, n, dtype=torch.float64) for n in slots_of(cache)]

    def add(layer: int, _start: int, rows: Tensor) -> None:
        sums[layer] += _shares(rows).square().sum(2).cpu()

    return sums, watch_behind(model, cache, ids, add)


def _reference_rows(
    model: Model,
    cache: Cache,
    ids: Tensor,
    chosen: dict[int, Int[Tensor, "kv_head kept"]],
    among: Int[Tensor, " reference"],
) -> tuple[dict[int, tuple[Tensor, Tensor]], int]:
    """({layer: (attention to the kept slots, attention output over all)}, layer-tokens run).

    Rows are those of all query heads of a group: `[batch kv_head row slot]`, `[batch kv_head row d_head]`. Of the rows
    over all slots, one layer's and one block's are held at a time.
    """
    groups = model.shape.n_heads // cache.n_kv_heads
    found: dict[int, list[tuple[Tensor, Tensor]]] = {layer: [] for layer in chosen}

    def take(layer: int, start: int, rows: Tensor) -> None:
        at = among[(among >= start) & (among < start + rows.shape[2])] - start
        if layer not in chosen or not len(at):
            return
        shares = _shares(rows[:, :, at.to(rows.device)]).unflatten(1, (-1, groups)).flatten(2, 3)
        index = chosen[layer].to(rows.device)[None, :, None].expand(*shares.shape[:3], -1)
        found[layer].append((shares.gather(3, index), shares @ cache.values[layer].to(shares.dtype)))

    layer_tokens = watch_behind(model, cache, ids, take)
    joined = {
        layer: (torch.cat([a for a, _ in parts], dim=2), torch.cat([o for _, o in parts], dim=2))
        for layer, parts in found.items()
    }
    return joined, layer_tokens
