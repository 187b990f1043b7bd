"""Forward passes on caches against plain full forwards, on every architecture."""

from __future__ import annotations

import pytest
import torch

from kvnotes_interp import compat, engine
from kvnotes_interp.errors import InputError
from tests.architectures import ARCHITECTURES
from tests.reference import full_cache, full_logits
from tests.tiny import tiny

IDS = [7, 31, 12, 55, 8, 60, 3, 44, 19, 71, 25, 66, 13, 9]
ANSWERS = (5, 17)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_prefill_is_the_models_own_cache(name: str) -> None:
    model = tiny(name)
    cache = engine.prefill(model, IDS)
    for layer, (key, value) in enumerate(full_cache(model.hf, torch.tensor([IDS]))):
        torch.testing.assert_close(cache.keys[layer], key, rtol=0, atol=1e-12)
        torch.testing.assert_close(cache.values[layer], value, rtol=0, atol=1e-12)
    assert cache.token_ids.tolist() == [IDS]
    assert cache.end == len(IDS)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_extend_is_one_long_prefill_and_leaves_the_parent_alone(name: str) -> None:
    model = tiny(name)
    whole, head, again = engine.prefill(model, IDS), engine.prefill(model, IDS[:9]), engine.prefill(model, IDS[:9])
    grown, hidden = engine.extend(model, head, IDS[9:])
    assert head == again
    for a, b in zip(grown.keys + grown.values, whole.keys + whole.values, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
    logits = compat.unembed(model.hf, hidden[0])
    torch.testing.assert_close(logits, full_logits(model.hf, torch.tensor([IDS]))[0, 9:], rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_decide_reads_the_models_own_logits(name: str) -> None:
    model = tiny(name)
    got = engine.decide(model, engine.prefill(model, IDS[:-1]), IDS[-1:], ANSWERS)
    want = full_logits(model.hf, torch.tensor([IDS]))[0, -1, list(ANSWERS)]
    torch.testing.assert_close(got[0], want, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_attention_rows_are_the_models_own(name: str) -> None:
    model = tiny(name, "eager")
    rows = engine.attention_rows(model, engine.prefill(model, IDS[:-3]), IDS[-3:], rows=2)
    with torch.no_grad():
        want = model.hf(input_ids=torch.tensor([IDS]), output_attentions=True, use_cache=False).attentions
    for layer, weights in enumerate(want):
        torch.testing.assert_close(rows[layer].double(), weights[0, :, -2:].double(), rtol=0, atol=1e-6)
    assert model.hf.config._attn_implementation == "eager"  # put back


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3"])
def test_a_gap_in_the_positions_is_distance_not_a_cut(name: str) -> None:
    model = tiny(name)
    positions = [*range(8), *range(14, 20)]
    head = engine.prefill(model, IDS[:8])
    grown, _ = engine.extend(model, head, IDS[8:], positions=positions[8:])
    want = full_cache(model.hf, torch.tensor([IDS]), torch.tensor(positions))
    for layer, (key, _) in enumerate(want):
        torch.testing.assert_close(grown.keys[layer], key, rtol=0, atol=1e-10)
    assert grown.end == 20


def test_greedy_decoding_is_argmax_of_full_forwards() -> None:
    model = tiny("llama")
    ids, want = list(IDS), []
    for _ in range(6):
        want.append(int(full_logits(model.hf, torch.tensor([ids]))[0, -1].argmax()))
        ids.append(want[-1])
    out = engine.decode(model, engine.prefill(model, IDS[:-1]), IDS[-1:], max_new_tokens=6, stop=())
    assert list(out.token_ids) == want
    stopped = engine.decode(model, engine.prefill(model, IDS[:-1]), IDS[-1:], max_new_tokens=6, stop=(want[2],))
    assert list(stopped.token_ids) == want[: want.index(want[2]) + 1]


def test_a_key_bias_of_minus_infinity_removes_the_key() -> None:
    """The bias path, against a cache that never held the key. Its position stays, so nothing else changes."""
    from dataclasses import replace

    model = tiny("llama")
    cache = engine.prefill(model, IDS[:-1])
    gone = torch.zeros(1, cache.n_kv_heads, len(cache), dtype=cache.dtype)
    gone[..., 4] = float("-inf")
    masked = replace(cache, bias=(gone,) * cache.n_layers)
    without = cache[:4] + cache[5:]
    got, want = (engine.decide(model, c, IDS[-1:], ANSWERS) for c in (masked, without))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
    zero = replace(cache, bias=(torch.zeros_like(gone),) * cache.n_layers)
    torch.testing.assert_close(
        engine.decide(model, zero, IDS[-1:], ANSWERS),
        engine.decide(model, cache, IDS[-1:], ANSWERS),
        rtol=0,
        atol=1e-10,
    )


def test_a_key_bias_of_log_two_counts_the_key_twice() -> None:
    from dataclasses import replace

    from kvnotes_interp.cache import join

    model = tiny("llama")
    cache = engine.prefill(model, IDS[:-1])
    bias = torch.zeros(1, cache.n_kv_heads, len(cache), dtype=cache.dtype)
    bias[..., -1] = torch.tensor(2.0).log()
    twice = replace(join(cache, cache[-1:], overlap=True), end=cache.end)
    got = engine.decide(model, replace(cache, bias=(bias,) * cache.n_layers), IDS[-1:], ANSWERS)
    torch.testing.assert_close(got, engine.decide(model, twice, IDS[-1:], ANSWERS), rtol=0, atol=1e-7)


def test_wrong_input_is_named() -> None:
    model, other = tiny("llama"), tiny("qwen3")
    cache = engine.prefill(model, IDS)
    with pytest.raises(InputError, match="at least one token"):
        engine.prefill(model, [])
    with pytest.raises(InputError, match="positions for 14 tokens"):
        engine.prefill(model, IDS, positions=[0, 1, 2])
    with pytest.raises(InputError, match="the model at hand is 'tiny-qwen3"):
        engine.extend(other, cache, IDS[:1])
    with pytest.raises(InputError, match="2 rows of tokens for a cache of batch 1"):
        engine.extend(model, cache, [[1], [2]])
