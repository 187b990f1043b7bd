"""Eviction: what each method keeps, against hand-made caches and attention that plain transformers computed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvnotes_interp import compat, engine
from kvnotes_interp.cache import KVCache
from kvnotes_interp.compact import CompactCache
from kvnotes_interp.errors import InputError
from kvnotes_interp.operators import eviction
from kvnotes_interp.operators.eviction import observing
from kvnotes_interp.operators.eviction.compacted import highest, sliding_layers
from tests.architectures import ARCHITECTURES, WINDOW
from tests.tiny import tiny

IDS = [7, 31, 12, 55, 8, 60, 3, 44, 19, 71, 25, 66, 13, 9]
N = len(IDS)
TAIL = [50, 21, 83]


def reference_attention(name: str, ids: list[int]) -> list[torch.Tensor]:
    """Per layer `[head query key]`: transformers' own eager attention over one plain forward."""
    with torch.no_grad():
        out = tiny(name, "eager").hf(input_ids=torch.tensor([ids]), output_attentions=True, use_cache=False)
    return [a[0] for a in out.attentions]


def run(name: str, method: str, **options: Any) -> CompactCache:
    model = tiny(name)
    return eviction.find(method)(model, engine.prefill(model, IDS), **options).cache


def with_strong_key(name: str, token: int, slot: int) -> KVCache:
    """A cache in whose first layer one key takes all attention of `token` when that runs behind it, in every head."""
    model = tiny(name)
    cache = engine.prefill(model, IDS)
    queries = engine.capture(model, cache, [token], want=("queries",)).queries
    assert queries is not None
    groups = queries[0, 0, :, 0].unflatten(0, (cache.n_kv_heads, -1))  # [kv_head group d_head]
    key = cache.keys[0].clone()
    for head, group in enumerate(groups):
        key[0, head, slot] = torch.linalg.pinv(group) @ torch.full((len(group),), 2000.0, dtype=key.dtype)
    return replace(cache, keys=(key, *cache.keys[1:]))


# --- attention that is observed ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gemma3", "mistral", "phi", "cohere2"])
@pytest.mark.parametrize("block", [1, 4, 100])
def test_attention_in_blocks_is_that_of_one_forward(name: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(name)
    monkeypatch.setattr(observing, "_block", lambda *_: block)
    want = reference_attention(name, IDS)
    cache = engine.prefill(model, IDS)
    for last in (None, 5):
        sums, cost = observing.attention_sums(model, cache, None, last=last, method="here")
        rows = slice(0 if last is None else N - last, None)
        for got, whole in zip(sums, want, strict=True):
            torch.testing.assert_close(got[0], whole[:, rows].sum(1), rtol=0, atol=1e-9)
        assert cost == (N if last is None else last) * cache.n_layers
    want = reference_attention(name, IDS + TAIL)
    for source in (cache, CompactCache.of(cache)):
        sums, cost = observing.attention_sums(model, source, TAIL, method="here")
        for got, whole in zip(sums, want, strict=True):
            torch.testing.assert_close(got[0], whole[:, N:, :N].sum(1), rtol=0, atol=1e-9)
        assert cost == len(TAIL) * cache.n_layers


def test_blocks_keep_rows_within_their_bytes() -> None:
    model = tiny("llama")
    block = observing._block(model, 2, 5000)
    assert 1 <= block * 2 * model.shape.n_heads * 5000 * 8 <= observing.ROWS_BYTES
    assert observing._block(model, 64, 10**9) == 1


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_layer_slides_when_the_next_token_cannot_see_the_first(name: str) -> None:
    model = tiny(name)
    blind = tuple(bool(rows[:, -1, 0].eq(0).all()) for rows in reference_attention(name, [*IDS, 5]))
    assert sliding_layers(model, N) == blind
    assert sliding_layers(model, WINDOW - 1) == (False,) * model.shape.n_layers


# --- each method's choice ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "qwen3", "phi"])
@pytest.mark.parametrize(
    ("method", "options"),
    [("h2o", {"recent": 0.0}), ("snapkv", {"kernel": 1}), ("attention_matching", {})],
)
def test_the_one_key_that_takes_all_attention_is_kept(name: str, method: str, options: dict[str, Any]) -> None:
    model, token = tiny(name), 42
    plain = engine.prefill(model, IDS)
    sums, _ = observing.attention_sums(model, plain, [token], method="here")
    grouped = sums[0][0].unflatten(0, (plain.n_kv_heads, -1)).sum(1)
    weak = int(grouped.sum(0).argmin())
    for cache, kept in ((with_strong_key(name, token, weak), True), (plain, False)):
        out = eviction.find(method)(model, cache, budget=1, observe=[token], **options).cache
        assert (out.sources[0] == weak).all() == kept
    # By hand: the slot that is kept without the strong key is the one of highest attention.
    if method != "attention_matching":
        assert out.sources[0][:, 0].tolist() == grouped.argmax(-1).tolist()


def test_snapkv_keeps_the_neighbours_of_what_is_attended_to() -> None:
    cache = with_strong_key("llama", 42, 6)
    out = eviction.find("snapkv")(tiny("llama"), cache, budget=3, observe=[42], kernel=3).cache
    assert out.sources[0].tolist() == [[5, 6, 7]] * cache.n_kv_heads


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gemma3"])
def test_snapkv_by_hand(name: str) -> None:
    """Window of 3, kernel of 3, budget 7, from transformers' attention, slot by slot."""
    out = run(name, "snapkv", budget=7, window=3, kernel=3, sliding="compact")
    for layer, rows in enumerate(reference_attention(name, IDS)):
        pooled = torch.zeros(len(rows), N - 3, dtype=rows.dtype)
        for head in range(len(rows)):
            mean = [float(rows[head, N - 3 :, slot].mean()) for slot in range(N - 3)]
            for slot in range(N - 3):
                pooled[head, slot] = max(mean[max(0, slot - 1) : slot + 2])
        groups = len(rows) // out.n_kv_heads
        for head in range(out.n_kv_heads):
            score = pooled[head * groups : (head + 1) * groups].mean(0).tolist()
            # A pool gives neighbours the same score: compare scores, which do not depend on how ties fall.
            best = sorted(score, reverse=True)[:4]
            sources = out.sources[layer][head].tolist()
            assert sources[4:] == [N - 3, N - 2, N - 1]
            assert sorted((score[s] for s in sources[:4]), reverse=True) == pytest.approx(best, abs=1e-12)


@pytest.mark.parametrize("name", ["llama", "gemma3", "olmo2"])
def test_h2o_by_hand(name: str) -> None:
    out = run(name, "h2o", budget=7, recent=0.5, sliding="compact")
    for layer, rows in enumerate(reference_attention(name, IDS)):
        groups = len(rows) // out.n_kv_heads
        for head in range(out.n_kv_heads):
            score = rows[head * groups : (head + 1) * groups].sum((0, 1))[: N - 3]
            heavy = sorted(sorted(range(N - 3), key=lambda s: -float(score[s]))[:4])
            assert out.sources[layer][head].tolist() == [*heavy, N - 3, N - 2, N - 1]


def test_streaming_keeps_sinks_and_recents() -> None:
    out = run("llama", "streaming", budget=6, sinks=2)
    assert all(s.tolist() == [[0, 1, 10, 11, 12, 13]] * 2 for s in out.sources)
    assert out.end == N
    assert all(s.tolist() == [[0, 1]] * 2 for s in run("llama", "streaming", budget=2).sources)
    assert all(s.tolist() == [[12, 13]] * 2 for s in run("llama", "streaming", budget=2, sinks=0).sources)


@pytest.mark.parametrize("name", ["llama3", "qwen3", "phi"])
def test_streaming_renumbered_turns_keys_to_where_they_stand(name: str) -> None:
    """The first layer's keys depend on token and position alone: they are those of a prefill of the tokens left."""
    model = tiny(name)
    out = run(name, "streaming", budget=6, sinks=2, renumber=True)
    assert out.end == 6
    want = engine.prefill(model, [IDS[i] for i in (0, 1, 10, 11, 12, 13)])
    torch.testing.assert_close(out.keys[0], want.keys[0], rtol=0, atol=1e-9)
    torch.testing.assert_close(out.values[0], want.values[0], rtol=0, atol=1e-9)
    still = run(name, "streaming", budget=6, sinks=2)
    assert float((still.keys[0] - want.keys[0]).abs().max()) > 1e-2  # the control: keys that were not moved
    with pytest.raises(InputError, match="renumber needs the same number of slots"):
        run(name, "streaming", budget=[6, 5, *[6] * (model.shape.n_layers - 2)], renumber=True)


def test_key_norm_keeps_the_smallest_keys_of_every_head() -> None:
    model = tiny("llama")
    cache = engine.prefill(model, IDS)
    small = {0: [2, 7, 11], 1: [0, 5, 9]}
    key = cache.keys[1].clone()
    for head, slots in small.items():
        key[:, head, slots] *= 1e-3
    shrunk = replace(cache, keys=(cache.keys[0], key, cache.keys[2]))
    out = eviction.find("key_norm")(model, shrunk, budget=3).cache
    assert out.sources[1].tolist() == [small[0], small[1]]
    assert eviction.find("key_norm")(model, cache, budget=3).cache.sources[1].tolist() != out.sources[1].tolist()


def test_random_slots_follow_the_seed_and_nest() -> None:
    few, more = (run("llama", "random", budget=b, seed=3) for b in (4, 9))
    again, other = run("llama", "random", budget=4, seed=3), run("llama", "random", budget=4, seed=4)
    for layer in range(3):
        assert torch.equal(few.sources[layer], again.sources[layer])
        for a, b in zip(few.sources[layer].tolist(), more.sources[layer].tolist(), strict=True):
            assert set(a) < set(b)
    assert any(not torch.equal(a, b) for a, b in zip(few.sources, other.sources, strict=True))
    assert len({tuple(row) for s in few.sources for row in s.tolist()}) > 3  # heads and layers draw for themselves
    assert all(row[:2] == [0, 1] for s in run("llama", "random", budget=4, sinks=2).sources for row in s.tolist())


def test_random_slots_are_drawn_evenly() -> None:
    counts = torch.zeros(N)
    for seed in range(200):
        for slots in run("llama", "random", budget=3, seed=seed).sources:
            counts += torch.bincount(slots.flatten(), minlength=N)
    expected = 200 * 3 * 2 * 3 / N
    assert float(((counts - expected) ** 2 / expected).sum()) < 34.5  # chi-squared, 13 degrees, p = 0.001


def test_ties_go_to_the_earlier_slot() -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0, 3.0, 2.0], [0.0] * 5])
    assert highest(scores, 2).tolist() == [[1, 2], [0, 1]]


# --- refusals ------------------------------------------------------------------------------------------------------


def test_wrong_budgets_and_options_are_refused_by_name() -> None:
    model = tiny("llama")
    cache = engine.prefill(model, IDS)
    for budget in (0, [4, 4], [4, 0, 4]):
        with pytest.raises(InputError, match="budget="):
            eviction.find("random")(model, cache, budget=budget)
    with pytest.raises(InputError, match="sliding='half'"):
        eviction.find("random")(model, cache, budget=4, sliding="half")
    with pytest.raises(InputError, match=r"every layer of .* shorter than this context"):
        run("mistral", "random", budget=4)
    with pytest.raises(InputError, match="written by"):
        eviction.find("random")(tiny("qwen3"), cache, budget=4)
    bad = {"streaming": {"sinks": -1}, "random": {"sinks": -1}, "h2o": {"recent": 1.5}, "snapkv": {"kernel": 4}}
    for name, options in bad.items():
        with pytest.raises(InputError, match=f"{next(iter(options))}="):
            eviction.find(name)(model, cache, budget=4, **options)
    with pytest.raises(InputError, match="2 rows of observed tokens"):
        eviction.find("h2o")(model, cache, budget=4, observe=[[1, 2], [3, 4]])


@pytest.mark.parametrize("name", ["h2o", "snapkv", "attention_matching", "trained_cache"])
def test_slots_that_are_no_tokens_are_not_read_again(name: str) -> None:
    model = tiny("llama")
    cache = engine.prefill(model, IDS)
    ids = cache.token_ids.clone()
    ids[0, 3] = -1
    for source in (replace(cache, token_ids=ids), CompactCache.of(cache)):
        with pytest.raises(InputError, match=f"{name}: this cache has slots that are no tokens"):
            eviction.find(name)(model, source, budget=4)


def test_names_settings_and_ratios() -> None:
    found = eviction.find("streaming@2")
    assert (found.name, found.options) == ("streaming@2", {"sinks": 2})
    assert eviction.find("h2o@0.25").options == {"recent": 0.25}
    assert eviction.find("trained_cache@7").options == {"steps": 7}
    with pytest.raises(InputError, match='Did you mean "snapkv"'):
        eviction.find("snap_kv")
    with pytest.raises(InputError, match="window is a number, not 'wide'"):
        eviction.find("snapkv@wide")
    with pytest.raises(InputError, match="key_norm has no option to set"):
        eviction.find("key_norm@3")
    assert eviction.find("random").takes("seed")
    assert not eviction.find("streaming").takes("observe")
    cache = engine.prefill(tiny("llama"), IDS)
    assert [eviction.budget_of(cache, r) for r in (1, 2, 4, 100)] == [14, 7, 4, 1]
    uneven = CompactCache.of(cache).kept([torch.arange(k).expand(2, -1) for k in (4, 9, 14)])
    assert eviction.budget_of(uneven, 4) == (1, 3, 4)
    with pytest.raises(InputError, match=r"ratio=0\.5"):
        eviction.budget_of(cache, 0.5)


def test_the_readout_changes_with_what_is_dropped() -> None:
    """The control of all of the above: an evicted cache does answer differently."""
    model = tiny("llama")
    full = engine.decide(model, engine.prefill(model, IDS), TAIL)
    assert float((engine.decide(model, run("llama", "streaming", budget=5), TAIL) - full).abs().max()) > 1e-3
    assert compat.text_config(model.hf).num_hidden_layers == 3
