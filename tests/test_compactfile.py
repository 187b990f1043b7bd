"""Compact caches on disk: every part comes back, and other files are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvnotes_interp import engine
from kvnotes_interp.cache import KVCache
from kvnotes_interp.compact import CompactCache
from kvnotes_interp.errors import InputError
from kvnotes_interp.operators import eviction
from tests.tiny import tiny

IDS = [7, 31, 12, 55, 8, 60, 3, 44, 19, 71]


@pytest.mark.parametrize("name", ["llama", "gemma3", "cohere2"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_save_and_load_is_the_identity(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny(name)
    made = eviction.find("attention_matching")(model, engine.prefill(model, IDS), budget=4).cache
    assert made.bias is not None  # in gemma3 and cohere2, of one layer alone
    cast = lambda tensors: tuple(None if t is None else t.to(dtype) for t in tensors)  # noqa: E731
    cache = replace(made, keys=cast(made.keys), values=cast(made.values), bias=cast(made.bias))
    path = cache.save(tmp_path / "deep" / "a.safetensors")
    back = CompactCache.load(path)
    assert [p.name for p in path.parent.iterdir()] == ["a.safetensors"]
    assert (back.model_id, back.end, back.slots) == (model.model_id, len(IDS), cache.slots)
    assert back.rope.same_as(cache.rope)
    for part in ("keys", "values", "positions", "sources", "bias"):
        for a, b in zip(getattr(back, part), getattr(cache, part), strict=True):
            assert (a is None) == (b is None)
            assert a is None or (a.dtype == b.dtype and torch.equal(a, b))
    if dtype == torch.float64:
        assert torch.equal(engine.decide(model, back, [5, 6]), engine.decide(model, cache, [5, 6]))


def test_slices_and_views_are_written_whole(tmp_path: Path) -> None:
    cache = CompactCache.of(engine.prefill(tiny("llama"), IDS)).repeat(batch=3)
    back = CompactCache.load(cache.save(tmp_path / "a.safetensors"))
    assert (back.batch, back.bias) == (3, None)
    assert all(torch.equal(a, b) for a, b in zip(back.keys, cache.keys, strict=True))


def test_other_files_and_other_models_are_refused(tmp_path: Path) -> None:
    model = tiny("llama")
    plain = engine.prefill(model, IDS)
    with pytest.raises(InputError, match="no cache file"):
        CompactCache.load(tmp_path / "missing")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(InputError, match="not a safetensors file"):
        CompactCache.load(tmp_path / "text")
    with pytest.raises(InputError, match=r"compactcache/1.*found 'kvcache/1'"):
        CompactCache.load(plain.save(tmp_path / "plain"))
    path = CompactCache.of(plain).save(tmp_path / "compact")
    with pytest.raises(InputError, match=r"kvcache/1.*found 'compactcache/1'"):
        KVCache.load(path)
    with pytest.raises(InputError, match="written by"):
        engine.decide(tiny("qwen3"), CompactCache.load(path), [5])
