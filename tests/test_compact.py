"""CompactCache: the same numbers as a KVCache where nothing was dropped, a masked full forward where something was."""

from __future__ import annotations

import pytest
import torch

from kvnotes_interp import attention, compat, engine
from kvnotes_interp.cache import KVCache
from kvnotes_interp.compact import CompactCache
from kvnotes_interp.errors import InputError
from kvnotes_interp.rope import rotate
from tests.architectures import ARCHITECTURES, WINDOW
from tests.tiny import tiny

IDS = [7, 31, 12, 55, 8, 60, 3, 44, 19, 71, 25, 66, 13, 9]
HEAD, TAIL = IDS[:9], IDS[9:]


def choice(cache: KVCache, kept: int, *, seed: int = 0) -> list[torch.Tensor]:
    """Other slots in every layer and KV head, rising, and one more slot in every other layer."""
    rng = torch.Generator().manual_seed(seed)

    def pick(count: int) -> torch.Tensor:
        rows = [torch.randperm(len(cache), generator=rng)[:count].sort().values for _ in range(cache.n_kv_heads)]
        return torch.stack(rows)

    return [pick(kept + layer % 2) for layer in range(cache.n_layers)]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_whole_compact_cache_runs_as_the_cache_it_came_from(name: str) -> None:
    model = tiny(name)
    cache = engine.prefill(model, HEAD)
    want, hidden = engine.extend(model, cache, TAIL)
    got, again = engine.extend(model, CompactCache.of(cache), TAIL)
    torch.testing.assert_close(again, hidden, rtol=0, atol=1e-10)
    for a, b in zip(got.keys + got.values, want.keys + want.values, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
    assert got.end == want.end
    assert all(torch.equal(p, want.positions.expand(got.n_kv_heads, -1)) for p in got.positions)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_dropped_slots_are_keys_that_nobody_sees(name: str) -> None:
    """The slow reference keeps every key and cuts, per layer and query head, the edges to the dropped ones."""
    model = tiny(name)
    cache = engine.prefill(model, HEAD)
    slots = choice(cache, 4)
    groups = model.shape.n_heads // cache.n_kv_heads
    cuts = []
    for layer, chosen in enumerate(slots):
        for head in range(model.shape.n_heads):
            kept = set(chosen[head // groups].tolist())
            lost = tuple(slot for slot in range(len(cache)) if slot not in kept)
            cuts.append(attention.Cut(lost, layers=(layer,), heads=(head,)))
    fork = compat.new_cache(cache.keys, cache.values)
    with torch.no_grad(), attention.using(model.hf, attention.Plan(cuts=(tuple(cuts),))):
        want = compat.forward(model.hf, torch.tensor([TAIL]), fork, torch.arange(len(HEAD), len(IDS)))
    _, got = engine.extend(model, CompactCache.of(cache).kept(slots), TAIL)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
    _, whole = engine.extend(model, cache, TAIL)
    assert float((got - whole).abs().max()) > 1e-4  # the control: what was dropped did matter


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "qwen3"])
def test_a_bias_is_added_to_the_scores_of_its_own_slot(name: str) -> None:
    """Doubling a key's weight by a bias of log 2 equals holding the key and its value twice."""
    model = tiny(name)
    cache = CompactCache.of(engine.prefill(model, HEAD))
    twice = [torch.tensor([[*range(9), 4]]).expand(cache.n_kv_heads, -1)] * cache.n_layers
    bias = torch.zeros(1, cache.n_kv_heads, 9, dtype=cache.dtype)
    bias[..., 4] = torch.log(torch.tensor(2.0, dtype=torch.float64))
    weighted = CompactCache(
        cache.keys,
        cache.values,
        cache.positions,
        cache.sources,
        cache.rope,
        cache.model_id,
        cache.end,
        (bias,) * cache.n_layers,
    )
    grown, got = engine.extend(model, weighted, TAIL)
    _, want = engine.extend(model, cache.kept(twice), TAIL)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
    # A second step: the new tokens carry no bias of their own.
    _, one_by_one = engine.extend(model, engine.extend(model, weighted, TAIL[:2])[0], TAIL[2:])
    torch.testing.assert_close(one_by_one, got[:, 2:], rtol=0, atol=1e-10)
    assert grown.bias is not None
    assert [b.shape[-1] for b in grown.bias if b is not None] == list(grown.slots)


def test_a_sliding_layer_counts_its_window_in_positions() -> None:
    """A key out of the window's reach is not seen, however few slots lie between."""
    model = tiny("mistral")
    cache = CompactCache.of(engine.prefill(model, HEAD))
    near = [torch.tensor([[0, 8]]).expand(cache.n_kv_heads, -1)] * cache.n_layers
    only = [torch.tensor([[8]]).expand(cache.n_kv_heads, -1)] * cache.n_layers
    assert len(HEAD) > WINDOW
    _, with_far = engine.extend(model, cache.kept(near), TAIL)
    _, without = engine.extend(model, cache.kept(only), TAIL)
    torch.testing.assert_close(with_far, without, rtol=0, atol=1e-12)


def test_keys_move_per_head_and_come_back() -> None:
    model = tiny("llama3")
    cache = CompactCache.of(engine.prefill(model, HEAD)).kept(choice(engine.prefill(model, HEAD), 4))
    dense = cache.renumbered()
    assert dense.end == max(cache.slots)
    assert dense.positions[1].tolist() == [list(range(5))] * cache.n_kv_heads
    back = dense.placed(cache.positions)
    for a, b in zip(back.keys, cache.keys, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    # By hand, the one head: what a KVCache of these slots does.
    layer, head = 0, 1
    slots = cache.sources[layer][head]
    plain = engine.prefill(model, HEAD)
    key = plain.keys[layer][:, head : head + 1, slots]
    want = rotate(key, torch.arange(len(slots)) - slots, model.rope.layers[layer])
    torch.testing.assert_close(dense.keys[layer][:, head : head + 1], want, rtol=0, atol=1e-12)


def test_decoding_and_attention_go_through_it() -> None:
    model = tiny("llama")
    cache = engine.prefill(model, HEAD)
    whole = CompactCache.of(cache)
    a = engine.decode(model, cache, TAIL, max_new_tokens=5, stop=())
    b = engine.decode(model, whole, TAIL, max_new_tokens=5, stop=())
    assert a.token_ids == b.token_ids
    rows = engine.attention_by_layer(model, whole, TAIL, rows=2)
    torch.testing.assert_close(torch.stack(rows), engine.attention_rows(model, cache, TAIL, rows=2))
    kept = engine.attention_by_layer(model, whole.kept(choice(cache, 3)), TAIL)
    assert [row.shape[-1] for row in kept] == [3 + layer % 2 + len(TAIL) for layer in range(cache.n_layers)]
    for row in kept:
        torch.testing.assert_close(row.sum(-1), torch.ones_like(row[..., 0]))


def test_wrong_slots_and_shapes_are_refused() -> None:
    model = tiny("llama")
    cache = CompactCache.of(engine.prefill(model, HEAD))
    with pytest.raises(InputError, match="slots for 1 layers"):
        cache.kept([torch.zeros(2, 1, dtype=torch.long)])
    with pytest.raises(InputError, match="from 0 to 8"):
        cache.kept([torch.full((2, 1), 9)] * cache.n_layers)
    with pytest.raises(InputError, match="layer 0"):
        CompactCache(
            cache.keys, cache.values, cache.positions, tuple(s[:, :-1] for s in cache.sources), cache.rope, "", 9
        )
