"""A stream of any length in a cache of constant size."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvnotes_interp import engine
from kvnotes_interp.compact import SYNTHETIC, CompactCache
from kvnotes_interp.errors import InputError
from kvnotes_interp.operators import eviction
from kvnotes_interp.operators.still import StillSettings, new_still, passes, stream
from tests.tiny import tiny

CHUNK, BUDGET, CHUNKS = 6, 5, 50
IDS = torch.randint(3, 97, (CHUNK * CHUNKS,), generator=torch.Generator().manual_seed(0)).tolist()
TAIL = IDS[:4]


def compactor(name: str, model: Any) -> Any:
    return new_still(model, settings=StillSettings(bias=True)) if name == "still" else eviction.find(name)


@pytest.mark.parametrize("name", ["still", "streaming", "random", "h2o", "snapkv"])
def test_fifty_chunks_take_the_memory_of_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    largest: list[int] = []
    real = engine.extend

    def watched(model: Any, cache: Any, ids: Any, **options: Any) -> Any:
        grown, hidden = real(model, cache, ids, **options)
        largest.append(max(grown.slots))
        return grown, hidden

    monkeypatch.setattr(engine, "extend", watched)
    seen = list(passes(model, compactor(name, model), IDS, chunk=CHUNK, budget=BUDGET))
    assert len(seen) == CHUNKS
    assert {cache.slots for cache in seen} == {(BUDGET,) * model.shape.n_layers}
    assert len({cache.nbytes for cache in seen}) == 1
    assert [cache.end for cache in seen] == [CHUNK * (i + 1) for i in range(CHUNKS)]
    # A compactor that observes runs its chunk once more, behind the cache.
    assert max(largest) <= BUDGET + CHUNK + (CHUNK if name in ("h2o", "snapkv") else 0)
    last = seen[-1]
    for positions in last.positions:
        assert bool((positions.diff(dim=1) > 0).all())
        assert int(positions.max()) < last.end
    if name == "still":
        spread = torch.linspace(0, len(IDS) - 1, BUDGET).round().long()
        assert all(torch.equal(p, spread.expand_as(p)) for p in last.positions)
        assert all(bool((s == SYNTHETIC).all()) for s in last.sources)
    assert bool(engine.decide(model, last, TAIL).isfinite().all())


def test_without_loss_a_stream_is_the_prefill() -> None:
    model = tiny("gemma2")
    cache = stream(model, compactor("still", model), IDS[:33], chunk=8, budget=99)
    want = engine.prefill(model, IDS[:33])
    for a, b in zip(cache.keys + cache.values, want.keys + want.values, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
    torch.testing.assert_close(engine.decide(model, cache, TAIL), engine.decide(model, want, TAIL), rtol=0, atol=1e-10)


@torch.no_grad()
def test_a_pass_is_a_chunk_on_the_cache_and_a_compaction() -> None:
    model, still = tiny("qwen3"), compactor("still", tiny("qwen3"))
    by_hand = still.compact(model, engine.prefill(model, IDS[:8]), budget=5)
    by_hand = still.compact(model, engine.extend(model, by_hand, IDS[8:16])[0], budget=5)
    by_hand = still.compact(model, engine.extend(model, by_hand, IDS[16:19])[0], budget=5)
    got = stream(model, still, IDS[:19], chunk=8, budget=5)
    assert isinstance(got, CompactCache)
    for a, b in zip(got.keys + got.values, by_hand.keys + by_hand.values, strict=True):
        assert torch.equal(a, b)
    once = still.compact(model, engine.prefill(model, IDS[:19]), budget=5)
    assert float((got.values[2] - once.values[2]).abs().max()) > 1e-3  # the control: passes do differ from one


def test_wrong_sizes_are_refused() -> None:
    model = tiny("llama")
    for ids, chunk, budget in (([], 4, 4), (IDS, 0, 4), (IDS, 4, 0)):
        with pytest.raises(InputError, match="each must be at least 1"):
            stream(model, compactor("still", model), ids, chunk=chunk, budget=budget)
