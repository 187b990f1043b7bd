"""KVCache algebra: exact identities by hypothesis, moves against re-prefill on every architecture."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvnotes_interp import engine
from kvnotes_interp.cache import KVCache, join
from kvnotes_interp.errors import InputError
from kvnotes_interp.rope import LayerRope, RopeGeometry
from kvnotes_interp.sites import Site
from tests.architectures import ARCHITECTURES
from tests.reference import full_cache
from tests.tiny import tiny

LAYERS, HEADS, DIM = 3, 2, 8
LENGTHS = st.integers(1, 9)
LAYER_SETS = st.none() | st.sets(st.integers(0, LAYERS - 1)).map(tuple)
PARTS = st.sampled_from(["kv", "k", "v"])
HEAD_SETS = st.none() | st.sets(st.integers(0, HEADS - 1), min_size=1).map(tuple)


def random_cache(length: int, seed: int, *, start: int = 0, bias: bool = False) -> KVCache:
    g = torch.Generator().manual_seed(seed)
    make = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    freq = 1.0 / 10 ** (torch.arange(DIM // 2) / 2)
    layers = (LayerRope(freq), LayerRope(freq[:2], interleaved=True), LayerRope(None))
    return KVCache(
        keys=tuple(make(1, HEADS, length, DIM) for _ in range(LAYERS)),
        values=tuple(make(1, HEADS, length, DIM) for _ in range(LAYERS)),
        token_ids=torch.randint(0, 50, (1, length), generator=g),
        positions=torch.arange(start, start + length),
        rope=RopeGeometry(layers),
        model_id="random",
        bias=(make(1, HEADS, length), None, make(1, HEADS, length)) if bias else None,
    )


@given(length=LENGTHS, cut=st.integers(0, 9), seed=st.integers(0, 99), bias=st.booleans())
def test_slice_and_join_is_the_identity(length: int, cut: int, seed: int, bias: bool) -> None:
    cache = random_cache(length, seed, bias=bias)
    cut = min(cut, length)
    assert cache[:cut] + cache[cut:] == cache
    assert len(cache[:cut]) == cut
    assert cache[:cut].end == (cut if cut < length else length)


@given(a=LENGTHS, b=LENGTHS, c=LENGTHS, seed=st.integers(0, 99))
def test_join_is_associative(a: int, b: int, c: int, seed: int) -> None:
    x, y, z = random_cache(a, seed), random_cache(b, seed + 1, start=a), random_cache(c, seed + 2, start=a + b)
    assert (x + y) + z == x + (y + z)


@given(length=LENGTHS, a=st.integers(0, 500), b=st.integers(0, 500), seed=st.integers(0, 99))
def test_moves_add_up(length: int, a: int, b: int, seed: int) -> None:
    cache = random_cache(length, seed)
    twice, once = cache.moved(a).moved(b), cache.moved(a + b)
    assert torch.equal(twice.positions, once.positions)
    assert twice.end == once.end
    for x, y in zip(twice.keys, once.keys, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


@given(length=LENGTHS, offset=st.integers(-5, 500), seed=st.integers(0, 99))
def test_a_move_keeps_norms_values_and_the_way_back(length: int, offset: int, seed: int) -> None:
    cache = random_cache(length, seed, start=5)
    moved = cache.moved(offset)
    for x, y in zip(cache.keys, moved.keys, strict=True):
        torch.testing.assert_close(x.norm(dim=-1), y.norm(dim=-1))
    assert all(x is y for x, y in zip(cache.values, moved.values, strict=True))
    for x, y in zip(cache.keys, moved.moved(-offset).keys, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


def test_float32_moves_err_by_rounding_only_and_bf16_moves_once() -> None:
    exact = random_cache(9, 0)
    single = exact.to(dtype=torch.float32).moved(1234)
    half = exact.to(dtype=torch.bfloat16).moved(1234)
    for want, a, b in zip(exact.moved(1234).keys, single.keys, half.keys, strict=True):
        assert (want - a).norm() / want.norm() < 1e-6
        assert (want - b).norm() / want.norm() < 8e-3  # two roundings of 2^-9


@given(length=LENGTHS, layers=LAYER_SETS, part=PARTS, heads=HEAD_SETS, seed=st.integers(0, 99), data=st.data())
def test_patch_changes_the_site_and_nothing_else(
    length: int,
    layers: tuple[int, ...] | None,
    part: str,
    heads: tuple[int, ...] | None,
    seed: int,
    data: st.DataObject,
) -> None:
    positions = data.draw(st.sets(st.integers(0, length - 1)).map(tuple))
    base, donor = random_cache(length, seed), random_cache(length, seed + 1)
    before = [t.clone() for t in (*base.keys, *base.values)]
    site = Site(positions, layers, part, heads)  # type: ignore[arg-type]
    out = base.patched(site, donor)
    assert out == site(base, donor)
    for layer in range(LAYERS):
        for name, old, new, got in (
            ("k", base.keys[layer], donor.keys[layer], out.keys[layer]),
            ("v", base.values[layer], donor.values[layer], out.values[layer]),
        ):
            touched = name in part and (layers is None or layer in layers)
            for h in range(HEADS):
                for p in range(length):
                    here = touched and p in positions and (heads is None or h in heads)
                    assert torch.equal(got[0, h, p], (new if here else old)[0, h, p])
            if not touched:
                assert got is old  # what is not changed is shared
    assert all(torch.equal(a, b) for a, b in zip(before, (*base.keys, *base.values), strict=True))


@given(length=LENGTHS, seed=st.integers(0, 99), layers=LAYER_SETS, part=PARTS)
def test_patch_from_self_is_the_identity(length: int, seed: int, layers: tuple[int, ...] | None, part: str) -> None:
    cache = random_cache(length, seed)
    assert cache.patched(Site(tuple(range(length)), layers, part), cache) == cache  # type: ignore[arg-type]


@given(length=LENGTHS, seed=st.integers(0, 99))
def test_patch_everything_is_the_donor(length: int, seed: int) -> None:
    base, donor = random_cache(length, seed), random_cache(length, seed + 1)
    out = base.patched(Site(tuple(range(length))), donor)
    assert all(torch.equal(a, b) for a, b in zip(out.keys + out.values, donor.keys + donor.values, strict=True))


@settings(max_examples=10)
@given(length=LENGTHS, seed=st.integers(0, 99), bias=st.booleans())
def test_save_and_load_is_the_identity(
    tmp_path_factory: pytest.TempPathFactory, length: int, seed: int, bias: bool
) -> None:
    cache = random_cache(length, seed, bias=bias)
    folder = tmp_path_factory.mktemp("cache")
    assert KVCache.load(cache.save(folder / "a.safetensors")) == cache
    assert [p.name for p in folder.iterdir()] == ["a.safetensors"]  # no temporary file is left


def test_load_refuses_other_files(tmp_path) -> None:
    with pytest.raises(InputError, match="no cache file at"):
        KVCache.load(tmp_path / "missing")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(InputError, match="not a safetensors file"):
        KVCache.load(tmp_path / "text")


def test_repeat_is_a_view_and_counts_bytes() -> None:
    cache = random_cache(4, 0)
    wide = cache.repeat(batch=3)
    assert wide.batch == 3
    assert wide.keys[0].data_ptr() == cache.keys[0].data_ptr()
    assert cache.nbytes == 2 * LAYERS * HEADS * 4 * DIM * 8
    with pytest.raises(InputError, match="batch 1"):
        wide.repeat(batch=2)


def test_wrong_input_is_named() -> None:
    cache, other = random_cache(4, 0), random_cache(4, 1)
    with pytest.raises(InputError, match=r"site.positions holds 4, but the cache has 4"):
        cache.patched(Site((4,)), other)
    with pytest.raises(InputError, match=r"site.layers holds 3"):
        cache.patched(Site((0,), layers=(3,)), other)
    with pytest.raises(InputError, match="part='q'"):
        Site((0,), part="q")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"slot 0: the donor's key is turned to position 3"):
        cache.patched(Site((0,)), other.moved(3))
    with pytest.raises(InputError, match=r"Move it there with .moved\(4\)"):
        cache + other
    assert len(join(cache, other, overlap=True)) == 8
    with pytest.raises(InputError, match="cache\\[a:b\\]"):
        cache[1]  # type: ignore[index]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_moved_prefix_is_the_prefix_run_there(name: str) -> None:
    """Keys rotated by an offset = keys of a plain forward at the new positions, in every layer (RoPE relativity)."""
    model = tiny(name)
    ids = list(range(5, 17))
    cache = engine.prefill(model, ids)
    for offset in (1, 9, 40):
        reference = full_cache(model.hf, torch.tensor([ids]), torch.arange(offset, offset + len(ids)))
        moved = cache.moved(offset)
        for layer, (key, value) in enumerate(reference):
            # transformers' angles are float32 even in a float64 model, hence 1e-5 and not 1e-12.
            assert (moved.keys[layer] - key).norm() <= 1e-5 * key.norm(), (name, layer, offset)
            assert (moved.values[layer] - value).norm() <= 1e-5 * value.norm(), (name, layer, offset)
        turned = [i for i, layer in enumerate(model.rope.layers) if layer.inv_freq is not None]
        assert all((cache.keys[i] - reference[i][0]).norm() > 1e-2 * reference[i][0].norm() for i in turned)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_unrotated_keys_do_not_know_their_position(name: str) -> None:
    model = tiny(name)
    here = engine.prefill(model, list(range(5, 15))).unrotated()
    there = engine.prefill(model, list(range(5, 15)), positions=range(30, 40)).unrotated()
    for a, b in zip(here.keys, there.keys, strict=True):
        assert (a - b).norm() <= 1e-5 * a.norm()
