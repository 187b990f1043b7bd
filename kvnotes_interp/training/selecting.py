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

from kvnotes_interp import compat
from kvnotes_interp.cache import KVCache
from kvnotes_interp.compact import CompactCache
from kvnotes_interp.errors import InputError
from kvnotes_interp.training.examples import Example

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

    def __init__(
        self, model: Model, scorer: Scorer, *, ratios: tuple[float, float] = (4.0, 16.0), temperature: float = 1.0
    ) -> None:
        scorer.check(model)
        if not 1 < ratios[0] <= ratios[1] < math.inf:
            raise InputError(f"ratios={ratios}: give the lowest and the highest, both above 1.")
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
        low, high = map(math.log, self.ratios)
        learning = torch.is_grad_enabled()
        share = float(torch.rand(())) if learning else 0.5
        tokens = sum(example.blocks.n_context for example in examples) / len(examples)
        budget = math.ceil(tokens / math.exp(low + share * (high - low)))
        whole = prefilled(self.model, [example.blocks.context for example in examples])
        if not learning:
            return [self.scorer.compact(self.model, cache, budget=budget) for cache in whole]
        return [self.scorer.gated(self.model, cache, budget=budget, temperature=self.temperature) for cache in whole]


@torch.no_grad()
def prefilled(model: Model, rows: Sequence[Sequence[int]]) -> list[KVCache]:
    """Every row of tokens run alone at positions 0, 1, ..., all in one batch padded behind; one cache each."""
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=model.device)
    fork = compat.new_cache()
    compat.forward(model.hf, ids, fork, torch.arange(longest))  # padding stands where no token of the row can see it
    keys, values = compat.read_cache(fork)
    return [
        KVCache(
            tuple(key[i : i + 1, :, : len(row)] for key in keys),
            tuple(value[i : i + 1, :, : len(row)] for value in values),
            ids[i : i + 1, : len(row)],
            torch.arange(len(row)),
            model.rope,
            model.model_id,
        )
        for i, row in enumerate(rows)
    ]
