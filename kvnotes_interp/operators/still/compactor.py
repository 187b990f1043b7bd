"""Still: one small Perceiver per layer that writes the keys and values of a few slots for a whole cache.

    still = new_still(model)                       # trained by training.Compacting, or Still.load(folder, model)
    compact = still.compact(model, cache, budget=64)

(Still, arXiv 2606.07878.) Keys are turned back to no position, the Perceiver writes `budget` keys and values per KV
head, the keys are turned to positions spread over the source, the values are left as they come. The next token keeps
the position that it had. The frozen model is not touched.

Latents are placed by *position*, not by slot: when a compact cache that stands for 5000 tokens is compacted again with
500 new ones behind it, ten elevenths of the latents go to the old part, and an iterated stream keeps an even grain.

What a compactor does not prove: that a cache holds what its source held. It is trained to be answered from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from kvnotes_interp import compat
from kvnotes_interp.compact import SYNTHETIC, Cache, CompactCache
from kvnotes_interp.errors import InputError
from kvnotes_interp.operators.eviction.compacted import Budget, Compacted, Sliding, counts_of, sliding_layers, whole
from kvnotes_interp.operators.eviction.trained_compactor import TrainedModules
from kvnotes_interp.operators.still.perceiver import Frame, Perceiver, Trace, span
from kvnotes_interp.operators.still.settings import StillSettings
from kvnotes_interp.rope import LayerRope, rotate

if TYPE_CHECKING:
    from kvnotes_interp.model import Model


@dataclass(frozen=True, eq=False)
class Still(TrainedModules):
    """A compactor of one model, one Perceiver per layer; make one with `new_still` or `Still.load`."""

    title: ClassVar[str] = "Still compactor"

    settings: StillSettings

    def __call__(self, model: Model, cache: Cache, *, budget: Budget, sliding: Sliding = "keep") -> Compacted:
        """`compact` without gradients, in the form of every compactor. Nothing is run through the model."""
        with torch.no_grad():
            return Compacted(self.compact(model, cache, budget=budget, sliding=sliding))

    def compact(self, model: Model, cache: Cache, *, budget: Budget, sliding: Sliding = "keep") -> CompactCache:
        """The cache in `budget` slots per KV head; differentiable where gradients are on.

        A layer of no more slots than its budget is left as it is. A key bias of the source counts as the weight of its
        slot. With sliding="compact", what a window has left behind is dropped first.

        Raises InputError for another model, a budget below 1 or for another number of layers, when every layer slides
        and is to be kept, and for a cache with a bias where this compactor has no bias head to pass it on.
        """
        return self.compact_all(model, [cache], budget=budget, sliding=sliding)[0]

    def compact_all(
        self,
        model: Model,
        caches: Sequence[Cache],
        *,
        budget: Budget,
        sliding: Sliding = "keep",
        anew: bool = False,
        traces: dict[int, Trace] | None = None,
    ) -> list[CompactCache]:
        """`compact` of several caches of batch 1 (or one of any batch), padded into one batch, to the same budgets.

        Args:
            anew: write layers anew that would be left as they are: with an identity initialisation and a budget of all
                slots this proves that frame, positions and bias are exact.
            traces: collects, per layer that was written, what its Perceiver's attentions did.
        """
        self.check(model)
        sources = [whole(cache) for cache in caches]
        counts = [counts_of(model, cache, budget, sliding) for cache in sources]
        if any(source.bias is not None for source in sources) and not self.settings.bias:
            raise InputError(
                "this cache carries a key bias, and this Still compactor has no bias head to pass it on: make one with "
                "StillSettings(bias=True)."
            )
        window = getattr(compat.text_config(model.hf), "sliding_window", None) or 0
        columns: list[list[_Slots]] = []
        for layer in range(len(self.layers)):
            found = [_Slots.of(source, layer) for source in sources]
            for i, source in enumerate(sources):
                if counts[i][layer] < source.slots[layer] and sliding_layers(model, source.end)[layer]:
                    found[i] = found[i].behind(source.end - window)
            large = [i for i, slots in enumerate(found) if anew or counts[i][layer] < slots.positions.shape[1]]
            if large:
                ends = torch.tensor([sources[i].end for i in large])
                trace = None if traces is None else traces.setdefault(layer, [])
                parts, count = [found[i] for i in large], max(counts[i][layer] for i in large)
                made = self._rewrite(layer, parts, count, ends, sources[0].rope.layers[layer], trace)
                for i, slots in zip(large, made, strict=True):
                    found[i] = slots
            columns.append(found)
        return [_joined(source, [column[i] for column in columns]) for i, source in enumerate(sources)]

    def _rewrite(
        self,
        layer: int,
        parts: Sequence[_Slots],
        budget: int,
        ends: Int[Tensor, " part"],
        rope: LayerRope,
        trace: Trace | None,
    ) -> list[_Slots]:
        """One layer of several caches, each in `budget` slots."""
        module: Perceiver = self.layers[layer]  # type: ignore[assignment]
        keys, values, bias, positions, seen = _padded(parts)
        low, high = span(positions, seen)
        steps = torch.linspace(0, 1, budget, dtype=torch.float64) if budget > 1 else torch.tensor([0.5]).double()
        latents = low + (high - low) * steps
        frame = Frame.of(positions, latents, seen, d_head=keys.shape[-1], like=module.query)
        dtype, exact = keys.dtype, module.query.dtype
        x = torch.cat((rotate(keys.to(exact), -positions, rope), values.to(exact)), dim=-1)
        keys, values, bias = module(x, frame, None if bias is None else bias.to(exact), trace)
        if self.settings.outputs == "spread":
            places = latents.round().long()
        else:
            places = (ends[:, None, None] + torch.arange(-budget, 0)).expand(latents.shape)
        keys = rotate(keys, places, rope)
        n = keys.shape[0] // len(parts)
        split = [None if t is None else t.to(dtype).split(n) for t in (keys, values, bias)]
        sources = torch.full_like(places[0], SYNTHETIC)
        return [
            _Slots(*(None if t is None else t[i] for t in split), places[i], sources)  # type: ignore[arg-type]
            for i in range(len(parts))
        ]

    def save(self, folder: str | Path, *, training: Mapping[str, Any] | None = None) -> Path:
        """Write `still.safetensors` and, last, `still.json`; returns the folder. `training`: how it was trained."""
        from kvnotes_interp.operators.still.folder import write

        return write(self, Path(folder), training or {})

    @classmethod
    def load(cls, folder: str | Path, model: Model) -> Still:
        """Read a compactor and check that it is this model's.

        Raises InputError when a file is missing or is not the one that was written, or for another model.
        """
        from kvnotes_interp.operators.still.folder import read

        return read(Path(folder), model)


@dataclass(frozen=True, eq=False)
class _Slots:
    """One layer of a compact cache."""

    keys: Float[Tensor, "batch kv_head slot d_head"]
    values: Float[Tensor, "batch kv_head slot d_head"]
    bias: Float[Tensor, "batch kv_head slot"] | None
    positions: Int[Tensor, "kv_head slot"]
    sources: Int[Tensor, "kv_head slot"]

    @classmethod
    def of(cls, cache: CompactCache, layer: int) -> _Slots:
        bias = None if cache.bias is None else cache.bias[layer]
        return cls(cache.keys[layer], cache.values[layer], bias, cache.positions[layer], cache.sources[layer])

    def behind(self, position: int) -> _Slots:
        """Those slots that stand behind the position in any head: what a sliding window can still reach."""
        there = (self.positions > position).any(0)
        if bool(there.all()):
            return self
        bias = None if self.bias is None else self.bias[..., there]
        return _Slots(
            self.keys[:, :, there], self.values[:, :, there], bias, self.positions[:, there], self.sources[:, there]
        )


def _padded(parts: Sequence[_Slots]) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None]:
    """Keys, values, biases `[row kv_head slot ...]`, positions and which are there `[part kv_head slot]`."""
    longest = max(part.positions.shape[1] for part in parts)

    def longer(tensor: Tensor, axis: int, value: float | bool = 0) -> Tensor:
        missing = longest - tensor.shape[axis]
        return nn.functional.pad(tensor, (0, 0) * (tensor.ndim - 1 - axis) + (0, missing), value=value)

    keys = torch.cat([longer(part.keys, 2) for part in parts])
    values = torch.cat([longer(part.values, 2) for part in parts])
    positions = torch.stack([longer(part.positions, 1) for part in parts])
    biased = any(part.bias is not None for part in parts)
    zero = [part.keys.new_zeros(part.keys.shape[:3]) if part.bias is None else part.bias for part in parts]
    bias = torch.cat([longer(one, 2) for one in zero]) if biased else None
    seen = None
    if any(part.positions.shape[1] < longest for part in parts):
        seen = torch.stack([longer(torch.ones_like(p.positions, dtype=torch.bool), 1, False) for p in parts])
    return keys, values, bias, positions, seen


def _joined(source: CompactCache, layers: Sequence[_Slots]) -> CompactCache:
    """The source with these layers; itself where all of them are its own."""
    if all(slots.keys is key for slots, key in zip(layers, source.keys, strict=True)):
        return source
    biases = tuple(slots.bias for slots in layers)
    return replace(
        source,
        keys=tuple(slots.keys for slots in layers),
        values=tuple(slots.values for slots in layers),
        positions=tuple(slots.positions for slots in layers),
        sources=tuple(slots.sources for slots in layers),
        bias=None if all(bias is None for bias in biases) else biases,
    )


def new_still(model: Model, *, settings: StillSettings | None = None) -> Still:
    """An untrained compactor of this model."""
    settings = settings or StillSettings()
    shape, generator = model.shape, torch.Generator().manual_seed(settings.seed)
    heads = 1 if settings.shared else shape.n_kv_heads
    layers = nn.ModuleList(Perceiver(shape.d_head, heads, settings, generator) for _ in range(shape.n_layers))
    layers.to(model.device, torch.promote_types(model.dtype, torch.float32))
    return Still(layers, settings, model.model_id, model.source.to_dict())
