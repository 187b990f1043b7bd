"""Ratios of compaction in training: drawn anew for every batch, so that one compactor serves them all."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kvnotes_interp.errors import InputError
from kvnotes_interp.training.examples import Example

Ratios = tuple[float, float]
"""Lowest and highest ratio of a batch's mean context to the slots."""


def check(ratios: Ratios) -> None:
    """Raise InputError for ratios that are none, or in the wrong order."""
    if len(ratios) != 2 or not 1 < ratios[0] <= ratios[1] < math.inf:
        raise InputError(f"ratios={tuple(ratios)}: give the lowest and the highest, both above 1.")


def budget(ratios: Ratios, examples: Sequence[Example]) -> int:
    """Slots for a batch: while gradients are on the ratio is drawn evenly on the log scale, else it is the middle."""
    low, high = map(math.log, ratios)
    share = float(torch.rand(())) if torch.is_grad_enabled() else 0.5
    tokens = sum(example.blocks.n_context for example in examples) / len(examples)
    return math.ceil(tokens / math.exp(low + share * (high - low)))
