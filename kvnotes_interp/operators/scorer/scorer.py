"""A trained choice of slots: a small scorer per layer and KV head, and as an option an update of what is kept.

    scorer = new_scorer(model)                     # trained by training.Selecting, or Scorer.load(folder, model)
    compact = scorer.compact(model, cache, budget=64)

In the manner of KV-Distill (Chari et al., arXiv 2503.10337), whose code is not public: a trained scorer selects tokens
without seeing the question, and what is retained is adapted. This is a small variant, and not that method as published:

- Scores. Here every KV head of every layer scores its own slots, from [key without rotation ; value], and keeps its own
  `budget`. There one scorer reads hidden states, and a token is retained in all layers or in none.
- Adaptation. There retained tokens pass through LoRA weights while the context is prefilled, so that they can gather
  what the others hold. Here the model writes the cache as it always does, and a kept slot can get a low-rank update
  that is a function of that slot alone: nothing of a dropped slot goes over into a kept one.
- Loss. There forward and reverse KL together; here the forward KL of the loop that trains all methods of this package.

So a comparison with Still says something of selection at matched training, and nothing of KV-Distill's own numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kvnotes_interp.compact import Cache, CompactCache
from kvnotes_interp.operators.eviction.compacted import (
    Budget,
    Compacted,
    Sliding,
    compacted_layers,
    counts_of,
    highest,
    kept,
    whole,
)
from kvnotes_interp.operators.eviction.trained_compactor import TrainedModules
from kvnotes_interp.operators.scorer.gate import gate
from kvnotes_interp.operators.scorer.settings import ScorerSettings
from kvnotes_interp.operators.still.perceiver import Norm, Projection
from kvnotes_interp.rope import LayerRope, rotate

if TYPE_CHECKING:
    from kvnotes_interp.model import Model


class SlotScorer(nn.Module):
    """The scorer of one layer, `heads` sets of weights: 1 or the number of KV heads."""

    def __init__(self, d_head: int, heads: int, settings: ScorerSettings, generator: torch.Generator) -> None:
        super().__init__()
        width, hidden, rank = 2 * d_head, settings.hidden, settings.update_rank

        def drawn(inner: int, out: int) -> Projection:
            return Projection(torch.randn(heads, inner, out, generator=generator) * inner**-0.5)

        self.norm = Norm(heads, width)
        self.up, self.down = drawn(width, hidden), drawn(hidden, 1)
        self.low = drawn(width, rank) if rank else None
        self.high = Projection(torch.zeros(heads, rank, width)) if rank else None  # at first, copies

    def forward(
        self, x: Float[Tensor, "batch kv_head slot width"]
    ) -> tuple[Float[Tensor, "batch kv_head slot"], Float[Tensor, "batch kv_head slot width"] | None]:
        """Scores, and what is added to key and value of a kept slot; None where kept slots are copies."""
        x = self.norm(x)
        scores = self.down(nn.functional.gelu(self.up(x)))[..., 0]
        update = None if self.low is None or self.high is None else self.high(self.low(x))
        return scores, update


@dataclass(frozen=True, eq=False)
class Scorer(TrainedModules):
    """A trained choice of slots for one model; make one with `new_scorer` or `Scorer.load`."""

    title: ClassVar[str] = "scorer"

    settings: ScorerSettings

    def __call__(self, model: Model, cache: Cache, *, budget: Budget, sliding: Sliding = "keep") -> Compacted:
        """`compact` without gradients, in the form of every compactor. Nothing is run through the model."""
        with torch.no_grad():
            return Compacted(self.compact(model, cache, budget=budget, sliding=sliding))

    def compact(self, model: Model, cache: Cache, *, budget: Budget, sliding: Sliding = "keep") -> CompactCache:
        """The `budget` slots of highest score per KV head, and no others; a layer of no more slots is left as it is.

        Kept slots stay at their positions, with their bias where the cache has one, and `sources` name their tokens,
        updated or not: an update is a function of the slot alone. Scores of a batch are added, so that all rows keep
        the same slots. The choice has no gradient; see `gated`.

        Raises InputError for another model, a budget below 1 or for another number of layers, and when every layer
        slides and is to be kept.
        """
        self.check(model)
        source, counts = whole(cache), counts_of(model, cache, budget, sliding)
        chosen, keys, values = {}, list(source.keys), list(source.values)
        for layer in compacted_layers(source, counts):
            scores, keys[layer], values[layer] = self._judged(source, layer)
            chosen[layer] = highest(scores.sum(0), counts[layer])
        return kept(replace(source, keys=tuple(keys), values=tuple(values)) if chosen else source, chosen)

    def gated(
        self, model: Model, cache: Cache, *, budget: Budget, sliding: Sliding = "keep", temperature: float = 1.0
    ) -> CompactCache:
        """What training runs on: all slots, those that `compact` drops hidden by a key bias that has a gradient.

        It is read as `compact` of the same budget is (see `gate` for how nearly), and gradients reach the scores of
        kept and dropped slots alike. Raises InputError as `compact`.
        """
        self.check(model)
        source, counts = whole(cache), counts_of(model, cache, budget, sliding)
        keys, values = list(source.keys), list(source.values)
        bias: list[Tensor | None] = [None] * source.n_layers if source.bias is None else list(source.bias)
        for layer in compacted_layers(source, counts):
            scores, keys[layer], values[layer] = self._judged(source, layer)
            hidden = gate(scores.sum(0), counts[layer], temperature=temperature).expand(source.batch, -1, -1)
            own = bias[layer]
            bias[layer] = hidden if own is None else own + hidden
        made = None if all(one is None for one in bias) else tuple(bias)
        return replace(source, keys=tuple(keys), values=tuple(values), bias=made)

    def _judged(self, source: CompactCache, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Scores `[batch kv_head slot]` of a layer, and its keys and values, updated if there is an update."""
        module: SlotScorer = self.layers[layer]  # type: ignore[assignment]
        keys, values, positions = source.keys[layer], source.values[layer], source.positions[layer]
        rope: LayerRope = source.rope.layers[layer]
        exact = module.up.weight.dtype
        scores, update = module(torch.cat((rotate(keys.to(exact), -positions, rope), values.to(exact)), dim=-1))
        if update is not None:  # the update is turned, not the key: without one, a key keeps every bit
            key, value = update.split((keys.shape[-1], values.shape[-1]), dim=-1)
            keys = (keys.to(exact) + rotate(key, positions, rope)).to(keys.dtype)
            values = (values.to(exact) + value).to(values.dtype)
        return scores, keys, values

    def save(self, folder: str | Path, *, training: Mapping[str, Any] | None = None) -> Path:
        """Write `scorer.safetensors` and, last, `scorer.json`; returns the folder. `training`: how it was trained."""
        from kvnotes_interp.operators.scorer.folder import FOLDER

        return FOLDER.write(self, Path(folder), training or {})

    @classmethod
    def load(cls, folder: str | Path, model: Model) -> Scorer:
        """Read a scorer, from its own folder or that of its training run, and check that it is this model's.

        Raises InputError when a file is missing or is not the one that was written, or for another model.
        """
        from kvnotes_interp.operators.scorer.folder import read

        return read(Path(folder), model)


def new_scorer(model: Model, *, settings: ScorerSettings | None = None) -> Scorer:
    """An untrained scorer of this model: its choice is arbitrary, and its update, if any, changes nothing."""
    settings = settings or ScorerSettings()
    shape, generator = model.shape, torch.Generator().manual_seed(settings.seed)
    heads = 1 if settings.shared else shape.n_kv_heads
    layers = nn.ModuleList(SlotScorer(shape.d_head, heads, settings, generator) for _ in range(shape.n_layers))
    layers.to(model.device, torch.promote_types(model.dtype, torch.float32))
    return Scorer(layers, settings, model.model_id, model.source.to_dict())
