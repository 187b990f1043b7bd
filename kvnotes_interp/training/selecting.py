"""The scorer as a method of the loop: the context is prefilled by the frozen model, and slots of it are chosen.

Ratios are drawn for every batch as for Still (`Compacting`), so that the two are trained alike. While gradients are on,
dropped slots are hidden and not removed, so that a score can be told that its slot is missed (`operators.scorer.gate`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from kvnotes_interp.compact import CompactCache
from kvnotes_interp.errors import InputError
from kvnotes_interp.training.examples import Example
from kvnotes_interp.training.ratios import Ratios, budget, check
from kvnotes_interp.training.reader import prefilled

if TYPE_CHECKING:
    from kvnotes_interp.model import Model
    from kvnotes_interp.operators.scorer import Scorer


class Selecting:
    """Contexts in the slots that `scorer` keeps, all examples of a batch in the same number of slots.

    Args:
        ratios: lowest and highest ratio of the batch's mean context to the slots. While gradients are on it is drawn,
            evenly on the log scale; else it is the geometric mean of the two, so that validation repeats.
        temperature: of the gate that gradients go through, in units of the scores.

    Validation keeps the best slots and drops the others, as the trained compactor does. The loss is the loop's, the
    forward KL; KV-Distill adds the reverse KL.

    Raises InputError for options out of range, and for another model's scorer.
    """

    name = "scorer"

    def __init__(self, model: Model, scorer: Scorer, *, ratios: Ratios = (4.0, 16.0), temperature: float = 1.0) -> None:
        scorer.check(model)
        check(ratios)
        if not 0 < temperature < math.inf:
            raise InputError(f"temperature={temperature}: give a number above 0.")
        self.model, self.scorer = model, scorer
        self.ratios, self.temperature = ratios, temperature

    def describe(self) -> dict[str, Any]:
        own = {"ratios": list(self.ratios), "temperature": self.temperature}
        return {**self.scorer.settings.model_dump(), **own}

    def parameters(self) -> dict[str, Parameter]:
        return self.scorer.parameters()

    def save(self, folder: Path, *, training: Mapping[str, Any]) -> None:
        self.scorer.save(folder, training={**training, "method": self.describe()})

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        self.scorer.set(tensors)

    def caches(self, examples: Sequence[Example]) -> list[CompactCache]:
        slots = budget(self.ratios, examples)
        whole = prefilled(self.model, [example.blocks.context for example in examples])
        if not torch.is_grad_enabled():
            return [self.scorer.compact(self.model, cache, budget=slots) for cache in whole]
        return [self.scorer.gated(self.model, cache, budget=slots, temperature=self.temperature) for cache in whole]
