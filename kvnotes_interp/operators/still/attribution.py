"""Which slots of the source feed each latent of a Still compactor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from kvnotes_interp.compact import Cache
from kvnotes_interp.operators.eviction.compacted import Budget, Sliding
from kvnotes_interp.operators.still.compactor import Still
from kvnotes_interp.operators.still.perceiver import Trace

if TYPE_CHECKING:
    from kvnotes_interp.model import Model


@torch.no_grad()
def attribution(
    still: Still, model: Model, cache: Cache, *, budget: Budget, sliding: Sliding = "keep"
) -> tuple[Float[Tensor, "kv_head slot source"] | None, ...]:
    """Per layer the share of every source slot in every compact slot, in float32; None where a layer is left whole.

    The rows sum to 1. Sources are the slots of `cache`, in their order (with sliding="compact", of the part that the
    window reaches). Shares are the weights of the first cross-attention, carried through what follows as in attention
    rollout (Abnar and Zuidema, arXiv 2005.00928), except that a latent's own part and what an attention writes to it
    count by their norms and not as one half each: what writes nothing counts for nothing.

    Approximate beyond the first cross-attention: directions are ignored, so that parts which cancel count as present;
    and what a feed-forward network or a head does with a latent changes no share.
    """
    traces: dict[int, Trace] = {}
    still.compact_all(model, [cache], budget=budget, sliding=sliding, traces=traces)
    return tuple(_rolled_out(traces[layer]) if layer in traces else None for layer in range(len(still.layers)))


def _rolled_out(trace: Trace) -> Float[Tensor, "kv_head slot source"]:
    (shares, _, _), *rest = trace
    for number, (weights, before, write) in enumerate(rest):
        written = write.norm(dim=-1, keepdim=True)
        part = written / (before.norm(dim=-1, keepdim=True) + written).clamp_min(torch.finfo(written.dtype).tiny)
        # Behind the first cross-attention, attention among the latents and cross-attention take turns.
        shares = (1 - part) * shares + part * (weights @ shares if number % 2 == 0 else weights)
    return shares[0].float()
