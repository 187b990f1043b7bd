"""One forward pass that records what happens at chosen slots and, if asked, interferes with it.

Everything a circuit analysis needs, and nothing is stored that was not asked for: the residual stream, what attention
and MLP add to it, head outputs, attention rows, queries. Interference is a value too (`Edits`): edges cut, head
outputs replaced, vectors added to the residual stream, writes replaced. A record says what the edited pass did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kvnotes_interp import attention, compat
from kvnotes_interp.cache import KVCache
from kvnotes_interp.compact import CompactCache
from kvnotes_interp.engine import edits as checking
from kvnotes_interp.engine.edits import Edits
from kvnotes_interp.engine.forward import (
    TokenIds,
    as_ids,
    logits_of,
    places_of,
    require_finite,
    require_finite_pass,
    rows_for,
)
from kvnotes_interp.engine.hooks import Hooks
from kvnotes_interp.errors import InputError, UnsupportedError, nearest, whole_numbers

if TYPE_CHECKING:
    from kvnotes_interp.model import Model

WANTS = ("residual", "attention", "mlp", "heads", "patterns", "queries")
_BY_ATTENTION = frozenset({"patterns", "queries"})  # recorded by the attention function, the rest by hooks


@dataclass(frozen=True)
class Captured:
    """What was recorded at `slots`, on the CPU, in at least float32; None where it was not asked for.

    Attributes:
        slots: the recorded slots: places in the whole sequence, cache first.
        cache: the cache grown by the new tokens, as the edited pass wrote it.
        hidden: final, normed hidden states of all new tokens; `compat.unembed` takes them.
        residual: what each layer reads, and last what the final norm reads.
        attention, mlp: what each layer's attention and MLP added to the residual stream.
        heads: head outputs as the output projection reads them. patterns: attention rows. queries: rotated queries.
    """

    slots: tuple[int, ...]
    cache: KVCache
    hidden: Float[Tensor, "batch pos d_model"]
    residual: Float[Tensor, "layer+1 batch slot d_model"] | None = None
    attention: Float[Tensor, "layer batch slot d_model"] | None = None
    mlp: Float[Tensor, "layer batch slot d_model"] | None = None
    heads: Float[Tensor, "layer batch slot head d_head"] | None = None
    patterns: Float[Tensor, "layer batch head slot key"] | None = None
    queries: Float[Tensor, "layer batch head slot d_head"] | None = None


@torch.no_grad()
def capture(
    model: Model,
    cache: KVCache | None,
    token_ids: TokenIds,
    *,
    slots: Sequence[int] | None = None,
    want: Sequence[str] = ("residual",),
    edits: Edits | None = None,
    positions: Sequence[int] | Tensor | None = None,
) -> Captured:
    """Run `token_ids` on top of `cache` (or from nothing) and record `want` at `slots`.

    Args:
        token_ids: `[pos]` or `[batch pos]`; a single row is run for every row of the cache.
        slots: places in the whole sequence, all among the new tokens; None records every new token.
        want: any of "residual", "attention", "mlp", "heads", "patterns", "queries".
        edits: how to interfere; None runs the model as it is.
        positions: rotary positions of the new tokens; they go on from `cache.end` by default.

    The pass runs under this package's attention function, in at least float32 inside attention, with and without
    edits; compare captures with captures, and their gap is due to the edits alone.

    Raises InputError on a slot, layer or head that does not exist, a shape that does not fit, or an unknown record;
    UnsupportedError where the model ran past a hook or past the attention function; NotFiniteError.
    """
    for name in want:
        if name not in WANTS:
            raise InputError(f"want holds {name!r}; choose from {', '.join(WANTS)}.{nearest(name, WANTS)}")
    edits = edits or Edits()
    if isinstance(cache, CompactCache):
        raise InputError("slots of a compact cache are no tokens, so that none can be named here; give a KVCache.")
    ids = as_ids(model, token_ids) if cache is None else rows_for(model, cache, token_ids)
    n_old = 0 if cache is None else len(cache)
    new = range(n_old, n_old + ids.shape[1])
    chosen = tuple(new) if slots is None else whole_numbers("slots", slots)
    checking.check_slots("slots", chosen, new)
    checking.check(edits, model.shape, new, ids.shape[0])
    places = places_of(model, ids, 0 if cache is None else cache.end, positions)

    recorder = attention.Recorder(chosen, frozenset(want) & _BY_ATTENTION)
    plan = attention.Plan(
        bias=None if cache is None else cache.bias,
        recorder=recorder if recorder.want else None,
        cuts=edits.rows,
    )
    fork = compat.new_cache() if cache is None else compat.new_cache(cache.keys, cache.values)
    hooks = Hooks(model, n_old, chosen, edits, frozenset(want) - _BY_ATTENTION)
    with attention.using(model.hf, plan), hooks:
        hidden = compat.forward(model.hf, ids, fork, places)
        hooks.require()
    keys, values = compat.read_cache(fork)
    if cache is None:
        grown = KVCache(keys, values, ids, places, model.rope, model.model_id)
    else:
        grown = cache.appended(
            tuple(k[:, :, n_old:] for k in keys), tuple(v[:, :, n_old:] for v in values), ids, places
        )

    require_finite_pass(model, hidden, grown)

    def stacked(found: Mapping[int, Tensor], name: str, n: int) -> Tensor | None:
        if name not in want:
            return None
        for layer in range(n):
            require_finite(found[layer], model, f"the recorded {name}", layer=layer)
        return torch.stack([found[i].cpu() for i in range(n)])

    n = model.shape.n_layers
    return Captured(
        chosen,
        grown,
        hidden,
        residual=stacked(hooks.residual, "residual", n + 1),
        attention=stacked(hooks.attention, "attention", n),
        mlp=stacked(hooks.mlp, "mlp", n),
        heads=stacked(hooks.heads, "heads", n),
        patterns=stacked(recorder.patterns, "patterns", n),
        queries=stacked(recorder.queries, "queries", n),
    )


def answer_logits(model: Model, captured: Captured, answers: Sequence[int]) -> Float[Tensor, "batch answer"]:
    """Logits of the answer tokens after the last new token, in at least float32, on the CPU."""
    return logits_of(model, captured.hidden[:, -1], answers).cpu()


@torch.no_grad()
def head_writes(
    model: Model, layer: int, outputs: Float[Tensor, "*rows head d_head"]
) -> Float[Tensor, "*rows head d_model"]:
    """What each head alone puts through the output projection; a bias, and a norm behind it, are left out.

    Without a norm behind the projection, the sum over heads plus the bias is what attention adds to the residual.
    """
    layer_module = compat.layers(model.hf)[layer]
    projection = compat.output_projection(layer_module)
    if not isinstance(projection, nn.Linear):
        raise UnsupportedError(f"layer {layer}: the output projection holds an adapter; merge it to take heads apart.")
    weight = projection.weight
    heads, d_head = outputs.shape[-2:]
    by_head = weight.to("cpu", outputs.dtype).view(weight.shape[0], heads, d_head)
    return torch.einsum("...hd,mhd->...hm", outputs, by_head) * compat.residual_scale(layer_module)
