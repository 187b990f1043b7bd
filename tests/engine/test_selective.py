"""Recomputed slots against plain prefills, and against a reference that walks the layers token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvnotes_interp import compat, engine
from kvnotes_interp.errors import InputError
from tests.architectures import ARCHITECTURES
from tests.tiny import tiny

OLD = [7, 31, 12, 55, 8, 60, 3, 44, 19, 71, 25, 66, 13, 9]
NEW = [7, 31, 90, 55, 8, 60, 3, 44, 19, 71, 25, 66, 13, 9]
FIELD = 2
DOWN = list(range(FIELD, len(OLD)))
EXACT = {"rtol": 0, "atol": 1e-10}


def same(a: Any, b: Any) -> None:
    assert torch.equal(a.token_ids, b.token_ids)
    for x, y in zip(a.keys + a.values, b.keys + b.values, strict=True):
        torch.testing.assert_close(x, y, **EXACT)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_recomputing_all_that_changed_is_a_prefill_of_the_new_prompt(name: str) -> None:
    model = tiny(name)
    old, new = engine.prefill(model, OLD), engine.prefill(model, NEW)
    got = engine.recompute(model, old, DOWN, token_ids=NEW[FIELD:])
    same(got.cache, new)
    assert got.layer_tokens == len(DOWN) * old.n_layers
    assert not torch.equal(old.keys[-1], new.keys[-1])
    same(engine.prefill(model, OLD), old)  # the parent was left alone


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_blend_that_keeps_all_is_a_prefill_of_the_new_prompt(name: str) -> None:
    model = tiny(name)
    old, new = engine.prefill(model, OLD), engine.prefill(model, NEW)
    got = engine.blend(model, old, DOWN, len(DOWN), token_ids=NEW[FIELD:], check_layer=0)
    same(got.cache, new)
    assert got.slots == tuple(DOWN)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt_neox"])
def test_a_few_slots_see_the_mixed_cache(name: str) -> None:
    """Slot by slot: a recomputed token is the next token of a cache whose earlier slots are already mixed."""
    model = tiny(name)
    old = engine.prefill(model, OLD)
    slots = [FIELD, 5, 11]
    got = engine.recompute(model, old, slots, token_ids=[NEW[FIELD], OLD[5], OLD[11]]).cache
    mixed = old
    for slot in slots:
        grown, _ = engine.extend(model, mixed[:slot], [NEW[slot]])
        mixed = grown + mixed[slot + 1 :]
    same(got, mixed)
    partly = engine.recompute(model, old, [5, 11]).cache  # nothing they see has changed
    same(partly, old)


def test_moved_tokens_keep_their_own_positions() -> None:
    model = tiny("llama3")
    old = engine.prefill(model, OLD, positions=[*range(6), *range(40, 48)])
    same(engine.recompute(model, old, DOWN).cache, old)


@pytest.mark.parametrize("name", ["llama", "gemma3", "olmo2"])
def test_blend_keeps_the_most_changed_and_only_they_go_deep(name: str) -> None:
    model = tiny(name)
    old = engine.prefill(model, OLD)
    whole = engine.recompute(model, old, DOWN, token_ids=NEW[FIELD:]).cache
    change = {
        slot: float(
            (whole.keys[1][0, :, slot] - old.keys[1][0, :, slot]).square().sum()
            + (whole.values[1][0, :, slot] - old.values[1][0, :, slot]).square().sum()
        )
        for slot in DOWN
    }
    want = sorted(sorted(DOWN, key=change.__getitem__, reverse=True)[:4])
    got = engine.blend(model, old, DOWN, 4, token_ids=NEW[FIELD:])
    assert list(got.slots) == want
    shallow = [slot for slot in DOWN if slot not in want]
    for layer in range(old.n_layers):
        kept = whole if layer <= 1 else old  # the first two layers are new for all, the rest old for the others
        assert torch.allclose(got.cache.keys[layer][:, :, shallow], kept.keys[layer][:, :, shallow], atol=1e-10)
    forced = engine.blend(model, old, DOWN, 4, token_ids=NEW[FIELD:], always=(shallow[-1],))
    assert shallow[-1] in forced.slots
    assert len(forced.slots) == 4


@pytest.mark.parametrize("check_layer", [0, 1, 2])
def test_the_cost_is_what_the_attention_modules_saw(check_layer: int) -> None:
    model = tiny("qwen3")
    old, seen = engine.prefill(model, OLD), [0]

    def count(_module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        hidden: Tensor = kwargs["hidden_states"]
        seen[0] += hidden.shape[0] * hidden.shape[1]

    layers = compat.layers(model.hf)
    handles = [compat.attention_module(layer).register_forward_pre_hook(count, with_kwargs=True) for layer in layers]
    got = engine.blend(model, old, DOWN, 3, token_ids=NEW[FIELD:], check_layer=check_layer)
    assert got.layer_tokens == seen[0]
    seen[0] = 0
    assert engine.recompute(model, old, [3, 4]).layer_tokens == seen[0]
    for handle in handles:
        handle.remove()
    assert all("forward" not in vars(layer) for layer in layers)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, c: engine.recompute(m, c, [14]), "slots holds 14"),
        (lambda m, c: engine.recompute(m, c, [1, 2], token_ids=[5]), "1 token ids for 2 slots"),
        (lambda m, c: engine.blend(m, c, DOWN, 3, check_layer=9), "check_layer=9"),
        (lambda m, c: engine.blend(m, c, DOWN, 99), "keep=99"),
        (lambda m, c: engine.blend(m, c, [4, 5], 1, always=(6,)), "always holds 6"),
    ],
)
def test_bad_input_is_refused_by_name(call: Any, message: str) -> None:
    model = tiny("llama")
    with pytest.raises(InputError, match=message):
        call(model, engine.prefill(model, OLD))
