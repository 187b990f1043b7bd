"""Still's compactor as a method of the loop: the context is prefilled by the frozen model and compacted.

Ratios are drawn for every batch. With a horizon above 1 a context is also compacted in parts, as a stream is: a part is
run on top of what is there, and the whole is compacted to the same budget again. (Still, arXiv 2606.07878.) Parts are
cut between documents where they can be, so that none begins in the middle of a sentence whose subject is gone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn import Parameter

from kvnotes_interp import compat
from kvnotes_interp.cache import KVCache
from kvnotes_interp.compact import CompactCache
from kvnotes_interp.errors import InputError, UnsupportedError
from kvnotes_interp.operators.eviction.compacted import sliding_layers
from kvnotes_interp.operators.still.stream import Tokens, parts_of
from kvnotes_interp.training.examples import Example
from kvnotes_interp.training.reader import run

if TYPE_CHECKING:
    from kvnotes_interp.model import Model
    from kvnotes_interp.operators.still import Still


class Compacting:
    """Contexts as `still` compacts them, all examples of a batch to the same number of slots.

    Args:
        ratios: lowest and highest ratio of the batch's mean context to the slots. While gradients are on it is drawn,
            evenly on the log scale; else it is the geometric mean of the two, so that validation repeats.
        horizon: most compactions of one context, a power of 2. While gradients are on 1, 2, 4, ... up to it are drawn
            alike; else it is the horizon.
        backward: through the last compaction alone ("truncated"), or through all of them and through what the model
            made of the tokens in between ("full").

    Raises InputError for options out of range; UnsupportedError for a horizon above 1 where layers slide.
    """

    name = "still"

    def __init__(
        self,
        model: Model,
        still: Still,
        *,
        ratios: tuple[float, float] = (4.0, 16.0),
        horizon: int = 1,
        backward: Literal["truncated", "full"] = "truncated",
    ) -> None:
        still.check(model)
        if not 1 < ratios[0] <= ratios[1] < math.inf:
            raise InputError(f"ratios={ratios}: give the lowest and the highest, both above 1.")
        if horizon < 1 or horizon & (horizon - 1):
            raise InputError(f"horizon={horizon}: give a power of 2.")
        if backward not in ("truncated", "full"):
            raise InputError(f'backward={backward!r}: choose "truncated" or "full".')
        self.model, self.still = model, still
        self.ratios, self.horizon, self.backward = ratios, horizon, backward

    def describe(self) -> dict[str, Any]:
        own = {"ratios": list(self.ratios), "horizon": self.horizon, "backward": self.backward}
        return {**self.still.settings.model_dump(), **own}

    def parameters(self) -> dict[str, Parameter]:
        return self.still.parameters()

    def save(self, folder: Path, *, training: Mapping[str, Any]) -> None:
        self.still.save(folder, training={**training, "method": self.describe()})

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        self.still.set(tensors)

    def caches(self, examples: Sequence[Example]) -> list[CompactCache]:
        low, high = map(math.log, self.ratios)
        share, passes = 0.5, self.horizon
        if torch.is_grad_enabled():
            share = float(torch.rand(()))
            passes = 2 ** int(torch.randint(self.horizon.bit_length(), ()))
        tokens = sum(example.blocks.n_context for example in examples) / len(examples)
        budget = math.ceil(tokens / math.exp(low + share * (high - low)))
        parts = zip(*(parts_of(example.blocks, passes) for example in examples), strict=True)
        first, *later = list(parts)
        caches = self.still.compact_all(self.model, _prefilled(self.model, first), budget=budget)
        for chunks in later:
            if self.backward == "truncated":
                caches = [_detached(cache) for cache in caches]
            with torch.set_grad_enabled(torch.is_grad_enabled() and self.backward == "full"):
                grown = _extended(self.model, caches, chunks)
            caches = self.still.compact_all(self.model, grown, budget=budget)
        return caches


def _padded(model: Model, rows: Sequence[Tokens]) -> Tensor:
    """`[row pos]`, padded behind, where no token of the row can see it."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=model.device)


@torch.no_grad()
def _prefilled(model: Model, rows: Sequence[Tokens]) -> list[KVCache]:
    """Every row run alone, all in one batch."""
    ids, fork = _padded(model, rows), compat.new_cache()
    compat.forward(model.hf, ids, fork, torch.arange(ids.shape[1]))
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


def _extended(model: Model, caches: Sequence[CompactCache], rows: Sequence[Tokens]) -> list[CompactCache]:
    """Every row run on top of its cache, all in one batch."""
    longest = max(map(len, rows))
    if any(any(sliding_layers(model, cache.end + longest)) for cache in caches):
        raise UnsupportedError(
            f"{model.name} has layers whose sliding window is shorter than these contexts; only horizon=1 can be "
            "trained there. Set it, or take shorter contexts."
        )
    found = run(model, caches, rows)
    return [found.appended(cache, i, len(row)) for i, (cache, row) in enumerate(zip(caches, rows, strict=True))]


def _detached(cache: CompactCache) -> CompactCache:
    bias = None if cache.bias is None else tuple(None if b is None else b.detach() for b in cache.bias)
    keys, values = ([t.detach() for t in part] for part in (cache.keys, cache.values))
    return replace(cache, keys=tuple(keys), values=tuple(values), bias=bias)
