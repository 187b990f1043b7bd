"""What holds for every compactor on every kind of architecture: budgets, positions, batches, exact costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvnotes_interp import compat, engine
from kvnotes_interp.cache import KVCache
from kvnotes_interp.compact import SYNTHETIC, CompactCache
from kvnotes_interp.model import Model
from kvnotes_interp.operators import eviction
from kvnotes_interp.operators.eviction.compacted import sliding_layers
from kvnotes_interp.operators.scorer import new_scorer
from kvnotes_interp.operators.still import new_still
from tests.architectures import WINDOW
from tests.tiny import tiny

IDS = [7, 31, 12, 55, 8, 60, 3, 44, 19, 71, 25, 66, 13, 9]
N = len(IDS)
TAIL = [50, 21, 83]
# Grouped queries, q/k-norm, sliding layers with rotations of their own, soft-caps, partial rotation, no positions.
NAMES = ["llama", "qwen3", "gemma3", "gemma2", "phi", "gpt_neox", "cohere2"]
CHOOSERS = ["random", "streaming", "key_norm", "h2o", "snapkv", "scorer"]
FAST: dict[str, dict[str, Any]] = {"trained_cache": {"steps": 3, "piece": 6}}


def compacted(model: Model, name: str, cache: KVCache | CompactCache, **options: Any) -> eviction.Compacted:
    made = {"still": new_still, "scorer": new_scorer}.get(name)
    own = FAST.get(name, {}) if made is None else {"adapter": made(model)}
    return eviction.find(name)(model, cache, **{**own, **options})


def identical(a: CompactCache, b: CompactCache) -> bool:
    def tensors(cache: CompactCache) -> list[torch.Tensor | None]:
        parts = (cache.keys, cache.values, cache.positions, cache.sources, cache.bias or (None,) * cache.n_layers)
        return [tensor for part in parts for tensor in part]

    pairs = zip(tensors(a), tensors(b), strict=True)
    return a.end == b.end and all(x is y or (x is not None and y is not None and torch.equal(x, y)) for x, y in pairs)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", eviction.names())
def test_budgets_positions_and_whole_caches(name: str, method: str) -> None:
    model = tiny(name)
    cache = engine.prefill(model, [IDS, IDS[::-1]])
    slides = sliding_layers(model, N)
    n_layers = cache.n_layers
    for sliding in ("keep", "compact"):
        whole = [sliding == "keep" and s for s in slides]
        for budget in (1, 5, [3 + i for i in range(n_layers)]):
            out = compacted(model, method, cache, budget=budget, sliding=sliding).cache
            each = [budget] * n_layers if isinstance(budget, int) else budget
            if method == "still":  # what a window has left behind is dropped first
                each = [min(b, WINDOW - 1) if s else b for s, b in zip(slides, each, strict=True)]
            assert out.slots == tuple(N if keep else b for keep, b in zip(whole, each, strict=True))
            assert (out.end, out.batch, out.n_kv_heads, out.dtype) == (N, 2, cache.n_kv_heads, cache.dtype)
            assert not any(t.requires_grad for t in out.keys + out.values)
            assert bool(engine.decide(model, out, TAIL).isfinite().all())
            for layer in (i for i, keep in enumerate(whole) if keep):
                assert torch.equal(out.keys[layer], cache.keys[layer])
                assert torch.equal(out.values[layer], cache.values[layer])
    for budget in (N, 10 * N, [N] * n_layers):
        made = compacted(model, method, cache, budget=budget, sliding="compact")
        assert identical(made.cache, CompactCache.of(cache))
        assert made.layer_tokens == 0
    compact = CompactCache.of(cache).kept([torch.arange(6).expand(cache.n_kv_heads, -1)] * n_layers)
    assert compacted(model, method, compact, budget=6, sliding="compact").cache is compact


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("method", eviction.names())
def test_the_same_again_gives_the_same(name: str, method: str) -> None:
    model = tiny(name)
    cache = engine.prefill(model, IDS)
    once, again = (compacted(model, method, cache, budget=5).cache for _ in range(2))
    assert identical(once, again)
    if eviction.find(method).takes("seed"):
        other = compacted(model, method, cache, budget=5, seed=1).cache
        assert not identical(once, other)


@pytest.mark.parametrize("method", eviction.names())
def test_a_batch_of_one_row_twice_is_that_row_twice(method: str) -> None:
    model = tiny("qwen3")
    one = compacted(model, method, engine.prefill(model, IDS), budget=5).cache
    two = compacted(model, method, engine.prefill(model, [IDS, IDS]), budget=5).cache
    for a, b in zip(one.keys + one.values, two.keys + two.values, strict=True):
        # Training adds the two rows' gradients, which Adam's steps do not see but for its epsilon.
        torch.testing.assert_close(a.expand(2, -1, -1, -1), b, rtol=0, atol=1e-4 if method in FAST else 1e-9)


@pytest.mark.parametrize("method", eviction.names())
def test_compacting_again_and_observed_tokens(method: str) -> None:
    """A compact cache is compacted like any other; what has to observe is given tokens."""
    model = tiny("gemma3")
    first = compacted(model, method, engine.prefill(model, IDS), budget=8).cache
    observe = {"observe": TAIL} if eviction.find(method).takes("observe") else {}
    second = compacted(model, method, first, budget=4, **observe).cache
    assert second.slots == tuple(N if s else 4 for s in sliding_layers(model, N))
    assert second.end == N
    if method in CHOOSERS:
        for layer in range(first.n_layers):
            for a, b in zip(second.sources[layer].tolist(), first.sources[layer].tolist(), strict=True):
                assert set(a) <= set(b)


@pytest.mark.parametrize(
    ("method", "options"),
    [(method, {}) for method in eviction.names()]
    + [(method, {"observe": TAIL}) for method in eviction.names() if eviction.find(method).takes("observe")],
)
def test_the_cost_is_what_the_layers_saw(method: str, options: dict[str, Any]) -> None:
    model = tiny("llama")
    cache = engine.prefill(model, IDS)
    seen: list[int] = []
    hooks = [
        layer.register_forward_pre_hook(
            lambda _m, args, kw: seen.append((args[0] if args else kw["hidden_states"]).shape[1]), with_kwargs=True
        )
        for layer in compat.layers(model.hf)
    ]
    try:
        made = compacted(model, method, cache, budget=5, **options)
    finally:
        for hook in hooks:
            hook.remove()
    assert made.layer_tokens == sum(seen)


@settings(deadline=None, max_examples=60)
@given(
    method=st.sampled_from([*CHOOSERS, "attention_matching"]),
    name=st.sampled_from(["llama", "gemma3", "phi"]),
    n=st.integers(2, N),
    budgets=st.lists(st.integers(1, N + 2), min_size=4, max_size=4),
    sliding=st.sampled_from(["keep", "compact"]),
)
def test_kept_slots_are_distinct_rising_and_the_source_s_own(
    method: str, name: str, n: int, budgets: list[int], sliding: str
) -> None:
    model = tiny(name)
    cache = engine.prefill(model, IDS[:n])
    out = compacted(model, method, cache, budget=budgets[: cache.n_layers], sliding=sliding).cache
    for layer, sources in enumerate(out.sources):
        assert torch.equal(out.positions[layer], sources)
        for head, row in enumerate(sources.tolist()):
            assert row == sorted(set(row))
            assert set(row) <= set(range(n))
            assert torch.equal(out.keys[layer][:, head], cache.keys[layer][:, head, row])
            if method != "attention_matching":
                assert torch.equal(out.values[layer][:, head], cache.values[layer][:, head, row])


def test_trained_slots_are_of_no_token() -> None:
    model = tiny("llama")
    out = compacted(model, "trained_cache", engine.prefill(model, IDS), budget=5).cache
    assert all(s.tolist() == [[0, *[SYNTHETIC] * 4]] * 2 for s in out.sources)
    assert all(p.tolist() == [[0, 3, 6, 9, 13]] * 2 for p in out.positions)
