"""Still's compactor as a method of the loop: the context is prefilled by the frozen model and compacted.

Ratios are drawn for every batch. With a horizon above 1 a context is also compacted in parts, as a stream is: a part is
run on top of what is there, and the whole is compacted to the same budget again. (Still, arXiv 2606.07878.) Parts are
cut between documents where they can be, so that none begins in the middle of a sentence whose subject is gone.

What is lost in several passes is lost where compact slots are compacted again, and the answers alone teach that slowly.
`consistency` teaches it directly: behind every pass the cache is to be that of the same tokens compacted at once, whose
slots stand at the same positions. (Not in the paper.)
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

from kvnotes_interp.compact import CompactCache
from kvnotes_interp.errors import InputError, UnsupportedError
from kvnotes_interp.operators.eviction.compacted import sliding_layers
from kvnotes_interp.operators.still.stream import Tokens, parts_of
from kvnotes_interp.training.examples import Example
from kvnotes_interp.training.ratios import Ratios, budget, check
from kvnotes_interp.training.reader import prefilled, run

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
        consistency: weight of a second loss, in training: the squared distance of keys and values to those of the
            tokens so far compacted at once, over the mean square of the latter; mean over keys and values, layers,
            and passes after the first. With either `backward` it teaches all passes but the first; key biases are not
            in it. 0 is the paper's setting.

    Raises InputError for options out of range; UnsupportedError for a horizon above 1 where layers slide.
    """

    name = "still"

    def __init__(
        self,
        model: Model,
        still: Still,
        *,
        ratios: Ratios = (4.0, 16.0),
        horizon: int = 1,
        backward: Literal["truncated", "full"] = "truncated",
        consistency: float = 0.0,
    ) -> None:
        still.check(model)
        check(ratios)
        if horizon < 1 or horizon & (horizon - 1):
            raise InputError(f"horizon={horizon}: give a power of 2.")
        if backward not in ("truncated", "full"):
            raise InputError(f'backward={backward!r}: choose "truncated" or "full".')
        if not 0 <= consistency < math.inf:
            raise InputError(f"consistency={consistency}: give a weight of 0 or more.")
        self.model, self.still = model, still
        self.ratios, self.horizon, self.backward, self.consistency = ratios, horizon, backward, consistency
        self.own_loss: Tensor | None = None

    def describe(self) -> dict[str, Any]:
        own = {"ratios": list(self.ratios), "horizon": self.horizon, "backward": self.backward}
        own |= {"consistency": self.consistency} if self.consistency else {}
        return {**self.still.settings.model_dump(), **own}

    def parameters(self) -> dict[str, Parameter]:
        return self.still.parameters()

    def save(self, folder: Path, *, training: Mapping[str, Any]) -> None:
        self.still.save(folder, training={**training, "method": self.describe()})

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        self.still.set(tensors)

    def caches(self, examples: Sequence[Example]) -> list[CompactCache]:
        slots, passes = budget(self.ratios, examples), self.horizon
        if torch.is_grad_enabled():
            passes = 2 ** int(torch.randint(self.horizon.bit_length(), ()))
        parts = zip(*(parts_of(example.blocks, passes) for example in examples), strict=True)
        first, *later = list(parts)
        self.own_loss = None
        whole, apart = None, list[Tensor]()
        if self.consistency and later and torch.is_grad_enabled():
            whole = prefilled(self.model, [example.blocks.context for example in examples])
        caches = self.still.compact_all(self.model, prefilled(self.model, first), budget=slots)
        for chunks in later:
            if self.backward == "truncated":
                caches = [_detached(cache) for cache in caches]
            with torch.set_grad_enabled(torch.is_grad_enabled() and self.backward == "full"):
                grown = _extended(self.model, caches, chunks)
            caches = self.still.compact_all(self.model, grown, budget=slots)
            if whole is not None:
                prefixes = [cache[: grew.end] for cache, grew in zip(whole, grown, strict=True)]
                with torch.no_grad():
                    at_once = self.still.compact_all(self.model, prefixes, budget=slots)
                apart.append(torch.stack(list(map(_distance, caches, at_once))).sum())
        if apart:
            self.own_loss = self.consistency * torch.stack(apart).mean()
        return caches


def _distance(cache: CompactCache, wanted: CompactCache) -> Tensor:
    """Squared distance of keys and values over the mean square of those wanted, mean over layers."""
    pairs = zip(cache.keys + cache.values, wanted.keys + wanted.values, strict=True)
    return torch.stack([(a - b).square().mean() / b.square().mean() for a, b in pairs]).mean()


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
