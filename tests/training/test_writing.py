"""The trained Writers in the loop: their caches, their gradients, and that they learn while the Reader stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvnotes_interp import compat, engine
from kvnotes_interp.model import Model
from kvnotes_interp.operators import Writer, new_writer
from kvnotes_interp.operators.joint import joint
from kvnotes_interp.operators.packet import packet
from kvnotes_interp.operators.sempic import sempic
from kvnotes_interp.training import (
    Settings,
    Trained,
    Writing,
    distill,
    draw,
    examples_of,
    kl_to_teacher,
    teach,
)
from kvnotes_interp.training.validate import student_logits
from tests.tiny import tiny_with_tokenizer
from tests.writers import stirred

FUNCTIONS = {"sempic": sempic, "packet": packet, "joint": joint}
KINDS = tuple(FUNCTIONS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3"])
def test_caches_are_those_of_the_operator(model: Model, questions: Any, kind: Any, family: str) -> None:
    """Documents of all examples in one pass, keys turned at once: as one by one, turned and joined part by part."""
    model = tiny_with_tokenizer(family, model.tokenizer)
    writer = stirred(model, kind, rank=2, wrapper_tokens=3)
    examples = examples_of(model, [questions[0][0], questions[0][-1]])
    assert [len(e.blocks.chunks) for e in examples] == [2, 3]
    with torch.no_grad():
        found = Writing(model, writer).caches(examples)
    for cache, example in zip(found, examples, strict=True):
        want = FUNCTIONS[kind](model, example.blocks, adapter=writer).cache
        assert torch.equal(cache.token_ids, want.token_ids)
        assert torch.equal(cache.positions, want.positions)
        assert cache.end == want.end
        for ours, theirs in zip(cache.keys + cache.values, want.keys + want.values, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=0)
    # Its control: an untrained Writer compiles something else.
    with torch.no_grad():
        other = Writing(model, new_writer(model, kind, rank=2, wrapper_tokens=3)).caches(examples[:1])[0]
    assert float((other.values[-1] - found[0].values[-1]).abs().max()) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_the_loss_with_and_without_checkpointing(
    model: Model, questions: Any, tmp_path: Path, kind: Any
) -> None:
    """Equal to each other, and right along a random direction (central difference)."""
    writer = stirred(model, kind, rank=2, wrapper_tokens=2)
    examples = examples_of(model, questions[0][:3])
    targets = teach(model, examples, folder=tmp_path, max_new_tokens=2, top=30, progress=False)

    def loss(checkpointing: bool) -> torch.Tensor:
        caches = Writing(model, writer, checkpointing=checkpointing).caches(examples)
        return kl_to_teacher(targets, student_logits(model, caches, examples, targets), tau=1.0).sum()

    parameters = writer.parameters()
    kept = []
    for checkpointing in (False, True):
        for parameter in parameters.values():
            parameter.grad = None
        loss(checkpointing).backward()
        kept.append({name: p.grad.clone() for name, p in parameters.items() if p.grad is not None})
    plain, again = kept
    assert plain.keys() == again.keys()
    for name in plain:
        torch.testing.assert_close(plain[name], again[name], atol=1e-10, rtol=0)
    generator = torch.Generator().manual_seed(0)
    directions = {name: torch.randn(g.shape, generator=generator).to(g.dtype) for name, g in plain.items()}
    slope = sum(float((plain[name] * directions[name]).sum()) for name in plain)
    values, step = [], 1e-4
    with torch.no_grad():
        for sign in (1, -2):
            for name, direction in directions.items():
                parameters[name] += sign * step * direction
            values.append(float(loss(False)))
    assert slope == pytest.approx((values[0] - values[1]) / (2 * step), rel=2e-2)
    assert abs(slope) > 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_seconds_of_training(model: Model, tmp_path: Path, kind: Any) -> None:
    """Validation KL falls; the Reader is bit by bit what it was; what is saved is what was trained."""
    questions = draw("biography", samples=24, validation=6, docs=(2,), seed=0, facts=1)
    tail = examples_of(model, questions[1][:1])[0].blocks
    before = _reader(model, tail)
    method = Writing(model, new_writer(model, kind, rank=4))
    settings = Settings(steps=12, batch=6, lr=0.01, validate_every=4, max_new_tokens=2, top=50)
    trained = distill(method, model, *questions, settings=settings, out=tmp_path, progress=False)
    assert trained.last["kl"] < 0.95 * trained.before["kl"]
    assert torch.equal(_reader(model, tail), before)
    for name, step in (("last", 12), ("best", trained.best_step)):
        writer = Writer.load(tmp_path / name, model)
        assert writer.kind == kind
        loaded = Writing(model, writer).parameters()
        same = all(torch.equal(p, loaded[n]) for n, p in method.parameters().items())
        assert same == (step == 12)
    assert Trained.load(tmp_path).method == kind


def _reader(model: Model, blocks: Any) -> torch.Tensor:
    _, hidden = engine.extend(model, engine.prefill(model, blocks.context), blocks.suffix)
    return compat.unembed(model.hf, hidden)


def test_the_trained_organism(tmp_path: Path) -> None:
    """On real weights: a packet disturbs a model that needs none, and learns not to."""
    import kvnotes_interp as kv

    organism = kv.load("organism:trained", check=False)
    questions = draw("biography", samples=16, validation=8, docs=(2, 3), seed=0)
    blocks = examples_of(organism, questions[1][:1])[0].blocks
    before = _reader(organism, blocks)
    settings = Settings(steps=8, batch=4, lr=5e-3, validate_every=8, max_new_tokens=3)
    method = Writing(organism, new_writer(organism, "packet"))
    trained = distill(method, organism, *questions, settings=settings, out=tmp_path, progress=False)
    assert trained.last["kl"] < 0.8 * trained.before["kl"]
    assert torch.equal(_reader(organism, blocks), before)
