"""Key norm: slots whose key has a low L2 norm tend to draw much attention.

(Devoto et al., "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression", EMNLP 2024, arXiv 2406.11430.)
The paper leaves the first two layers whole, where the correlation is weak; give budgets per layer to do so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvnotes_interp.compact import Cache
from kvnotes_interp.operators.eviction.compacted import (
    Budget,
    Compacted,
    Sliding,
    compacted_layers,
    counts_of,
    highest,
    kept,
)

if TYPE_CHECKING:
    from kvnotes_interp.model import Model


def key_norm(model: Model, cache: Cache, *, budget: Budget, sliding: Sliding = "keep") -> Compacted:
    """Keep the slots of lowest key norm, per KV head; norms are summed over the batch. Nothing is run.

    A rotation does not change a norm, so positions play no part. Where keys are normed before they are turned
    (q/k-norm), norms differ by the norm's weight alone and say little.
    """
    counts = counts_of(model, cache, budget, sliding)
    chosen = {}
    for layer in compacted_layers(cache, counts):
        exact = torch.promote_types(cache.dtype, torch.float32)
        norms = cache.keys[layer].to(exact).norm(dim=-1).sum(0)
        chosen[layer] = highest(-norms, counts[layer])
    return Compacted(kept(cache, chosen))
