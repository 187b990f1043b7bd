"""Attention Matching and the trained cache: fits whose answer is known, and the solver against scipy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls as scipy_nnls
from torch import Tensor

from kvnotes_interp import compat, engine, metrics
from kvnotes_interp.compact import CompactCache
from kvnotes_interp.errors import InputError, UnsupportedError
from kvnotes_interp.model import Model
from kvnotes_interp.operators.eviction import observing
from kvnotes_interp.operators.eviction.attention_matching import _squares, attention_matching, fit
from kvnotes_interp.operators.eviction.nnls import nnls
from kvnotes_interp.operators.eviction.trained_cache import trained_cache
from tests.tiny import tiny

IDS = [7, 31, 12, 55, 8, 60, 3, 44, 19, 71, 25, 66, 13, 9]
N = len(IDS)
OBSERVED = [50, 21, 83, 40, 11, 62, 5, 77, 30, 91, 18, 29]
TAIL = [45, 81, 33]


# --- non-negative least squares ------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=80)
@given(seed=st.integers(0, 10**6), columns=st.integers(1, 40), extra=st.integers(0, 40), positive=st.booleans())
def test_nnls_is_scipy_s(seed: int, columns: int, extra: int, positive: bool) -> None:
    rng = torch.Generator().manual_seed(seed)
    a = torch.randn(columns + extra, columns, generator=rng, dtype=torch.float64)
    a = torch.cat((a.abs() if positive else a, 0.1 * torch.eye(columns, dtype=a.dtype)))
    b = torch.randn(len(a), generator=rng, dtype=torch.float64)
    want, _ = scipy_nnls(a.numpy(), b.numpy())
    torch.testing.assert_close(nnls(a, b), torch.from_numpy(want), rtol=1e-7, atol=1e-8)


def test_nnls_by_hand_and_its_refusal() -> None:
    a = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    assert nnls(a, torch.tensor([1.0, -2.0, 0.0])).tolist() == [0.5, 0.0]  # unclipped: 4/3, -5/3
    assert nnls(a, torch.tensor([-1.0, -1.0, -1.0])).tolist() == [0.0, 0.0]
    with pytest.raises(UnsupportedError, match="raise the ridge"):
        nnls(torch.ones(3, 2), torch.ones(3))


# --- the fit on attention made by hand -----------------------------------------------------------------------------


def made(copies: list[int], rows: int = 40, d_head: int = 6, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(attention to one copy of each key, output over all copies, values, attention over all copies)."""
    rng = torch.Generator().manual_seed(seed)
    scores = 2 * torch.randn(rows, len(copies), generator=rng, dtype=torch.float64)
    values = torch.randn(len(copies), d_head, generator=rng, dtype=torch.float64)
    every = torch.repeat_interleave(torch.arange(len(copies)), torch.tensor(copies))
    whole = scores[:, every].softmax(-1)
    first = [int((every == key).nonzero()[0]) for key in range(len(copies))]
    return whole[:, first], whole @ values[every], values, whole


def test_copies_of_a_key_become_a_bias_of_the_log_of_their_number() -> None:
    copies = [1, 2, 3, 5]
    shares, outputs, values, _ = made(copies)
    weights, fitted = fit(shares[None, None], outputs[None, None], values[None, None], ridge=1e-12)
    torch.testing.assert_close(weights[0, 0], torch.tensor(copies).double(), rtol=0, atol=1e-8)
    torch.testing.assert_close(fitted[0, 0], values, rtol=0, atol=1e-8)


def test_values_make_up_for_keys_that_are_gone() -> None:
    """Half of the keys are dropped: outputs are closer than with the kept slots as they were, and the mass is met."""
    shares, outputs, values, _ = made([1] * 12, rows=200)
    kept = list(range(6))
    weights, fitted = fit(shares[None, None, :, kept], outputs[None, None], values[None, None, kept], ridge=1e-9)

    def error(weight: Tensor, value: Tensor) -> float:
        mixed = shares[:, kept] * weight
        return float((mixed / mixed.sum(-1, keepdim=True) @ value - outputs).norm())

    plain, best = error(torch.ones(6), values[kept]), error(weights[0, 0], fitted[0, 0])
    assert best < 0.8 * plain
    for seed in range(5):  # no other values do better at these weights
        other = fitted[0, 0] + 0.05 * torch.randn(6, 6, generator=torch.Generator().manual_seed(seed)).double()
        assert error(weights[0, 0], other) > best
    mass = lambda w: float((shares[:, kept] @ w - 1).square().sum())  # noqa: E731
    assert mass(weights[0, 0]) < mass(torch.ones(6).double())


def test_what_no_reference_sees_stays_as_it_was() -> None:
    shares, outputs, values, _ = made([1, 1, 1])
    shares[:, 2] = 0
    weights, fitted = fit(shares[None, None], outputs[None, None], values[None, None], ridge=1e-6)
    assert float(weights[0, 0, 2]) == pytest.approx(1)
    torch.testing.assert_close(fitted[0, 0, 2], values[2], rtol=0, atol=1e-12)
    blind, same = fit(torch.zeros(1, 1, 4, 3), torch.ones(1, 1, 4, 6), values[None, None], ridge=1e-6)
    torch.testing.assert_close(blind, torch.ones(1, 1, 3).double())
    torch.testing.assert_close(same[0, 0], values)


# --- on models -----------------------------------------------------------------------------------------------------


def with_copies(model: Model, *, bias: bool) -> CompactCache:
    """Every head's slot of least attention stands there twice; with a bias that is there before, if asked."""
    source = CompactCache.of(engine.prefill(model, IDS))
    if bias:
        rng = torch.Generator().manual_seed(0)
        drawn = torch.rand(1, source.n_kv_heads, N, generator=rng, dtype=source.dtype)
        source = replace(source, bias=(drawn,) * source.n_layers)
    every = torch.arange(N).expand(source.n_kv_heads, -1)
    weakest = [torch.zeros(source.n_kv_heads, 1, dtype=torch.long)] * source.n_layers
    for _ in range(10):  # a copy changes what later layers ask for, and so which slot is the weakest there
        doubled = source.kept([torch.cat((every, weak), dim=1) for weak in weakest])
        squares, _ = _squares(model, doubled, torch.tensor([OBSERVED]))
        before = weakest
        weakest = [
            layer[0, :, :N].unflatten(0, (source.n_kv_heads, -1)).sum(1).argmin(-1, keepdim=True) for layer in squares
        ]
        if all(torch.equal(a, b) for a, b in zip(before, weakest, strict=True)):
            return doubled
    pytest.fail("no slot stays the weakest")


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gemma3", "phi"])
@pytest.mark.parametrize("bias", [False, True])
def test_as_many_slots_as_distinct_keys_attend_exactly_as_before(name: str, bias: bool) -> None:
    model = tiny(name)
    cache = with_copies(model, bias=bias)
    made = attention_matching(model, cache, budget=N, observe=OBSERVED, ridge=1e-13)
    out = made.cache
    assert N in out.slots
    _, want = engine.extend(model, cache, TAIL)
    _, got = engine.extend(model, out, TAIL)  # tokens that nobody observed
    torch.testing.assert_close(got, want, rtol=0, atol=2e-6)
    dropped = replace(out, bias=cache.kept([torch.arange(n).expand(2, -1) for n in out.slots]).bias)
    _, control = engine.extend(model, dropped, TAIL)
    assert float((control - want).abs().max()) > 1e-3  # without the copies' bias it is another cache


@pytest.mark.parametrize("name", ["llama", "qwen3", "phi"])
def test_matching_is_closer_than_the_same_keys_alone(name: str) -> None:
    model = tiny(name)
    cache = engine.prefill(model, IDS)
    out = attention_matching(model, cache, budget=8, observe=OBSERVED).cache
    alone = CompactCache.of(cache).kept(list(out.sources))
    _, want = engine.extend(model, cache, OBSERVED)
    gaps = [float((engine.extend(model, c, OBSERVED)[1] - want).norm()) for c in (out, alone)]
    assert gaps[0] < 0.8 * gaps[1]


def test_references_are_part_of_the_observed_and_options_are_checked() -> None:
    model = tiny("llama")
    cache = engine.prefill(model, IDS)
    every = attention_matching(model, cache, budget=6, references=N).cache
    few = attention_matching(model, cache, budget=6, references=3).cache
    assert all(torch.equal(a, b) for a, b in zip(every.sources, few.sources, strict=True))  # chosen by all
    assert any(not torch.equal(a, b) for a, b in zip(every.values, few.values, strict=True))
    wrong: list[dict[str, Any]] = [{"references": 0}, {"ridge": 0.0}]
    for options in wrong:
        with pytest.raises(InputError, match=f"{next(iter(options))}="):
            attention_matching(model, cache, budget=6, **options)


def test_blocks_of_observed_tokens_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("gemma2")
    cache = engine.prefill(model, IDS)
    want = attention_matching(model, cache, budget=6, sliding="compact").cache
    monkeypatch.setattr(observing, "_block", lambda *_: 5)
    got = attention_matching(model, cache, budget=6, sliding="compact").cache
    assert got.bias is not None
    assert want.bias is not None
    for a, b in zip(got.values + got.bias, want.values + want.bias, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


# --- the trained cache ---------------------------------------------------------------------------------------------


def gap(model: Model, full: CompactCache, cache: CompactCache, ids: list[int]) -> float:
    """Mean KL from the full cache to another over the tokens of `ids`, in nats."""
    logits = [compat.unembed(model.hf, engine.extend(model, c, ids)[1])[0] for c in (full, cache)]
    return sum(float(metrics.kl_divergence(a, b)) for a, b in zip(*logits, strict=True)) / len(ids)


@pytest.mark.parametrize("name", ["llama", "gemma3", "phi"])
def test_training_brings_the_divergence_to_nothing_where_it_can(name: str) -> None:
    """Few tokens and many free numbers: the optimum is known to be zero."""
    model = tiny(name)
    cache = engine.prefill(model, IDS)
    full = CompactCache.of(cache)
    before = [parameter.clone() for parameter in model.hf.parameters()]
    start, half, done = (
        gap(model, full, trained_cache(model, cache, budget=6, steps=n, observe=TAIL).cache, TAIL) for n in (1, 30, 150)
    )
    assert done < 0.05 * start
    assert done < half < start
    assert all(torch.equal(a, b) for a, b in zip(before, model.hf.parameters(), strict=True))
    assert all(p.grad is None and not p.requires_grad for p in model.hf.parameters())


def test_training_starts_at_the_chosen_slots_and_leaves_the_sink() -> None:
    model = tiny("llama")
    cache = engine.prefill(model, IDS)
    for initial, slots in (("first", [0, 1, 2, 3]), ("spaced", [0, 4, 8, 13])):
        options: dict[str, Any] = {"budget": 4, "initial": initial, "steps": 1}
        out = trained_cache(model, cache, learning_rate=1e-9, **options).cache
        moved = trained_cache(model, cache, **options).cache
        for layer in range(3):
            torch.testing.assert_close(out.keys[layer], cache.keys[layer][:, :, slots], rtol=0, atol=1e-8)
            assert torch.equal(moved.keys[layer][:, :, 0], cache.keys[layer][:, :, 0])
            assert not torch.equal(moved.keys[layer][:, :, 1], cache.keys[layer][:, :, slots[1]])
    wrong: list[dict[str, Any]] = [{"initial": "last"}, {"steps": 0}, {"piece": 0}, {"learning_rate": 0.0}]
    for options in wrong:
        with pytest.raises(InputError, match=f"{next(iter(options))}="):
            trained_cache(model, cache, budget=4, **options)


def test_pieces_come_in_turns_that_follow_the_seed() -> None:
    model = tiny("llama")
    cache = engine.prefill(model, IDS)
    made = trained_cache(model, cache, budget=4, steps=5, piece=6)  # pieces of 6, 6 and 2 tokens
    assert (made.layer_tokens // 3 - N) in {N + 12, N + 8}
    outs = [trained_cache(model, cache, budget=4, steps=2, piece=6, seed=s).cache.values[0] for s in range(6)]
    assert len({float(v.sum()) for v in outs}) > 1


def test_conversations_are_runs_of_their_own() -> None:
    """One conversation is what the same tokens observed at once are; two do not see one another."""
    model = tiny("llama")
    cache = engine.prefill(model, IDS)
    options: dict[str, Any] = {"budget": 4, "steps": 4}
    whole = trained_cache(model, cache, observe=OBSERVED, **options)
    one = trained_cache(model, cache, conversations=[OBSERVED], **options)
    two = trained_cache(model, cache, conversations=[OBSERVED[:4], OBSERVED[4:]], **options)
    assert torch.equal(whole.cache.values[0], one.cache.values[0])
    assert not torch.equal(two.cache.values[0], one.cache.values[0])
    assert (one.layer_tokens, two.layer_tokens) == (5 * 12 * 3, 3 * 12 * 3)  # 12 once to learn from, then the steps
