"""The scorer against scores written with loops, its gate against finite differences, and its refusals."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvnotes_interp import engine
from kvnotes_interp.compact import CompactCache
from kvnotes_interp.errors import InputError
from kvnotes_interp.model import Model
from kvnotes_interp.operators.scorer import Scorer, ScorerSettings, new_scorer
from kvnotes_interp.operators.scorer import gate as gates
from kvnotes_interp.operators.scorer.operator import scorer as by_folder
from tests.tiny import tiny

IDS = torch.randint(3, 97, (17,), generator=torch.Generator().manual_seed(0)).tolist()
HEAD, TAIL = IDS[:12], IDS[12:]
NAMES = ["llama", "qwen3", "gpt_neox", "smollm3", "gemma3", "cohere2"]  # half, partial, no and interleaved rotation


def shaken(model: Model, **settings: Any) -> Scorer:
    """A scorer of which every number is drawn, so that a part left out shows."""
    scorer = new_scorer(model, settings=ScorerSettings(**settings))
    generator = torch.Generator().manual_seed(7)
    for parameter in scorer.parameters().values():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return scorer


def gap(a: CompactCache, b: CompactCache) -> float:
    return max(float((x - y).detach().abs().max()) for x, y in zip(a.keys + a.values, b.keys + b.values, strict=True))


# --- the slow reference ----------------------------------------------------------------------------------------------


def slow_turn(model: Model, layer: int, key: Tensor, position: int) -> Tensor:
    """A key turned by a position, each pair of dimensions as one complex number."""
    rope, out = model.rope.layers[layer], key.clone()
    if rope.inv_freq is None:
        return out
    half = len(rope.inv_freq)
    for i, frequency in enumerate(rope.inv_freq.tolist()):
        a, b = (2 * i, 2 * i + 1) if rope.interleaved else (i, i + half)
        turned = complex(key[a], key[b]) * complex(math.cos(position * frequency), math.sin(position * frequency))
        out[a], out[b] = turned.real, turned.imag
    return out


def slow_slot(scorer: Scorer, layer: int, head: int, x: Tensor) -> tuple[float, Tensor | None]:
    """Score of one slot, and what is added to its key and value."""
    p = {n.removesuffix(".weight"): t.detach() for n, t in scorer.layers[layer].named_parameters()}
    p = {n: t[min(head, len(t) - 1)] for n, t in p.items()}
    half = len(x) // 2
    parts = [part / math.sqrt(float(part @ part) / half + 1e-6) for part in (x[:half], x[half:])]
    x = torch.cat(parts) * p["norm"][0]
    inner = [v * (1 + math.erf(v / 2**0.5)) / 2 for v in (x @ p["up"]).tolist()]
    score = sum(v * float(w) for v, w in zip(inner, p["down"], strict=True))
    return score, (x @ p["low"]) @ p["high"] if "low" in p else None


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("settings", [{}, {"shared": True, "update_rank": 3, "hidden": 5}])
def test_the_slots_of_highest_score_are_kept_as_the_loops_say(name: str, settings: dict[str, Any]) -> None:
    model = tiny(name)
    cache = engine.prefill(model, HEAD).moved(20)  # a wrong place would show
    scorer = shaken(model, **settings)
    made = scorer(model, cache, budget=5, sliding="compact")
    assert made.layer_tokens == 0
    for layer in range(cache.n_layers):
        for head in range(cache.n_kv_heads):
            keys, values = cache.keys[layer][0, head], cache.values[layer][0, head]
            flat = [slow_turn(model, layer, key, -20 - i) for i, key in enumerate(keys)]
            found = [slow_slot(scorer, layer, head, torch.cat(pair)) for pair in zip(flat, values, strict=True)]
            best = sorted(sorted(range(12), key=lambda i: -found[i][0])[:5])
            assert made.cache.sources[layer][head].tolist() == [20 + i for i in best]
            assert torch.equal(made.cache.positions[layer][head], made.cache.sources[layer][head])
            got_keys, got_values = made.cache.keys[layer][0, head], made.cache.values[layer][0, head]
            if not settings:  # copies, to the last bit
                assert torch.equal(got_keys, keys[best])
                assert torch.equal(got_values, values[best])
                continue
            for row, i in enumerate(best):
                update = found[i][1]
                assert update is not None
                key, value = (flat[i] + update[: len(flat[i])], values[i] + update[len(flat[i]) :])
                torch.testing.assert_close(got_keys[row], slow_turn(model, layer, key, 20 + i), rtol=0, atol=1e-7)
                torch.testing.assert_close(got_values[row], value, rtol=0, atol=1e-9)
                assert float((got_values[row] - values[i]).abs().max()) > 1e-3  # the control: it is updated


@torch.no_grad()
def test_an_untrained_update_changes_nothing_and_a_full_budget_gives_the_cache_itself() -> None:
    model = tiny("qwen3")
    cache = engine.prefill(model, HEAD)
    plain, updating = (new_scorer(model, settings=ScorerSettings(update_rank=r)) for r in (0, 4))
    updating.set({**updating.parameters(), **plain.parameters()})  # the same scores
    assert gap(plain.compact(model, cache, budget=5), updating.compact(model, cache, budget=5)) == 0.0
    whole, trained = CompactCache.of(cache), shaken(model, update_rank=4)
    for budget in (12, 99):
        assert trained.compact(model, whole, budget=budget) is whole
        assert trained.gated(model, whole, budget=budget).bias is None
    mixed = trained.compact(model, whole, budget=(12, *[5] * (cache.n_layers - 1)))
    assert mixed.keys[0] is whole.keys[0] or torch.equal(mixed.keys[0], whole.keys[0])
    assert mixed.slots == (12, *[5] * (cache.n_layers - 1))
    assert mixed.end == 12


@torch.no_grad()
def test_rows_of_a_batch_keep_the_slots_of_the_added_scores_and_windows_stay_whole() -> None:
    model = tiny("gemma2")  # layers 0 and 2 slide
    cache = engine.prefill(model, [HEAD, IDS[5:]])
    scorer = shaken(model)
    two = scorer.compact(model, cache, budget=4)
    assert two.slots == (12, 4, 12, 4)
    rows = [CompactCache.of(engine.prefill(model, ids)) for ids in (HEAD, IDS[5:])]
    scores = sum(scorer._judged(row, 1)[0][0] for row in rows)
    assert isinstance(scores, Tensor)
    assert [sorted(s.topk(4).indices.tolist()) for s in scores] == two.sources[1].tolist()
    assert scorer.compact(model, cache, budget=4, sliding="compact").slots == (4, 4, 4, 4)


@torch.no_grad()
def test_a_key_bias_stays_with_its_slot() -> None:
    model = tiny("llama")
    cache = CompactCache.of(engine.prefill(model, HEAD))
    bias = torch.arange(12.0).double().expand(1, cache.n_kv_heads, 12)
    weighted = dataclasses.replace(cache, bias=(bias,) * cache.n_layers)
    scorer = shaken(model)
    kept, bare = (scorer.compact(model, c, budget=4) for c in (weighted, cache))
    assert kept.bias is not None
    assert bare.bias is None
    for layer in range(cache.n_layers):
        assert torch.equal(kept.sources[layer], bare.sources[layer])  # it is not read
        assert kept.bias[layer][0].tolist() == kept.sources[layer].tolist()  # type: ignore[index]
    gated = scorer.gated(model, weighted, budget=4).bias
    assert gated is not None
    hidden = scorer.gated(model, cache, budget=4).bias[0]  # type: ignore[index]
    torch.testing.assert_close(gated[0], bias + hidden)  # type: ignore[operator]


# --- the gate --------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_gated_cache_is_read_as_the_compact_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(name)
    cache = engine.prefill(model, HEAD)
    scorer = shaken(model, update_rank=2)
    want = engine.decide(model, scorer.compact(model, cache, budget=5), TAIL)

    def off(budget: int) -> float:
        return float((engine.decide(model, scorer.gated(model, cache, budget=budget), TAIL) - want).abs().max())

    assert off(5) < 1e-4
    assert off(6) > 1e-2  # the control: another budget
    leaks = []
    for leak in (1e-8, 1e-9, 1e-16):
        monkeypatch.setattr(gates, "LEAK", leak)
        leaks.append(off(5))
    assert leaks[0] == pytest.approx(10 * leaks[1], rel=0.1)
    assert leaks[2] < 1e-9


def test_the_gates_gradient_is_that_of_soft_gates_of_a_fixed_sum() -> None:
    """A loss that is linear in the gates has a gradient that is worked out by hand; no gate counts above the limit."""
    scores = torch.tensor([[3.0, 1.0, 0.5, -2.0], [0.0, 0.2, 0.1, -0.1]], dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([[0.7, -0.2, 0.5, 4000.0], [0.3, 0.1, -1.0, -70.0]], dtype=torch.float64)
    counted = [[0.7, -0.2, 0.5, 1.0], [0.3, 0.1, -1.0, -1.0]]
    bias = gates.gate(scores, 2, temperature=0.5)
    closed = math.log(gates.LEAK)
    assert bias.tolist() == [[0, 0, closed, closed], [closed, 0, 0, closed]]
    (bias.exp() * weight).sum().backward()
    assert scores.grad is not None
    for row, edge in ((0, 0.75), (1, 0.05)):
        soft = [1 / (1 + math.exp(-(float(s) - edge) / 0.5)) for s in scores[row].detach()]
        slope = [g * (1 - g) / 0.5 for g in soft]
        mean = sum(a * w for a, w in zip(slope, counted[row], strict=True)) / sum(slope)
        want = [a * (w - mean) for a, w in zip(slope, counted[row], strict=True)]
        assert scores.grad[row].tolist() == pytest.approx(want, rel=1e-9)
        assert float(scores.grad[row].sum()) == pytest.approx(0, abs=1e-12)


def test_a_missed_slot_is_told_what_letting_it_in_would_do() -> None:
    """Attention over gated slots: the gradient is the finite difference in the gate, for kept and dropped ones."""
    generator = torch.Generator().manual_seed(3)
    logits, values = (torch.randn(6, generator=generator).double() for _ in range(2))
    scores = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0, 0.0]], dtype=torch.float64, requires_grad=True)

    def loss(bias: Tensor) -> Tensor:
        return 0.1 * (((logits + bias).softmax(-1) @ values) - 1.0) ** 2

    bias = gates.gate(scores, 3)
    loss(bias[0]).backward()
    assert scores.grad is not None
    soft = torch.sigmoid(scores.detach()[0] - 2.5)
    slope = soft * (1 - soft)
    effect = []
    for i in range(6):
        step = torch.zeros(6).double()
        step[i] = 1e-6
        base, there = (float(loss((bias[0].detach().exp() + share * step).log())) for share in (0, 1))
        effect.append((there - base) / 1e-6)
    moved = torch.tensor(effect).double()
    assert float(moved.abs().max()) < gates.LIMIT
    want = slope * (moved - (slope * moved).sum() / slope.sum())
    torch.testing.assert_close(scores.grad[0], want, rtol=1e-4, atol=1e-6)
    assert float(scores.grad[0, 3:].abs().min()) > 1e-4
    # The control: a plain mask tells the dropped slots nothing.
    again = scores.detach().clone().requires_grad_()
    loss(again[0].masked_fill(torch.arange(6) > 2, -math.inf)).backward()
    assert again.grad is not None
    assert not bool(again.grad[0, 3:].any())


def test_gradients_reach_every_parameter_and_nothing_of_the_model() -> None:
    model = tiny("qwen3")
    cache = engine.prefill(model, HEAD)
    scorer = shaken(model, update_rank=2)
    gated = scorer.gated(model, cache, budget=5)
    assert gated.slots == (12,) * cache.n_layers
    assert gated.bias is not None
    parts = [t for t in (*gated.keys, *gated.values, *gated.bias) if t is not None]
    sum((part**2).sum() for part in parts).backward()  # type: ignore[union-attr]
    without = [name for name, p in scorer.parameters().items() if p.grad is None or not bool(p.grad.any())]
    assert without == []
    assert all(p.grad is None for p in model.hf.parameters())
    assert not any(t.requires_grad for t in scorer(model, cache, budget=3).cache.keys)


# --- size, files, refusals -------------------------------------------------------------------------------------------


def test_parameters_are_as_many_as_the_formula_says() -> None:
    model = tiny("llama")  # 3 layers, 2 KV heads, d_head 8
    width, hidden = 16, 10
    for shared, sets in ((True, 1), (False, 2)):
        plain = new_scorer(model, settings=ScorerSettings(hidden=hidden, shared=shared))
        assert plain.n_parameters == 3 * sets * (width + width * hidden + hidden)
        more = new_scorer(model, settings=ScorerSettings(hidden=hidden, shared=shared, update_rank=3))
        assert more.n_parameters == plain.n_parameters + 3 * sets * 2 * 3 * width


def test_saved_and_loaded_it_keeps_the_same(tmp_path: Path) -> None:
    model = tiny("llama")
    cache = engine.prefill(model, HEAD)
    scorer = shaken(model, update_rank=2)
    folder = scorer.save(tmp_path / "scorer", training={"steps": 3})
    again = Scorer.load(folder, model)
    assert again.settings == scorer.settings
    assert again.fingerprint == scorer.fingerprint != new_scorer(model).fingerprint
    made = by_folder(model, cache, budget=4, adapter=folder)
    assert gap(made.cache, scorer.compact(model, cache, budget=4)) == 0.0


def test_wrong_models_settings_and_budgets_are_refused() -> None:
    model, other = tiny("llama"), tiny("qwen2")
    cache = engine.prefill(model, HEAD)
    with pytest.raises(InputError, match="this scorer belongs to 'tiny-llama"):
        shaken(model).compact(other, engine.prefill(other, HEAD), budget=4)
    with pytest.raises(InputError, match="was written by 'tiny-qwen2"):
        shaken(model).compact(model, engine.prefill(other, HEAD), budget=4)
    for budget in (0, (3, 3)):
        with pytest.raises(InputError, match="budget="):
            new_scorer(model).compact(model, cache, budget=budget)
    with pytest.raises(InputError, match=r'no setting "hiden".*hidden'):
        ScorerSettings(hiden=3)  # type: ignore[call-arg]
    with pytest.raises(InputError, match="update_rank=-1"):
        ScorerSettings(update_rank=-1)
    with pytest.raises(InputError, match="these are not the"):
        new_scorer(model).set(new_scorer(model, settings=ScorerSettings(update_rank=2)).parameters())


def test_a_gate_far_from_every_score_has_no_gradient_and_no_nan() -> None:
    scores = torch.tensor([[900.0, -900.0, 950.0]], requires_grad=True)
    bias = gates.gate(scores, 2, temperature=1e-3)
    assert bias.tolist() == [[0.0, pytest.approx(math.log(1e-9)), 0.0]]
    bias.sum().backward()
    assert scores.grad is not None
    assert scores.grad.tolist() == [[0.0, 0.0, 0.0]]
