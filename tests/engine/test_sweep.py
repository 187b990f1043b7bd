"""The sweep: both paths against patching one cache at a time by hand, on every architecture."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvnotes_interp import engine
from kvnotes_interp.engine import forward, shared
from kvnotes_interp.errors import InputError
from kvnotes_interp.sites import Site
from tests.architectures import ARCHITECTURES
from tests.reference import full_cache, patched_logits
from tests.tiny import tiny

OLD = [7, 31, 12, 55, 8, 60, 3, 44, 19, 71, 25, 66, 13, 9]
NEW = [7, 31, 40, 55, 8, 60, 3, 44, 19, 71, 25, 66, 13, 9]
OTHER = [61, 2, 40, 23, 70, 5, 52, 16, 33, 27, 48, 10, 29, 9]
ANSWERS = (5, 17)


def sites_for(n_layers: int, n_pos: int, n_kv_heads: int) -> list[Site]:
    """Every kind of site: empty, one cell, all layers, spread out, keys or values only, one KV head, everything."""
    last = n_layers - 1
    return [
        Site(()),
        Site((2,)),
        Site((2,), layers=(0,)),
        Site((4,), layers=(last,)),
        Site((1, 5, 9), layers=(0, last)),
        Site((3, 4), part="k"),
        Site((3, 4), part="v"),
        Site((0, 7), layers=(last,), part="v"),
        Site((6,), kv_heads=(n_kv_heads - 1,)),
        Site((6, 8), layers=(1,), part="k", kv_heads=(0,)),
        Site(range(3, n_pos)),
        Site(range(n_pos)),
        Site((n_pos - 1,), layers=()),
    ]


@pytest.mark.parametrize("tail", [1, 3])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_both_paths_are_the_hand_made_patch(name: str, tail: int) -> None:
    model = tiny(name)
    cut = len(OLD) - tail
    base, donor = engine.prefill(model, OLD[:cut]), engine.prefill(model, OTHER[:cut])
    sites = sites_for(model.shape.n_layers, cut, base.n_kv_heads)
    hand = (full_cache(model.hf, torch.tensor([ids[:cut]])) for ids in (OLD, OTHER))
    base_kvs, donor_kvs = hand
    want = []
    for site in sites:
        logits = patched_logits(
            model.hf,
            base_kvs,
            donor_kvs,
            layers=site.layers_of(model.shape.n_layers),
            positions=site.positions,
            part=site.part,
            kv_heads=site.kv_heads,
            tail_ids=torch.tensor([OLD[cut:]]),
            tail_positions=torch.arange(cut, len(OLD)),
        )
        want.append(logits.reshape(-1, logits.shape[-1])[-1][list(ANSWERS)])
    reference = torch.stack(want).double()
    assert float((reference[1:] - reference[0]).abs().max()) > 1e-3, "these patches must change something"
    for path in ("plain", "shared"):
        got = engine.sweep(model, base, donor, sites, OLD[cut:], ANSWERS, path=path)
        assert got.path == path
        torch.testing.assert_close(got.scores.double(), reference, rtol=0, atol=1e-9)


@settings(max_examples=25, deadline=None)
@given(data=st.data(), name=st.sampled_from(["llama", "gemma2", "gemma3", "gpt_neox", "cohere2"]))
def test_random_sites_agree_between_the_paths(data: st.DataObject, name: str) -> None:
    model = tiny(name)
    base, donor = engine.prefill(model, OLD[:-1]), engine.prefill(model, OTHER[:-1])
    n_layers, n_heads = model.shape.n_layers, base.n_kv_heads
    site = st.builds(
        Site,
        positions=st.sets(st.integers(0, len(OLD) - 2)).map(tuple),
        layers=st.none() | st.sets(st.integers(0, n_layers - 1)).map(tuple),
        part=st.sampled_from(["kv", "k", "v"]),
        kv_heads=st.none() | st.sets(st.integers(0, n_heads - 1), min_size=1).map(tuple),
    )
    sites = data.draw(st.lists(site, min_size=1, max_size=12))
    plain, fast = (engine.sweep(model, base, donor, sites, OLD[-1:], ANSWERS, path=p) for p in ("plain", "shared"))
    torch.testing.assert_close(plain.scores, fast.scores, rtol=0, atol=1e-9)


def test_batches_do_not_change_the_numbers() -> None:
    model = tiny("llama")
    base, donor = engine.prefill(model, OLD[:-1]), engine.prefill(model, NEW[:-1])
    sites = [Site((p,), layers=(layer,)) for layer in range(model.shape.n_layers) for p in range(len(OLD) - 1)]
    done: list[int] = []
    for path in ("plain", "shared"):
        whole = engine.sweep(model, base, donor, sites, OLD[-1:], ANSWERS, path=path)
        row = whole.plan.bytes_per_row
        small = engine.sweep(
            model, base, donor, sites, OLD[-1:], ANSWERS, path=path, memory_budget=5 * row, progress=done.append
        )
        assert small.plan.batch_rows == 5
        assert sum(done) == len(sites)
        done.clear()
        torch.testing.assert_close(small.scores, whole.scores, rtol=0, atol=1e-10)


def test_a_biased_base_keeps_its_bias() -> None:
    from dataclasses import replace

    model = tiny("llama")
    base, donor = engine.prefill(model, OLD[:-1]), engine.prefill(model, OTHER[:-1])
    bias = torch.randn(1, base.n_kv_heads, len(base), dtype=base.dtype, generator=torch.Generator().manual_seed(0))
    base = replace(base, bias=(bias, None, -bias)[: base.n_layers] + (None,) * max(0, base.n_layers - 3))
    sites = [Site(()), Site((2,)), Site((3, 5), layers=(1,))]
    plain, fast = (engine.sweep(model, base, donor, sites, OLD[-1:], ANSWERS, path=p) for p in ("plain", "shared"))
    one = torch.cat([engine.decide(model, base.patched(s, donor), OLD[-1:], ANSWERS) for s in sites])
    torch.testing.assert_close(plain.scores, one, rtol=0, atol=1e-10)
    torch.testing.assert_close(fast.scores, one, rtol=0, atol=1e-10)


def test_a_model_that_cannot_be_replayed_falls_back_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    monkeypatch.setitem(shared._REFUSALS, model.hf, "its layers cannot be replayed.")
    base = engine.prefill(model, OLD[:-1])
    result = engine.sweep(model, base, base, [Site(())], OLD[-1:], ANSWERS)
    assert result.path == "plain"
    assert "replayed" in result.plan.reason


def test_the_trial_notices_a_wrong_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control that can fail: break the shared attention and the trial must refuse it."""
    from kvnotes_interp import attention

    model = tiny("qwen2")
    right = attention._softmax
    monkeypatch.setattr(attention, "_softmax", lambda *a: right(*a) * 1.01)
    assert "miss its own forward" in shared._try(model)


def test_wrong_input_is_named() -> None:
    model = tiny("llama")
    base = engine.prefill(model, OLD[:-1])
    with pytest.raises(InputError, match="positions holds 13"):
        engine.sweep(model, base, base, [Site((13,))], OLD[-1:], ANSWERS)
    with pytest.raises(InputError, match="more than the memory budget"):
        engine.sweep(model, base, base, [Site(())], OLD[-1:], ANSWERS, memory_budget=10)
    with pytest.raises(InputError, match="batch 2"):
        engine.sweep(model, base.repeat(batch=2), base, [Site(())], OLD[-1:], ANSWERS)
    with pytest.raises(InputError, match='choose "auto"'):
        engine.sweep(model, base, base, [Site(())], OLD[-1:], ANSWERS, path="quick")  # type: ignore[arg-type]
    assert engine.sweep(model, base, base, [], OLD[-1:], ANSWERS).scores.shape == (0, 2)


def test_a_replay_is_refused_when_it_is_farther_off_than_the_model_is_from_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, replay = tiny("llama"), shared.run
    assert shared._try(model) == ""
    monkeypatch.setattr(shared, "run", lambda *a, **k: replay(*a, **k) + 1e-2)
    assert "replayed layers miss its own forward by 0.01 (limit" in shared._try(model)
    # Batches of other shapes that differ by as much: the replay is no farther off than the model's own forward.
    monkeypatch.setattr(forward, "noise_floor", lambda *a, **k: 1e-2)
    assert shared._try(model) == ""
