"""A trained cache: the slots of one context, optimised by gradient descent. The slow ceiling of every compactor.

(Cartridges: Eyuboglu et al., "Cartridges: Lightweight and General-Purpose Long Context Representations via
Self-Study", arXiv 2506.06266.) The model stays frozen; keys and values of `budget` slots per layer are trained so that
tokens run on them are predicted as on the full cache (forward KL at every token).

The paper trains on synthetic conversations about the corpus ("self-study"), which the caller gives; without any, the
tokens are those of the context itself in pieces, the paper's weaker setting. What it does not show: how well these
slots *could* do. It is only as good as its tokens and its steps, and a ceiling only for questions like those tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Int
from torch import Tensor, nn

from kvnotes_interp import attention, compat, engine
from kvnotes_interp.compact import SYNTHETIC, Cache, CompactCache
from kvnotes_interp.engine.forward import TokenIds, as_ids, run
from kvnotes_interp.errors import InputError
from kvnotes_interp.operators.eviction.compacted import (
    Budget,
    Compacted,
    Sliding,
    compacted_layers,
    counts_of,
    kept,
    own_tokens,
    slots_of,
    whole,
)

if TYPE_CHECKING:
    from kvnotes_interp.model import Model

_FIXED = 1  # slots at the front that are not trained: the attention sink, as in the paper


def trained_cache(
    model: Model,
    cache: Cache,
    *,
    budget: Budget,
    sliding: Sliding = "keep",
    initial: Literal["spaced", "first"] = "spaced",
    steps: int = 200,
    learning_rate: float = 0.02,
    piece: int = 64,
    observe: TokenIds | None = None,
    conversations: Sequence[TokenIds] = (),
    seed: int = 0,
) -> Compacted:
    """Train the slots that are left; they stand at the positions of the slots they began as, and their source is none.

    Args:
        initial: slots to begin as: evenly "spaced" ones, or the "first".
        steps: of Adam, each on one run of tokens behind the cache. Runs do not see one another; they are taken in a
            random order, all of them before any comes again.
        conversations: runs of token ids to learn from.
        observe: without conversations, token ids to learn from in runs of `piece` tokens; by default the cache's own.
            A question given here makes the method query-aware: say so.

    `layer_tokens` counts forward passes: one of every run on the full cache, and one per step; the backward pass
    comes on top. Raises InputError for options out of range, and without `observe` where slots are no tokens.
    """
    if initial not in ("spaced", "first"):
        raise InputError(f'initial={initial!r}: choose "spaced" or "first".')
    if steps < 1 or piece < 1 or not learning_rate > 0:
        raise InputError(f"steps={steps}, piece={piece}, learning_rate={learning_rate}: each must be above 0.")
    counts, slots = counts_of(model, cache, budget, sliding), slots_of(cache)
    layers = compacted_layers(cache, counts)
    if not layers:
        return Compacted(whole(cache))
    if conversations:
        runs = [as_ids(model, run) for run in conversations]
    else:
        ids = as_ids(model, own_tokens(cache, "trained_cache")[1] if observe is None else observe)
        runs = list(ids.split(piece, dim=1))
    runs = [run.expand(cache.batch, -1) for run in runs]
    goals = [engine.extend(model, cache, run)[1] for run in runs]
    start = kept(cache, {i: _initial(initial, slots[i], counts[i]).expand(cache.n_kv_heads, -1) for i in layers})
    student = _Slots(start, layers)
    order = _order(len(runs), steps, seed)
    _train(model, student, [(runs[turn], goals[turn]) for turn in order], learning_rate)
    seen = sum(runs[turn].shape[1] for turn in (*range(len(runs)), *order))
    return Compacted(student.finished(), seen * cache.n_layers)


def _initial(kind: str, slots: int, count: int) -> Int[Tensor, " slot"]:
    return torch.arange(count) if kind == "first" else torch.linspace(0, slots - 1, count).long()


class _Slots(nn.Module):
    """Trainable keys and values of some layers of a compact cache, in float32 at least."""

    def __init__(self, start: CompactCache, layers: Sequence[int]) -> None:
        super().__init__()
        self.start, self.layers = start, tuple(layers)
        exact = torch.promote_types(start.dtype, torch.float32)
        for name, tensors in (("keys", start.keys), ("values", start.values)):
            rest = [nn.Parameter(tensors[i][:, :, _FIXED:].detach().clone().to(exact)) for i in self.layers]
            self.register_module(name, nn.ParameterList(rest))

    def cache(self) -> CompactCache:
        """The cache as it stands; gradients reach the parameters."""
        parts = {}
        for name in ("keys", "values"):
            tensors = list(getattr(self.start, name))
            for layer, rest in zip(self.layers, getattr(self, name), strict=True):
                tensors[layer] = torch.cat((tensors[layer][:, :, :_FIXED], rest.to(self.start.dtype)), dim=2)
            parts[name] = tuple(tensors)
        return replace(self.start, **parts)

    @torch.no_grad()
    def finished(self) -> CompactCache:
        """The cache without gradients; trained slots are of no token."""
        sources = list(self.start.sources)
        for layer in self.layers:
            sources[layer] = sources[layer].clone()
            sources[layer][:, _FIXED:] = SYNTHETIC
        return replace(self.cache(), sources=tuple(sources))


@torch.enable_grad()
def _train(model: Model, student: _Slots, turns: Sequence[tuple[Tensor, Tensor]], learning_rate: float) -> None:
    """One step per turn: (tokens to run, the full cache's final hidden states for them)."""
    optimiser = torch.optim.Adam(student.parameters(), lr=learning_rate)
    for ids, goal in turns:
        cache = student.cache()
        positions = torch.arange(cache.end, cache.end + ids.shape[1])
        hidden, _, _ = run(model, cache, ids, positions, attention.Plan())
        with torch.no_grad():
            want = compat.unembed(model.hf, goal).log_softmax(-1)
        got = compat.unembed(model.hf, hidden).log_softmax(-1)
        loss = nn.functional.kl_div(got, want, reduction="none", log_target=True).sum(-1).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


def _order(runs: int, steps: int, seed: int) -> list[int]:
    rng, order = Random(f"trained_cache|{seed}"), list[int]()
    while len(order) < steps:
        order += rng.sample(range(runs), runs)
    return order[:steps]
