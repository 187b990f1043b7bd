"""NaN and infinity, empty stretches, an observation twice, the attention sink, positions that a model never had."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import kvnotes_interp as kv
from kvnotes_interp import engine, probes
from kvnotes_interp.engine import Cut, Edits, ResidualPatch
from kvnotes_interp.errors import NotFiniteError
from kvnotes_interp.metrics import Competence
from kvnotes_interp.probes import request
from kvnotes_interp.tasks import Pair, Piece
from tests.architectures import build
from tests.tiny import tiny, tiny_with_tokenizer
from tests.tiny_tokenizer import train

IDS = [7, 31, 12, 55, 8, 60, 3, 44, 19, 71, 25, 66, 13, 9]
CUT, LAST = 9, len(IDS) - 1
GAPS = {"min_gap": 0, "min_gap_noise": 0, "progress": False}


# --- NaN and infinity ------------------------------------------------------------------------------------------------


def spoiled(layer: int, value: float = math.nan) -> kv.Model:
    """A model whose MLP of this layer writes NaN."""
    model = kv.load(build("llama", dtype=torch.float32, exact=False))
    model.hf.model.layers[layer].mlp.down_proj.weight.data[0, 0] = value
    return model


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_every_way_to_logits_refuses_nan_and_names_the_layer(layer: int, value: float) -> None:
    model = spoiled(layer, value)
    with pytest.raises(NotFiniteError, match=f"layer {layer}"):
        engine.prefill(model, IDS[:CUT])
    weight = model.hf.model.layers[layer].mlp.down_proj.weight
    weight.data[0, 0] = 0.5
    cache = dataclasses.replace(engine.prefill(model, IDS[:CUT]), model_id="")
    weight.data[0, 0] = value
    cache = dataclasses.replace(cache, model_id=model.model_id)  # whole, and read by the spoiled model
    named = rf"final hidden states are not finite in float32, first in layer {layer}\."
    for call in (
        lambda: engine.decide(model, cache, IDS[CUT:]),
        lambda: engine.decide(model, cache, IDS[CUT:], (1, 2)),
        lambda: engine.decode(model, cache, IDS[CUT:], max_new_tokens=3),
        lambda: engine.noise_floor(model, cache, IDS[CUT:], (1, 2)),
        lambda: engine.sweep(model, cache, cache, [kv.Site(())], IDS[CUT:], (1, 2), path="plain"),
        lambda: engine.sweep(model, cache, cache, [kv.Site(()), kv.Site((2,))], IDS[CUT:], (1, 2)),
        lambda: engine.answer_logits(model, engine.capture(model, cache, IDS[CUT:], want=()), (1, 2)),
    ):
        with pytest.raises(NotFiniteError, match=named) as error:
            call()
        assert error.value.reason == f"not finite in layer {layer} (float32)"
        assert "dtype='float32'" not in str(error.value)
        assert "Load it in float32" not in str(error.value)


def test_records_that_are_not_finite_are_refused() -> None:
    model = spoiled(1)
    for want in ("residual", "mlp", "heads", "patterns", "queries"):
        with pytest.raises(NotFiniteError, match=r"layer 1"):
            engine.capture(model, None, IDS, want=(want,))
    clean = tiny("llama")
    cache = engine.prefill(clean, IDS[:CUT])
    keys = list(cache.keys)
    keys[2] = keys[2] * math.nan
    with pytest.raises(NotFiniteError, match=r"attention rows.*layer 2"):
        engine.attention_rows(clean, dataclasses.replace(cache, keys=tuple(keys)), IDS[CUT:])


def test_a_cache_and_an_edit_that_are_not_finite_name_the_layer() -> None:
    model = tiny("llama")
    cache = engine.prefill(model, IDS[:CUT])
    values = list(cache.values)
    values[1] = values[1].clone()
    values[1][:, :, 4] = math.nan
    broken = dataclasses.replace(cache, values=tuple(values))
    with pytest.raises(NotFiniteError, match=r"first in layer 1\."):
        engine.decide(model, broken, IDS[CUT:])
    with pytest.raises(NotFiniteError, match=r"layer 1"):
        engine.sweep(model, cache, broken, [kv.Site((3,)), kv.Site((4,))], IDS[CUT:], (1, 2))
    add = ResidualPatch((LAST,), {2: torch.full((1, 1, model.shape.d_model), math.inf)})
    with pytest.raises(NotFiniteError):
        engine.answer_logits(model, engine.capture(model, cache, IDS[CUT:], want=(), edits=Edits(residual=add)), (1, 2))
    with pytest.raises(kv.InputError, match="without any key"):
        engine.capture(model, cache, IDS[CUT:], edits=Edits(cuts=[Cut(keys=tuple(range(len(IDS))), queries=(LAST,))]))


def test_an_overflow_in_float16_says_which_dtype_to_load() -> None:
    model = kv.load(build("llama", dtype=torch.float16, exact=False), check=False)
    model.hf.model.layers[1].mlp.down_proj.weight.data[:] = 6e4
    with pytest.raises(NotFiniteError, match=r"float16.*bfloat16 or float32"):
        engine.prefill(model, IDS[:CUT])


def test_a_score_that_is_not_a_number_is_not_competent() -> None:
    ok = {"old": -1.0, "new": 2.0, "noise": 0.0}
    assert Competence().reason(**ok) == ""
    for side in ("old", "new"):
        for value in (math.nan, math.inf, -math.inf):
            assert Competence().reason(**{**ok, side: value}) == "not finite score"


# --- pairs -----------------------------------------------------------------------------------------------------------


def piece(text: str, region: Any, anchor: str) -> Piece:
    return Piece(text, region, anchor)


def pair(before: str, old: str, new: str, behind: str, end: str, key: str = "k") -> Pair:
    def side(value: str) -> tuple[Piece, ...]:
        pieces = (piece(before, "context", "a"), piece(value, "field", "f"), piece(behind, "context", "b"))
        return tuple(p for p in (*pieces, piece(end, "decision", "d")) if p.text)

    return Pair("mine", "derived", key, key, "test", side(old), side(new), " he", " she", False)


GOOD = pair("Once", " John", " Mary", " went to the market.", " Then", "good")
SINK = pair("", "John", "Mary", " went to the market.", " Then", "sink")
BARE = pair("Once", " John", " Mary", "", " Then", "bare")
SHORT = pair("", "John", "Mary", "", " Then", "short")
PAIRS = (GOOD, SINK, BARE, SHORT)


@pytest.fixture(scope="module")
def model() -> kv.Model:
    texts = [text for p in PAIRS for text in (p.text_old + " he", p.text_new + " she")] * 8
    return tiny_with_tokenizer("llama", train([*texts, " John Mary John Mary"], vocab=600), seed=3)


PROBES = {
    "local_patching": {"views": ()},
    "suffix_concentration": {},
    "linear_decodability": {},
    "circuit_ablation": {},
    "edit_frontier": {},
    "compaction_survival": {"compactors": ("snapkv",), "ratios": (2,)},
    "edit_in_splice": {},
    "attention_deviation": {},
}


@pytest.mark.parametrize("probe", PROBES)
def test_degenerate_pairs_are_excluded_with_the_reason(probe: str, model: kv.Model) -> None:
    result = getattr(probes, probe)(model, list(PAIRS), **PROBES[probe], **GAPS)
    reasons = dict(zip(result.pairs["pair"], result.pairs["reason"], strict=True))
    assert len(reasons) == len(PAIRS)
    if probe in ("edit_in_splice", "attention_deviation"):
        return  # they cut a prompt into blocks, and put text in front
    assert reasons["sink"] == reasons["short"] == request.AT_SINK
    assert reasons["bare"] == request.NOTHING_BETWEEN
    assert reasons["good"] not in (request.AT_SINK, request.NOTHING_BETWEEN)
    assert "slot 0" in str(result.summary())


@pytest.mark.parametrize("probe", PROBES)
def test_only_a_two_token_prompt_is_no_traceback(probe: str, model: kv.Model) -> None:
    ids = model.tokenizer(SHORT.text_old)["input_ids"]
    assert len(ids) == 2
    result = getattr(probes, probe)(model, [SHORT], **PROBES[probe], **GAPS)
    assert not result.pairs["competent"].any()


@pytest.mark.parametrize("probe", PROBES)
def test_a_generator_and_a_single_pair_will_do_and_the_same_pair_twice_will_not(probe: str, model: kv.Model) -> None:
    call = getattr(probes, probe)
    options = {**PROBES[probe], **GAPS}
    lists = [call(model, given, **options) for given in ([GOOD], (p for p in [GOOD]), GOOD)]
    assert [len(r.pairs) for r in lists] == [1, 1, 1]
    with pytest.raises(kv.InputError, match=r"'good'.*given twice"):
        call(model, [GOOD, SINK, GOOD], **options)
    with pytest.raises(kv.InputError, match="no pairs"):
        call(model, [], **options)
    with pytest.raises(kv.InputError, match="no pairs"):
        call(model, iter(()), **options)


def test_the_same_prompts_under_another_key_are_one_observation(model: kv.Model) -> None:
    twin = dataclasses.replace(GOOD, key="twin", content="another")
    with pytest.raises(kv.InputError, match=r"'good' and 'twin' are the same prompts"):
        probes.local_patching(model, [GOOD, twin], views=(), **GAPS)


def test_questions_given_twice_are_refused_and_a_generator_will_do() -> None:
    model = kv.load("organism:trained")
    questions = kv.tasks.documents.load("biography", n=2, documents=2, seed=0)
    options: dict[str, Any] = {"timing": 0, "progress": False}
    for probe, more in (
        ("splice_quality", {"operators": ("splice",), "documents": (2,), "seam_repair": (1,)}),
        ("compaction_quality", {"compactors": ("streaming",), "ratios": (2,)}),
    ):
        call = getattr(probes, probe)
        assert len(call(model, iter(questions), **more, **options).pairs) == 2
        with pytest.raises(kv.InputError, match="given twice"):
            call(model, [*questions, questions[0]], **more, **options)


def test_a_pair_that_gives_nan_is_excluded_with_the_layer_and_the_others_count(model: kv.Model) -> None:
    """A hook spoils one prompt only: its pair is excluded, and the run goes on."""
    other = pair("Once", " John", " Mary", " went to the market. The", " Then", "other")
    ids = model.tokenizer(other.text_old)["input_ids"]

    def spoil(_m: Any, _args: Any, output: Tensor) -> Tensor:
        return output * math.nan if output.shape[1] == len(ids) - 1 else output

    handle = model.hf.model.layers[1].mlp.register_forward_hook(spoil)
    try:
        result = probes.local_patching(model, [GOOD, other], views=(), **GAPS)
    finally:
        handle.remove()
    reasons = dict(zip(result.pairs["pair"], result.pairs["reason"], strict=True))
    assert reasons["other"].startswith("not finite in layer 1")
    assert not reasons["good"].startswith("not finite")
    assert not result.pairs.set_index("pair")["competent"]["other"]


def test_positions_beyond_the_models_are_refused_and_such_pairs_excluded(model: kv.Model) -> None:
    small = tiny("llama")
    assert small.n_positions == 512
    ids = torch.randint(3, 90, (513,)).tolist()
    for call in (
        lambda: engine.prefill(small, ids),
        lambda: engine.prefill(small, [5, 6], positions=(3, 512)),
        lambda: engine.extend(small, engine.prefill(small, ids[:510]), ids[510:]),
        lambda: engine.capture(small, None, ids),
        lambda: engine.attention_rows(small, engine.prefill(small, ids[:510]), ids[510:]),
    ):
        with pytest.raises(kv.InputError, match="512 positions"):
            call()
    engine.prefill(small, ids[:512])
    long = pair("Once", " John", " Mary", " went to the market." * 200, " Then", "long")
    result = probes.local_patching(model, [GOOD, long], views=(), **GAPS)
    assert result.pairs.set_index("pair")["reason"]["long"] == request.TOO_LONG


def test_a_sweep_compares_with_the_models_device_and_dtype() -> None:
    model = tiny("llama")
    cache = engine.prefill(model, IDS[:CUT])
    elsewhere = cache.to(device="meta")
    with pytest.raises(kv.InputError, match=r"base is .* on meta in layer 0, the model .* on cpu"):
        engine.sweep(model, elsewhere, elsewhere, [kv.Site(())], IDS[CUT:], (1, 2))
    half = cache.to(dtype=torch.float32)
    with pytest.raises(kv.InputError, match=r"base is torch\.float32"):
        engine.sweep(model, half, half, [kv.Site(())], IDS[CUT:], (1, 2))


def test_a_ranking_that_nothing_can_make_has_no_rows() -> None:
    """`profiled` needs another pair; alone it was the field's recompute under another name."""
    model = kv.load("organism:notes")
    alone = probes.edit_frontier(
        model, kv.tasks.load("signal", n=1, seed=0), rankings=("profiled",), ks=(2,), shares=(), progress=False
    )
    assert "recompute_top_2_profiled" not in alone.summary().to_dict()
    several = probes.edit_frontier(
        model, kv.tasks.load("signal", n=4, seed=0), rankings=("profiled",), ks=(2,), shares=(), progress=False
    )
    assert "recompute_top_2_profiled" in several.summary().to_dict()
