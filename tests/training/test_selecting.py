"""The scorer's method of the loop: batches against one context at a time, ratios, and that it learns."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import kvnotes_interp as kv
from kvnotes_interp import engine
from kvnotes_interp.compact import CompactCache
from kvnotes_interp.errors import InputError
from kvnotes_interp.model import Model
from kvnotes_interp.operators import eviction
from kvnotes_interp.operators.scorer import Scorer, ScorerSettings, new_scorer
from kvnotes_interp.tasks.documents.question import Question
from kvnotes_interp.training import Selecting, Settings, distill, draw, examples_of
from kvnotes_interp.training.examples import Example
from tests.tiny import tiny, tiny_with_tokenizer

Drawn = tuple[list[Question], list[Question]]


@pytest.fixture(scope="module")
def examples(model: Model, questions: Drawn) -> list[Example]:
    return examples_of(model, questions[0][:3])


def mean_budget(examples: Sequence[Example], ratio: float) -> int:
    return math.ceil(sum(len(e.blocks.context) for e in examples) / len(examples) / ratio)


def equal(a: CompactCache, b: CompactCache) -> bool:
    pairs = zip(a.keys + a.values, b.keys + b.values, strict=True)
    return a.end == b.end and all(torch.allclose(x, y, rtol=0, atol=1e-10) for x, y in pairs)


@pytest.mark.parametrize("update_rank", [0, 2])
def test_a_batch_holds_each_context_chosen_from_alone(model: Model, examples: list[Example], update_rank: int) -> None:
    scorer = new_scorer(model, settings=ScorerSettings(update_rank=update_rank))
    for parameter in scorer.parameters().values():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)).double()
    budget = mean_budget(examples, 6)  # the geometric mean, without gradients
    assert len({len(e.blocks.context) for e in examples}) > 1
    with torch.no_grad():
        caches = Selecting(model, scorer, ratios=(4, 9)).caches(examples)
    for example, cache in zip(examples, caches, strict=True):
        whole = engine.prefill(model, example.blocks.context)
        alone = scorer.compact(model, whole, budget=budget)
        assert equal(cache, alone)
        assert all(torch.equal(a, b) for a, b in zip(cache.sources, alone.sources, strict=True))
        assert cache.slots == (budget,) * cache.n_layers
    # In training all slots are there, hidden by the gate of the same budget and of the temperature.
    slopes = []
    for temperature in (1.0, 0.25):
        gated = Selecting(model, scorer, ratios=(6, 6), temperature=temperature).caches(examples)
        alone = [
            scorer.gated(model, engine.prefill(model, e.blocks.context), budget=budget, temperature=temperature)
            for e in examples
        ]
        assert all(equal(a, b) for a, b in zip(gated, alone, strict=True))
        assert [c.slots for c in gated] == [(len(e.blocks.context),) * c.n_layers for c, e in zip(gated, examples)]
        biases = [[b for c in caches for b in c.bias or () if b is not None] for caches in (gated, alone)]
        assert all(torch.allclose(a, b) for a, b in zip(*biases, strict=True))
        assert [int((b == 0).sum()) for b in biases[0]] == [budget * model.shape.n_kv_heads] * len(biases[0])
        for parts in biases:
            loss = torch.stack([(b.exp() * b).sum() for b in parts]).sum()
            slopes += torch.autograd.grad(loss, scorer.parameters()["1.up.weight"])
    torch.testing.assert_close(slopes[0], slopes[1])
    torch.testing.assert_close(slopes[2], slopes[3])
    assert not torch.allclose(slopes[0], slopes[2])


def test_ratios_are_drawn_from_torchs_generator(model: Model, examples: list[Example]) -> None:
    method = Selecting(model, new_scorer(model), ratios=(2, 16))

    def kept(seed: int) -> list[int]:
        torch.manual_seed(seed)
        found = []
        for _ in range(6):
            bias = method.caches(examples)[0].bias
            assert bias is not None
            assert bias[0] is not None
            found.append(int((bias[0][0, 0] == 0).sum()))
        return found

    assert kept(0) == kept(0)
    assert len(set(kept(0))) > 2
    low, high = mean_budget(examples, 16), mean_budget(examples, 2)
    assert all(low <= n <= high for n in kept(1))
    with torch.no_grad():
        assert len({method.caches(examples)[0].slots for _ in range(3)}) == 1


def test_layers_that_slide_are_left_whole_in_training_as_in_use(questions: Drawn, model: Model) -> None:
    sliding = tiny_with_tokenizer("gemma2", model.tokenizer)
    examples = examples_of(sliding, questions[0][:2])
    method = Selecting(sliding, new_scorer(sliding), ratios=(4, 4))
    with torch.no_grad():
        used = method.caches(examples)[0].slots
    gated = method.caches(examples)[0]
    assert gated.bias is not None
    whole = len(examples[0].blocks.context)
    assert [n == whole for n in used] == [True, False, True, False]
    assert [bias is None for bias in gated.bias] == [True, False, True, False]


def test_wrong_options_are_refused(model: Model) -> None:
    for options in ({"ratios": (1, 4)}, {"ratios": (8, 4)}, {"temperature": 0.0}):
        with pytest.raises(InputError, match=next(iter(options))):
            Selecting(model, new_scorer(model), **options)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="this scorer belongs to"):
        Selecting(model, new_scorer(tiny("qwen2")))


def test_the_loop_trains_it_and_saves_what_it_is(model: Model, questions: Drawn, tmp_path: Path) -> None:
    scorer = new_scorer(model, settings=ScorerSettings(hidden=4, update_rank=2))
    before = scorer.fingerprint
    settings = Settings(steps=2, batch=2, max_new_tokens=2)
    distill(Selecting(model, scorer, ratios=(2, 4)), model, *questions, out=tmp_path, settings=settings, progress=False)
    assert scorer.fingerprint != before
    assert Scorer.load(tmp_path / "last", model).fingerprint == scorer.fingerprint
    about = json.loads((tmp_path / "last" / "scorer.json").read_text(encoding="utf-8"))
    assert about["settings"] == {"hidden": 4, "update_rank": 2, "shared": False, "seed": 0}
    assert about["training"]["method"] == {**about["settings"], "ratios": [2, 4], "temperature": 1.0}


@pytest.mark.slow
def test_it_learns_on_the_organism_and_passes_random_eviction(tmp_path: Path) -> None:
    organism = kv.load("organism:trained")
    train, validation = draw("biography", samples=64, validation=24, docs=(2,), seed=0)
    method = Selecting(organism, new_scorer(organism), ratios=(8.0, 8.0))
    settings = Settings(steps=12, batch=12, lr=1e-2, top=None, max_new_tokens=1, validate_every=12)
    trained = distill(method, organism, train, validation, out=tmp_path / "run", settings=settings, progress=False)
    assert trained.last["kl"] < 0.5 * trained.before["kl"]
    # At the same budgets, random slots that spare the sink: the first token's KL to the full context.
    gaps: dict[str, float] = {f"scorer@{tmp_path / 'run'}": 0.0, "random@4": 0.0}
    for example in examples_of(organism, validation):
        cache = engine.prefill(organism, example.blocks.context)
        full = engine.decide(organism, cache, example.blocks.suffix)
        for name in gaps:
            made = eviction.find(name)(organism, cache, budget=math.ceil(len(cache) / 8)).cache
            gaps[name] += float(kv.metrics.kl_divergence(full, engine.decide(organism, made, example.blocks.suffix)))
    scorer, random = gaps.values()
    assert scorer < 0.5 * random
