"""Compaction in several passes: against transformers' own cache read part by part, and against loops by hand."""

from __future__ import annotations

import math
from itertools import pairwise
from random import Random
from typing import Any

import pandas as pd
import pytest
import torch
from transformers import DynamicCache

from kvnotes_interp import engine
from kvnotes_interp.errors import ControlError, InputError
from kvnotes_interp.model import Model
from kvnotes_interp.operators import eviction
from kvnotes_interp.operators.blocks import Blocks, cut_texts
from kvnotes_interp.operators.still.stream import parts_of
from kvnotes_interp.plots import compaction_passes, compaction_ratio
from kvnotes_interp.probes import compaction_quality
from kvnotes_interp.probes.compaction.points import Compacting, Point, points_of
from kvnotes_interp.results import Result
from kvnotes_interp.tasks import documents
from kvnotes_interp.tasks.documents import Question
from tests.reference import KV, answer_with_cache
from tests.tiny import tiny_with_tokenizer
from tests.tiny_tokenizer import train

FAST: dict[str, Any] = {"compactors": ("streaming", "snapkv"), "max_new_tokens": 1, "timing": 0, "progress": False}


@pytest.fixture(scope="module")
def questions() -> list[Question]:
    return documents.load("biography", n=2, seed=0, documents=3, facts=2)


@pytest.fixture(scope="module")
def tokenizer(questions: list[Question]) -> Any:
    drawn = documents.load("biography", n=60, seed=1, documents=4)
    return train([q.text + q.answer for q in [*drawn, *questions]], vocab=900)


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> Model:
    return tiny_with_tokenizer("llama3", tokenizer, seed=2)


@pytest.fixture(scope="module")
def result(model: Model, questions: list[Question]) -> Result:
    return compaction_quality(model, questions, **FAST, ratios=(2, 4), passes=(1, 2, 4))


def blocks_of(model: Model, question: Question) -> Blocks:
    return cut_texts(model.tokenizer, question.prefix, question.documents, question.suffix).blocks


def value(result: Result, pair: str, site: str, readout: str) -> float:
    frame = result.frame
    got = frame[(frame["pair"] == pair) & (frame["site"] == site) & (frame["readout"] == readout)]["value"]
    assert len(got) == 1, (pair, site, readout)
    return float(got.iloc[0])


def cuts_of(blocks: Blocks, passes: int) -> list[int]:
    """Three documents: two parts are cut behind the first or the second of them, four by tokens."""
    n = blocks.n_context
    if passes == 2:
        return [0, min((stop for _, stop in blocks.spans[:-1]), key=lambda end: abs(end - n / 2)), n]
    return [math.ceil(i * n / passes - 0.5) for i in range(passes + 1)]


@torch.no_grad()
def read_on(hf: Any, held: list[KV], ids: tuple[int, ...], start: int) -> list[KV]:
    """Transformers' cache after these tokens on top of what is held, at their own positions."""
    cache = DynamicCache()
    for layer, (key, val) in enumerate(held):
        cache.update(key.clone(), val.clone(), layer)
    positions = torch.arange(start, start + len(ids))[None]
    hf(input_ids=torch.tensor([ids]), position_ids=positions, past_key_values=cache, use_cache=True)
    return [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]


@pytest.mark.parametrize("name", ["llama3", "qwen3", "olmo2"])
def test_sinks_and_recent_slots_part_by_part_are_those_of_transformers(
    name: str, tokenizer: Any, questions: list[Question]
) -> None:
    model = tiny_with_tokenizer(name, tokenizer, seed=2)
    options = {**FAST, "compactors": ("streaming",), "ratios": (2, 4), "passes": (2, 4)}
    result = compaction_quality(model, questions[:1], **options)
    question = questions[0]
    blocks = blocks_of(model, question)
    n, tail = blocks.n_context, torch.tensor([blocks.suffix])
    seen = torch.arange(n, n + tail.shape[1])
    full = answer_with_cache(model.hf, read_on(model.hf, [], blocks.context, 0), tail, seen)[0, -1].double()
    for ratio in (2, 4):
        budget, once = -(-n // ratio), -1.0
        for passes in (2, 4):
            held: list[KV] = []
            for start, stop in pairwise(cuts_of(blocks, passes)):
                grown = read_on(model.hf, held, blocks.context[start:stop], start)
                m = grown[0][0].shape[2]
                keep = [*range(m)] if m <= budget else [*range(4), *range(m - budget + 4, m)]
                held = [(k[:, :, keep], v[:, :, keep]) for k, v in grown]
            logits = answer_with_cache(model.hf, held, tail, seen)[0, -1].double()
            p, q = full.softmax(-1), logits.softmax(-1)
            want, site = float((p * (p / q).log()).sum()), f"streaming_{ratio}x_{passes}p"
            assert value(result, question.key, site, "kl") == pytest.approx(want, abs=1e-6)
            assert value(result, question.key, site, "slots") == budget
            assert abs(want - once) > 1e-6  # the control: passes are told apart
            once = want


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama3", "granite"])
@pytest.mark.parametrize("compactor", ["snapkv", "h2o", "attention_matching", "random@4"])
def test_a_part_is_observed_and_every_pass_draws_anew(
    name: str, compactor: str, tokenizer: Any, questions: list[Question]
) -> None:
    """The loop by hand: prefill, compact, extend, compact ..., the compactor called with its own options."""
    model = tiny_with_tokenizer(name, tokenizer, seed=1)
    blocks, one = blocks_of(model, questions[0]), eviction.find(compactor)
    point = Point(one, 4.0, 4)
    got = Compacting(model, "keep", 7).in_parts(point, blocks, key="k")
    budget, cuts = -(-blocks.n_context // 4), cuts_of(blocks, 4)
    held: Any = None
    observed, peak = 0, 0
    for number, (start, stop) in enumerate(pairwise(cuts)):
        ids = list(blocks.context[start:stop])
        grown = engine.prefill(model, ids) if held is None else engine.extend(model, held, ids)[0]
        options: dict[str, Any] = {}
        if compactor == "random@4":
            options["seed"] = Random("compaction|7|k" + (f"|{number}" if number else "")).getrandbits(31)
        elif number:
            options["observe"] = ids
        made = one(model, grown, budget=budget, **options)
        held, observed, peak = made.cache, observed + made.layer_tokens, max(peak, grown.nbytes)
    assert (got.layer_tokens, got.peak, got.passes) == (observed, peak, 4)
    assert got.cache.end == held.end == blocks.n_context
    for a, b in zip(got.cache.keys + got.cache.values, held.keys + held.values, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(got.cache.sources, held.sources, strict=True):
        assert torch.equal(a, b)
    other = Compacting(model, "keep", 7).in_parts(Point(one, 4.0, 2), blocks, key="k").cache
    assert any(not torch.equal(a, b) for a, b in zip(other.values, held.values, strict=True))


def test_the_question_is_observed_in_every_pass_where_it_is_shown(model: Model, questions: list[Question]) -> None:
    options = {**FAST, "compactors": ("snapkv",), "ratios": (4,), "passes": (4,)}
    aware = compaction_quality(model, questions[:1], **options, query_aware=True)
    blocks = blocks_of(model, questions[0])
    want = 3 * len(blocks.suffix) / blocks.n_context  # the first part fits into the budget: nothing is chosen
    assert len(parts_of(blocks, 4)[0]) <= -(-blocks.n_context // 4)
    assert value(aware, questions[0].key, "snapkv_4x_4p", "observed") == pytest.approx(want)


# --- sizes, names, requests ----------------------------------------------------------------------------------------


def test_arms_of_a_ratio_end_with_the_same_bytes(model: Model, questions: list[Question], result: Result) -> None:
    frame = result.frame
    arms = {"full", "no_context", *(p.name for p in points_of(FAST["compactors"], (2, 4), (1, 2, 4)))}
    assert {"snapkv_4x", "snapkv_4x_2p", "random@4_2x_4p"} <= arms
    assert set(frame.loc[frame["view"] == "compaction", "site"]) == arms
    bytes_of_slot = engine.prefill(model, [1]).nbytes
    for question in questions:
        blocks = blocks_of(model, question)
        full = value(result, question.key, "full", "bytes")
        for ratio in (2, 4):
            budget = -(-blocks.n_context // ratio)
            for passes in (1, 2, 4):
                site = f"streaming_{ratio}x" + (f"_{passes}p" if passes > 1 else "")
                rows = frame[(frame["site"] == site) & (frame["pair"] == question.key)]
                assert set(rows["passes"]) == {passes}
                assert set(rows["ratio"]) == {ratio}
                assert value(result, question.key, site, "bytes") == budget * bytes_of_slot
                held, largest = 0, 0  # what fits is left as it is
                for a, b in pairwise([0, blocks.n_context] if passes == 1 else cuts_of(blocks, passes)):
                    largest, held = max(largest, held + b - a), min(budget, held + b - a)
                assert value(result, question.key, site, "peak") == largest * bytes_of_slot
                share = value(result, question.key, site, "peak_share")
                assert share == pytest.approx(largest * bytes_of_slot / full)
    assert {"exact_match_snapkv_4x_2p", "peak_share_snapkv_4x_4p"} <= set(result.summary().to_dict())


def test_one_pass_is_what_it_was(model: Model, questions: list[Question], result: Result) -> None:
    plain = compaction_quality(model, questions, **FAST, ratios=(2, 4))
    assert "passes" not in plain.frame
    assert not plain.frame["readout"].isin(("peak", "peak_share")).any()
    options = plain.manifest["request"]["options"]
    assert not {"passes", "iterative", "chunk", "budget"} & set(options)
    assert options["ratios"] == [2.0, 4.0]
    assert result.manifest["request"]["options"]["passes"] == [1, 2, 4]
    columns = [c for c in plain.frame if c != "passes"]
    known = plain.frame[plain.frame["view"] != "control"].reset_index(drop=True)
    same = result.frame[result.frame["site"].isin(set(known["site"])) & ~result.frame["view"].eq("control")]
    same = same[~same["readout"].isin(("peak", "peak_share"))].reset_index(drop=True)
    pd.testing.assert_frame_equal(same[columns], known[columns])


def test_an_absolute_size_has_a_flat_peak(model: Model, questions: list[Question]) -> None:
    got = compaction_quality(model, questions, **{**FAST, "timing": 1}, iterative=True, chunk=10, budget=12)
    slot = engine.prefill(model, [1]).nbytes
    for question in questions:
        n = blocks_of(model, question).n_context
        rows = got.frame[(got.frame["pair"] == question.key) & (got.frame["site"] == "snapkv_12slots")]
        assert set(rows["passes"]) == {-(-n // 10)}
        assert set(rows["ratio"]) == {n / 12}
        assert value(got, question.key, "snapkv_12slots", "bytes") == 12 * slot
        assert value(got, question.key, "snapkv_12slots", "peak") == 22 * slot
        assert value(got, question.key, "snapkv_12slots", "seconds") > 0
    options = got.manifest["request"]["options"]
    assert {k: options[k] for k in ("iterative", "chunk", "budget")} == {"iterative": True, "chunk": 10, "budget": 12}
    assert "ratios" not in options
    whole = compaction_quality(model, questions[:1], **FAST, iterative=True, budget=20)  # one chunk of 512: all of it
    n = blocks_of(model, questions[0]).n_context
    once = compaction_quality(model, questions[:1], **FAST, ratios=(n / 20,))
    (site,) = {s for s in once.frame["site"] if s.startswith("snapkv")}
    assert value(whole, questions[0].key, "snapkv_20slots", "kl") == value(once, questions[0].key, site, "kl")


def test_layers_that_slide_are_whole_from_the_first_pass_on(tokenizer: Any, questions: list[Question]) -> None:
    """A window of 7: early parts are shorter than it, and would be compacted if each pass looked at itself alone."""
    model = tiny_with_tokenizer("gemma2", tokenizer, seed=1)
    options = {**FAST, "compactors": ("streaming", "h2o"), "ratios": (4,), "passes": (1, 10)}
    got = compaction_quality(model, questions[:1], **options)
    key = questions[0].key
    for compactor in ("streaming", "h2o"):
        sizes = {value(got, key, f"{compactor}_4x{end}", "bytes") for end in ("", "_10p")}
        assert len(sizes) == 1
    assert value(got, key, "streaming_4x", "slots") > -(-blocks_of(model, questions[0]).n_context // 4)


# --- controls and refusals -----------------------------------------------------------------------------------------


def test_a_slot_lost_between_parts_fails(
    model: Model, questions: list[Question], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only where the context is read in parts, and only at ratio 1: the control of one pass does not see it."""
    from kvnotes_interp.probes.compaction import points

    real = points.Compacting.to_budget

    def loses(self: Any, compactor: Any, cache: Any, budget: Any, *, key: str, observe: Any = None) -> Any:
        made = real(self, compactor, cache, budget, key=key, observe=observe)
        if "|" not in key or budget < made.cache.slots[0]:
            return made
        keep = torch.arange(1, made.cache.slots[0]).expand(cache.n_kv_heads, -1)
        return eviction.Compacted(made.cache.kept([keep] * cache.n_layers))

    monkeypatch.setattr(points.Compacting, "to_budget", loses)
    with pytest.raises(ControlError, match=r"'ratio_1_in_parts' failed.*all slots in 4 passes"):
        compaction_quality(model, questions[:1], **FAST, ratios=(2,), passes=(4,))
    compaction_quality(model, questions[:1], **FAST, ratios=(2,))


@pytest.mark.parametrize("name", ["llama3", "gemma3", "qwen3", "phi", "cohere2"])
def test_a_budget_of_all_slots_in_parts_is_the_full_cache(name: str, tokenizer: Any, questions: list[Question]) -> None:
    model = tiny_with_tokenizer(name, tokenizer, seed=1)
    names = ("random", "key_norm", "h2o", "snapkv", "attention_matching")
    sliding = "keep" if name != "gemma3" else "compact"
    options = {**FAST, "compactors": names, "ratios": (2,), "passes": (8,), "sliding": sliding}
    controls = {c.name: c for c in compaction_quality(model, questions[:1], **options).summary().controls}
    assert set(controls) == {"documents_matter", "full_twice", "ratio_1", "ratio_1_in_parts"}
    assert controls["ratio_1_in_parts"].value < 1e-9


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"passes": ()}, "passes=\\(\\)"),
        ({"passes": (0,)}, "each at least 1"),
        ({"passes": (1.5,)}, "whole numbers"),
        ({"passes": (4096,)}, "ask for fewer passes"),
        ({"iterative": True, "chunk": 0}, "chunk=0"),
        ({"iterative": True, "budget": 0}, "budget=0"),
        ({"iterative": True, "passes": (1, 2)}, "leave one out"),
        ({"chunk": 512}, "chunk is a size of iterative=True"),
        ({"budget": 64}, "budget is a size of iterative=True"),
    ],
)
def test_wrong_passes_are_refused(model: Model, questions: list[Question], options: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        compaction_quality(model, questions, **{**FAST, **options})


def test_parts_are_cut_between_documents_where_there_are_as_many() -> None:
    blocks = Blocks((0,) * 4, ((1,) * 2, (2,) * 10, (3,) * 3, (4,) * 5), (9,))
    assert [len(part) for part in parts_of(blocks, 1)] == [24]
    assert [len(part) for part in parts_of(blocks, 2)] == [16, 8]  # of 6, 16 and 19 the nearest to 12
    assert [len(part) for part in parts_of(blocks, 4)] == [6, 10, 3, 5]
    assert [len(part) for part in parts_of(blocks, 6)] == [4] * 6  # more parts than documents
    assert sum(parts_of(blocks, 3), ()) == blocks.context
    with pytest.raises(InputError, match="24 tokens cannot be compacted in 25 parts"):
        parts_of(blocks, 25)


# --- pictures ------------------------------------------------------------------------------------------------------


def test_the_plot_over_passes_shows_the_frames_numbers(result: Result, model: Model, questions: list[Question]) -> None:
    assert result.plots()[0] == "compaction_passes"
    fig = compaction_passes.draw(result, readout="kl")
    table = pd.DataFrame(fig.layout.meta["table"])  # type: ignore[index]
    summary = result.summary().to_dict()
    for passes, end in ((1, ""), (4, "_4p")):
        row = table[(table["site"] == f"snapkv_4x{end}") & (table["passes"] == passes)]
        assert row["mean"].item() == pytest.approx(summary[f"kl_snapkv_4x{end}"]["mean"])
        assert row["panel"].item() == "4x"
    lines = [trace for trace in fig.data if trace.name == "SnapKV"]
    assert [list(trace.customdata) for trace in lines] == [[1, 2, 4], [1, 2, 4]]
    assert len(compaction_passes.draw(result, ratios=(4,)).data) == len(fig.data) / 2
    with pytest.raises(InputError, match=r"ratios=\(3,\): this result holds 2, 4"):
        compaction_passes.draw(result, ratios=(3,))
    # The picture over ratios shows the arms of one pass alone.
    over = pd.DataFrame(compaction_ratio.draw(result, readout="kl").layout.meta["table"])  # type: ignore[index]
    assert set(over["site"]) == {"full", "no_context"} | {p.name for p in points_of(FAST["compactors"], (2, 4))}
    sized = compaction_quality(model, questions, **FAST, iterative=True, chunk=10, budget=12)
    fig = compaction_passes.draw(sized)
    assert {trace.name for trace in fig.data} == {"SnapKV", "StreamingLLM", "random slots (4)"}
    assert "12 slots" in {note.text for note in fig.layout.annotations}
    plain = compaction_quality(model, questions, **FAST, ratios=(2,))
    assert "compaction_passes" not in plain.plots()
