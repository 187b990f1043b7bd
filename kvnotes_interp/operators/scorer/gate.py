"""The choice of the highest scores as a key bias through which gradients reach all scores."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from kvnotes_interp.operators.eviction.compacted import highest

LEAK = 1e-9
"""What is left of the attention weight of a dropped slot, before the weights are normed anew.

Small, since a scorer learns to live on what leaks; not 0, since the gradient goes through it.
"""
LIMIT = 1.0
"""Largest gradient of the loss in a gate, in nats: to first order, one missed slot can seem worth thousands."""


def gate(
    scores: Float[Tensor, "kv_head slot"], count: int, *, temperature: float = 1.0
) -> Float[Tensor, "kv_head slot"]:
    """0 for the `count` slots of highest score per KV head, log(LEAK) for the others, with a gradient for all.

    Straight through (Bengio et al., arXiv 1308.3432): the bias is log g, where forward the gate g is 1 or LEAK, and
    backward it is sigmoid((score - t) / temperature). Attention weights are proportional to g, so that the gradient of
    a dropped slot says, to first order and up to `LIMIT`, what letting it in would do. The threshold t lies between
    the last slot that is kept and the first that is not; in backward it moves such that the sum of the gates stays,
    since a common shift of all scores changes nothing. There must be more slots than are kept.
    """
    fixed = scores.detach()
    hard = torch.full_like(fixed, LEAK).scatter(-1, highest(fixed, count).to(fixed.device), 1.0)
    edge = fixed.sort(dim=-1, descending=True).values[:, count - 1 : count + 1].mean(-1, keepdim=True)
    soft = torch.sigmoid((fixed - edge) / temperature)
    slope = soft * (1 - soft) / temperature
    moved = scores - fixed  # zero, with a gradient
    # Far from the edge, in temperatures, every slope is 0: nothing moves then, and nothing may become 0 / 0.
    total = slope.sum(-1, keepdim=True).clamp_min(torch.finfo(slope.dtype).tiny)
    common = (slope * moved).sum(-1, keepdim=True) / total
    move = slope * (moved - common)
    if move.requires_grad:
        move.register_hook(lambda effect: effect.clamp(-LIMIT, LIMIT))
    return (hard + move).log()
