"""Indices that are none, generators that are used up, and values that would be rounded: refused, never half applied."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import kvnotes_interp as kv
from kvnotes_interp import compat, engine
from kvnotes_interp.engine import Cut, Edits, HeadPatch, ResidualPatch, WritePatch
from kvnotes_interp.errors import whole_numbers
from tests.architectures import build
from tests.tiny import tiny

IDS = [7, 31, 12, 55, 8, 60, 3, 44, 19, 71, 25, 66, 13, 9]
CUT, LAST = 9, len(IDS) - 1
ADD = torch.ones(1, 1, 32, dtype=torch.float64)
MASK = torch.tensor([False] * 5 + [True] * 2 + [False] * 2)


def effect(edits: Edits) -> float:
    model = tiny("llama")
    head = engine.prefill(model, IDS[:CUT])
    plain, edited = (engine.capture(model, head, IDS[CUT:], want=(), edits=e).hidden for e in (None, edits))
    return float((plain - edited).abs().max())


def test_whole_numbers_of_every_sort() -> None:
    for values in ((3, 4), [3, 4], range(3, 5), np.array([3, 4]), torch.tensor([3, 4]), (v for v in (3, 4))):
        assert whole_numbers("x", values) == (3, 4)
    assert whole_numbers("x", [np.int64(3), torch.tensor(4)]) == (3, 4)
    assert whole_numbers("x", ()) == ()
    for values in (MASK, [True], (1.5,), "12", 5, None, [[1]], torch.tensor([1.0]), [None]):
        with pytest.raises(kv.InputError, match="x"):
            whole_numbers("x", values)


@pytest.mark.parametrize("key", [1.5, 1.0, True, "1"])
def test_a_layer_that_is_no_whole_number_is_refused(key: Any) -> None:
    """It would be looked up, and not found, in every layer."""
    for make in (
        lambda: ResidualPatch((LAST,), {key: ADD}),
        lambda: WritePatch("mlp", (LAST,), {key: ADD}),
        lambda: HeadPatch((LAST,), {key: ADD}, {key: ADD > 0}),
    ):
        with pytest.raises(kv.InputError, match=r"add|outputs"):
            make()


def test_keys_that_are_numbers_of_another_sort_are_applied() -> None:
    want = effect(Edits(residual=ResidualPatch((LAST,), {1: ADD})))
    assert want > 0.1
    for key in (np.int64(1), torch.tensor(1)):
        assert effect(Edits(residual=ResidualPatch((LAST,), {key: ADD}))) == want


def test_generators_are_not_used_up_by_the_check() -> None:
    write = WritePatch("mlp", (LAST,), {1: ADD})
    assert effect(Edits(writes=(w for w in [write]))) == effect(Edits(writes=[write])) > 0.1
    cut = Cut(keys=(5,), layers=(0,), heads=(1,), queries=(LAST,))
    lazy = Cut(*(iter(v) for v in (cut.keys, cut.queries, cut.layers, cut.heads)))  # type: ignore[arg-type]
    assert effect(Edits(cuts=(c for c in [lazy]))) == effect(Edits(cuts=[cut])) > 1e-4
    rows = Edits(cuts=((c for c in [cut]),))
    assert effect(rows) == effect(Edits(cuts=[cut]))
    model = tiny("llama")
    head = engine.prefill(model, IDS[:CUT])
    sites = [kv.Site(p for p in (1, 2)), kv.Site(())]
    lazy_sweep = engine.sweep(model, head, head, iter(sites), IDS[CUT:], iter((1, 2)))  # type: ignore[arg-type]
    assert lazy_sweep.scores.shape == (2, 2)


def test_complex_and_int_tensors_are_refused() -> None:
    for bad in (ADD * 1j, ADD.numpy(), 3.0):
        with pytest.raises(kv.InputError, match="real numbers"):
            ResidualPatch((LAST,), {1: bad})  # type: ignore[dict-item]
    heads = HeadPatch((LAST,), {1: torch.zeros(1, 1, 4, 8)}, {1: torch.ones(1, 1, 4)})
    with pytest.raises(kv.InputError, match="give True"):
        effect(Edits(heads=heads))


def test_one_edit_in_place_of_a_list_and_mixed_lists_are_refused() -> None:
    with pytest.raises(kv.InputError, match="one Cut"):
        Edits(cuts=Cut(keys=(2,)))  # type: ignore[arg-type]
    with pytest.raises(kv.InputError, match="one WritePatch"):
        Edits(writes=WritePatch("mlp", (LAST,), {0: ADD}))  # type: ignore[arg-type]
    with pytest.raises(kv.InputError, match="mixes"):
        Edits(cuts=[Cut(keys=(2,)), [Cut(keys=(2,))]])  # type: ignore[list-item]


def test_a_key_that_none_of_its_queries_sees_is_refused() -> None:
    with pytest.raises(kv.InputError, match="key 13"):
        effect(Edits(cuts=[Cut(keys=(13, 5), queries=(12,))]))


def test_masks_fractions_and_texts_are_no_places() -> None:
    model = tiny("llama")
    cache = engine.prefill(model, IDS[:CUT])
    for make in (
        lambda: kv.Site(MASK),  # type: ignore[arg-type]
        lambda: kv.Site("12"),  # type: ignore[arg-type]
        lambda: kv.Site((1.9,)),  # type: ignore[arg-type]
        lambda: kv.Site((1,), layers=(True,)),
        lambda: cache.take(MASK),
        lambda: cache.take([1.7, 2.2]),  # type: ignore[list-item]
        lambda: cache.moved(1.5),  # type: ignore[arg-type]
        lambda: engine.prefill(model, [1.9, 2.7]),  # type: ignore[list-item]
        lambda: engine.prefill(model, MASK),
        lambda: engine.prefill(model, "12"),
        lambda: engine.prefill(model, [4, 5], positions=[0.5, 1.9]),  # type: ignore[list-item]
        lambda: engine.decide(model, cache, IDS[CUT:], [1.9, 2.2]),  # type: ignore[list-item]
        lambda: engine.recompute(model, cache, MASK),
        lambda: engine.capture(model, cache, IDS[CUT:], slots=(9.5,)),  # type: ignore[arg-type]
        lambda: Cut(keys=MASK),  # type: ignore[arg-type]
    ):
        with pytest.raises(kv.InputError, match=r"whole numbers|no index|mask"):
            make()


def test_a_patch_of_no_heads_is_the_base_and_a_tail_has_one_row() -> None:
    model = tiny("llama")
    base, donor = engine.prefill(model, IDS[:CUT]), engine.prefill(model, list(reversed(IDS))[:CUT])
    nothing = kv.Site((1, 2), kv_heads=())
    assert base.patched(nothing, donor) == base
    for path in ("plain", "shared"):
        got = engine.sweep(model, base, donor, [nothing, kv.Site(())], IDS[CUT:], (1, 2), path=path)  # type: ignore[arg-type]
        torch.testing.assert_close(got.scores[0], got.scores[1], rtol=0, atol=1e-9)
        with pytest.raises(kv.InputError, match="tail has 2 rows"):
            engine.sweep(model, base, donor, [nothing], [IDS[CUT:], IDS[CUT:]], (1, 2), path=path)  # type: ignore[arg-type]


def test_decoding_beyond_the_positions_is_refused_before_a_token_is_lost() -> None:
    model = tiny("llama")
    cache = engine.prefill(model, [5] * 505)
    assert len(engine.decode(model, cache, [5], max_new_tokens=7, stop=()).token_ids) == 7
    with pytest.raises(kv.InputError, match="max_new_tokens=8"):
        engine.decode(model, cache, [5], max_new_tokens=8, stop=())
    for temperature in (math.nan, -1.0, math.inf):
        with pytest.raises(kv.InputError, match="temperature"):
            engine.decode(model, cache, [5], max_new_tokens=2, temperature=temperature)


# --- a live model that is changed after it was loaded ----------------------------------------------------------------


def half_the_scaling(hf: Any) -> None:
    hf.model.layers[1].self_attn.scaling *= 3


def the_soft_cap(hf: Any) -> None:
    hf.config.final_logit_softcapping = 0.1


def an_epsilon(hf: Any) -> None:
    hf.model.layers[0].input_layernorm.variance_epsilon = 1.0


def the_rotary_scale(hf: Any) -> None:
    hf.model.rotary_emb.attention_scaling = 2.0


def a_forward(hf: Any) -> None:
    mlp = hf.model.layers[1].mlp
    own = mlp.forward
    mlp.forward = lambda x: 2 * own(x)


@pytest.mark.parametrize("change", [half_the_scaling, the_soft_cap, an_epsilon, the_rotary_scale, a_forward])
def test_a_setting_changed_after_load_is_another_model(change: Any) -> None:
    model = kv.load(build("llama", dtype=torch.float32, exact=False))
    before, cache = model.model_id, engine.prefill(model, IDS[:CUT])
    old = engine.decide(model, cache, IDS[CUT:])
    change(model.hf)
    assert model.model_id != before
    with pytest.raises(kv.InputError, match="was written by"):
        engine.decide(model, cache, IDS[CUT:])
    new = engine.decide(model, engine.prefill(model, IDS[:CUT]), IDS[CUT:])
    assert (new - old).abs().max() > 1e-3, "the control: it matters"


def test_a_geometry_that_changed_stays_refused() -> None:
    """Also when the cell is run again."""
    model = kv.load(build("llama", dtype=torch.float32, exact=False))
    model.hf.model.rotary_emb.inv_freq.mul_(2)
    for _ in range(3):
        with pytest.raises(kv.UnsupportedError, match="load it again"):
            engine.prefill(model, IDS)
    model = kv.load(build("llama", dtype=torch.float32, exact=False))
    model.hf.model.layers = model.hf.model.layers[:2]
    for _ in range(2):
        with pytest.raises(kv.UnsupportedError, match=r"2 layers instead of 3|layer 2 holds nothing"):
            engine.prefill(model, IDS)


def test_layers_out_of_order_are_refused() -> None:
    hf = build("llama", dtype=torch.float32, exact=False)
    layers = hf.model.layers
    hf.model.layers = torch.nn.ModuleList([layers[1], layers[0], layers[2]])
    with pytest.raises(kv.UnsupportedError, match="place 0 calls itself layer 1"):
        kv.load(hf)
    hf.model.layers = torch.nn.ModuleList([layers[0], layers[0], layers[2]])
    with pytest.raises(kv.UnsupportedError, match="place 1 calls itself layer 0"):
        kv.load(hf)


def test_an_unembedding_with_an_adapter_or_a_hook_is_asked_itself() -> None:
    import peft

    hf = build("llama", dtype=torch.float32, exact=False)
    hf.add_adapter(peft.LoraConfig(r=2, target_modules=["lm_head", "q_proj", "o_proj"], init_lora_weights=False))
    model = kv.load(hf)
    with torch.no_grad():
        want = hf(input_ids=torch.tensor([IDS])).logits[0, -1]
    cache = engine.prefill(model, IDS[:CUT])
    torch.testing.assert_close(engine.decide(model, cache, IDS[CUT:])[0], want, rtol=0, atol=1e-4)
    with torch.no_grad():
        plain = compat.final_norm(hf)(torch.zeros(1, 32)) @ hf.lm_head.base_layer.weight.T
    assert plain.shape == (1, 97)
    some = engine.decide(model, cache, IDS[CUT:], (5, 17))[0]
    torch.testing.assert_close(some, want[[5, 17]], rtol=0, atol=1e-4)

    hf = build("llama", dtype=torch.float32, exact=False)
    model = kv.load(hf)
    cache = engine.prefill(model, IDS[:CUT])
    before = engine.decide(model, cache, IDS[CUT:])
    hf.lm_head.register_forward_hook(lambda _m, _a, out: out * 2)
    torch.testing.assert_close(engine.decide(model, cache, IDS[CUT:]), before * 2, rtol=0, atol=1e-4)


def test_a_patched_class_and_a_global_hook_are_in_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvnotes_interp.probes.request import request_of

    model = tiny("llama")
    before = request_of("local_patching", model, [], {})
    handle = torch.nn.modules.module.register_module_forward_hook(lambda _m, _a, out: None)
    during = request_of("local_patching", model, [], {})
    handle.remove()
    assert during["hooks"] != before["hooks"]
    kind = type(model.hf.model.layers[0].mlp)
    own = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: 2 * own(self, x))
    assert request_of("local_patching", model, [], {})["hooks"] != before["hooks"]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("min_gap", math.nan),
        ("min_gap", -1),
        ("min_gap_noise", math.nan),
        ("seed", None),
        ("seed", 1.5),
        ("seed", -1),
        ("memory_budget", math.nan),
    ],
)
def test_options_of_a_probe_that_are_no_numbers_are_refused(option: str, value: Any) -> None:
    model = kv.load("organism:notes")
    with pytest.raises(kv.InputError, match=option):
        kv.probes.local_patching(model, kv.tasks.load("signal", n=1), progress=False, **{option: value})


def test_options_that_are_generators_are_the_same_as_tuples() -> None:
    model, pairs = kv.load("organism:notes"), kv.tasks.load("signal", n=2)
    options = {"parts": ("kv", "k"), "views": ("layer", "random")}
    want = kv.probes.local_patching(model, pairs, progress=False, **options)
    lazy = {name: iter(value) for name, value in options.items()}
    got = kv.probes.local_patching(model, pairs, progress=False, **lazy)
    assert got.frame.equals(want.frame)
    assert got.manifest["request"] == want.manifest["request"]
