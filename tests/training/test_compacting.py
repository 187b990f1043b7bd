"""Still's method of the loop: batches against one context at a time, gradients through passes, and that it learns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import kvnotes_interp as kv
from kvnotes_interp import engine
from kvnotes_interp.compact import CompactCache
from kvnotes_interp.errors import InputError, UnsupportedError
from kvnotes_interp.model import Model
from kvnotes_interp.operators import eviction
from kvnotes_interp.operators.still import Still, StillSettings, new_still, stream
from kvnotes_interp.operators.still.stream import parts_of
from kvnotes_interp.tasks.documents.question import Question
from kvnotes_interp.training import Settings, distill, draw, examples_of
from kvnotes_interp.training.compacting import Compacting
from kvnotes_interp.training.examples import Example
from kvnotes_interp.training.reader import run
from tests.tiny import tiny_with_tokenizer

Drawn = tuple[list[Question], list[Question]]


@pytest.fixture(scope="module")
def examples(model: Model, questions: Drawn) -> list[Example]:
    return examples_of(model, questions[0][:3])


def equal(a: CompactCache, b: CompactCache, atol: float = 1e-10) -> bool:
    pairs = zip(a.keys + a.values, b.keys + b.values, strict=True)
    return a.end == b.end and all(torch.allclose(x, y, rtol=0, atol=atol) for x, y in pairs)


def mean_budget(examples: Sequence[Example], ratio: float) -> int:
    return math.ceil(sum(len(e.blocks.context) for e in examples) / len(examples) / ratio)


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
def test_a_batch_holds_each_context_compacted_alone(model: Model, examples: list[Example], bias: bool) -> None:
    still = new_still(model, settings=StillSettings(bias=bias))
    caches = Compacting(model, still, ratios=(4, 9)).caches(examples)
    budget = mean_budget(examples, 6)  # the geometric mean, without gradients
    assert len({len(e.blocks.context) for e in examples}) > 1
    for example, cache in zip(examples, caches, strict=True):
        assert equal(cache, still.compact(model, engine.prefill(model, example.blocks.context), budget=budget))
        assert cache.slots == (budget,) * cache.n_layers


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
def test_passes_are_those_of_a_stream(model: Model, examples: list[Example], bias: bool) -> None:
    still = new_still(model, settings=StillSettings(bias=bias))
    budget = mean_budget(examples, 6)
    for horizon in (2, 4):
        caches = Compacting(model, still, ratios=(6, 6), horizon=horizon).caches(examples)
        for example, cache in zip(examples, caches, strict=True):
            context, spans = example.blocks.context, example.blocks.spans
            halves = [
                0,
                min((stop for _, stop in spans[:-1]), key=lambda end: abs(end - len(context) / 2)),
                len(context),
            ]
            quarters = [math.ceil(i * len(context) / 4 - 0.5) for i in range(5)]  # there are fewer documents than parts
            by_hand: Any = None
            for a, b in pairwise(halves if horizon == 2 else quarters):
                part = context[a:b]
                grown = engine.prefill(model, part) if by_hand is None else engine.extend(model, by_hand, part)[0]
                by_hand = still.compact(model, grown, budget=budget)
            assert equal(cache, by_hand)
    whole = [e for e in examples if len(e.blocks.context) % 4 == 0]
    for example in whole:
        (cache,) = Compacting(model, still, ratios=(6, 6), horizon=4).caches([example])
        chunk = len(example.blocks.context) // 4
        assert equal(cache, stream(model, still, example.blocks.context, chunk=chunk, budget=cache.slots[0]))


def test_full_backward_reaches_the_first_pass_and_truncated_does_not(model: Model, examples: list[Example]) -> None:
    """By a finite difference: the full gradient is that of the whole iteration."""
    still = new_still(model)
    for parameter in still.parameters().values():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)).double()
    parameter = still.parameters()["2.blocks.0.cross.v.weight"]
    direction = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)).double()

    def value(backward: Any) -> torch.Tensor:
        torch.manual_seed(3)  # draws 2 passes or more
        method = Compacting(model, still, ratios=(5, 5), horizon=4, backward=backward)
        return sum((c.values[-1] ** 2).sum() for c in method.caches(examples))  # type: ignore[return-value]

    found = {}
    for backward in ("full", "truncated"):
        for p in still.parameters().values():
            p.grad = None
        value(backward).backward()
        assert parameter.grad is not None
        found[backward] = float((parameter.grad * direction).sum())
    step = 1e-5
    sides = []
    for sign in (1, -1):
        parameter.data += sign * step * direction
        sides.append(float(value("full").detach()))
        parameter.data -= sign * step * direction
    slope = (sides[0] - sides[1]) / (2 * step)
    assert found["full"] == pytest.approx(slope, rel=1e-5)
    assert abs(found["truncated"] - slope) > 1e-3 * abs(slope)
    assert all(p.grad is None for p in model.hf.parameters())


@pytest.mark.parametrize("backward", ["full", "truncated"])
def test_consistency_is_the_distance_to_compaction_at_once(
    model: Model, examples: list[Example], backward: Any
) -> None:
    """Value and gradient, one example and one pass at a time."""
    still = new_still(model)
    for parameter in still.parameters().values():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)).double()
    method = Compacting(model, still, ratios=(5, 5), horizon=4, backward=backward, consistency=0.7)
    parameter = still.parameters()["1.blocks.0.cross.v.weight"]
    torch.manual_seed(3)
    method.caches(examples)
    assert method.own_loss is not None
    method.own_loss.backward()
    got, parameter.grad = parameter.grad, None
    torch.manual_seed(3)
    torch.rand(())  # the ratio
    passes = 2 ** int(torch.randint(3, ()))
    assert passes > 1
    budget, total = mean_budget(examples, 5), torch.zeros((), dtype=torch.float64)
    for example in examples:
        parts = parts_of(example.blocks, passes)
        cache, end = still.compact(model, engine.prefill(model, parts[0]), budget=budget), len(parts[0])
        for part in parts[1:]:
            if backward == "truncated":
                cache = replace(cache, keys=tuple(k.detach() for k in cache.keys))
                cache = replace(cache, values=tuple(v.detach() for v in cache.values))
            grown, end = engine.extend(model, cache, part)[0] if backward == "truncated" else None, end + len(part)
            if grown is None:
                grown = run(model, [cache], [part]).appended(cache, 0, len(part))
            cache = still.compact(model, grown, budget=budget)
            with torch.no_grad():
                once = still.compact(model, engine.prefill(model, example.blocks.context[:end]), budget=budget)
            for ours, theirs in zip(cache.keys + cache.values, once.keys + once.values, strict=True):
                share = 1 / (2 * cache.n_layers) / (passes - 1)
                total = total + 0.7 * share * (ours - theirs).square().sum() / theirs.square().sum()
    assert float(method.own_loss.detach()) == pytest.approx(float(total.detach()), rel=1e-9)
    total.backward()
    assert got is not None
    assert parameter.grad is not None
    torch.testing.assert_close(got, parameter.grad, rtol=1e-7, atol=1e-12)
    assert float(got.abs().max()) > 1e-3
    with torch.no_grad():
        method.caches(examples)
    assert method.own_loss is None  # validation is of the answers alone
    once_only = Compacting(model, still, ratios=(5, 5), consistency=0.7)
    once_only.caches(examples)
    assert once_only.own_loss is None


def test_ratios_and_passes_are_drawn_from_torchs_generator(model: Model, examples: list[Example]) -> None:
    method = Compacting(model, new_still(model), ratios=(2, 16))

    def slots(seed: int) -> list[int]:
        torch.manual_seed(seed)
        return [method.caches(examples)[0].slots[0] for _ in range(6)]

    assert slots(0) == slots(0)
    assert len(set(slots(0))) > 2
    low, high = mean_budget(examples, 16), mean_budget(examples, 2)
    assert all(low <= n <= high for n in slots(1))
    with torch.no_grad():
        assert len(set(slots(0))) == 1


def test_wrong_options_are_refused(model: Model, examples: list[Example], questions: Drawn) -> None:
    still = new_still(model)
    wrong = ({"ratios": (1, 4)}, {"ratios": (8, 4)}, {"horizon": 3}, {"backward": "none"}, {"consistency": -1.0})
    for options in wrong:
        with pytest.raises(InputError, match=next(iter(options))):
            Compacting(model, still, **options)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="lower the horizon"), torch.no_grad():
        Compacting(model, still, horizon=1024).caches(examples)
    sliding = tiny_with_tokenizer("gemma2", model.tokenizer)
    method = Compacting(sliding, new_still(sliding), horizon=2)
    with pytest.raises(UnsupportedError, match="only horizon=1"), torch.no_grad():
        method.caches(examples_of(sliding, questions[0][:2]))


@pytest.mark.slow
def test_it_learns_on_the_organism_and_passes_random_eviction(tmp_path: Path) -> None:
    organism = kv.load("organism:trained")
    train, validation = draw("biography", samples=64, validation=24, docs=(2,), seed=0)
    method = Compacting(organism, new_still(organism), ratios=(8.0, 8.0))
    settings = Settings(steps=16, batch=12, lr=5e-3, top=None, max_new_tokens=1, validate_every=16)
    trained = distill(method, organism, train, validation, out=tmp_path / "run", settings=settings, progress=False)
    assert trained.last["kl"] < 0.8 * trained.before["kl"]
    again = Still.load(tmp_path / "run" / "best", organism)
    assert again.fingerprint == method.still.fingerprint
    # At the same budgets, random slots of every layer and head: the first token's KL to the full context.
    gaps: dict[str, list[float]] = {"random": [], "still": []}
    for example in examples_of(organism, validation):
        cache = engine.prefill(organism, example.blocks.context)
        budget = math.ceil(len(cache) / 8)
        full = engine.decide(organism, cache, example.blocks.suffix)
        for name, compactor in (("random", eviction.find("random")), ("still", again)):
            got = engine.decide(organism, compactor(organism, cache, budget=budget).cache, example.blocks.suffix)
            gaps[name].append(float(kv.metrics.kl_divergence(full, got)))
    assert sum(gaps["still"]) < sum(gaps["random"])
