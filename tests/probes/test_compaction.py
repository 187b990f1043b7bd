"""Compaction quality: numbers against plain forwards on a mask, controls that can fail, resuming, pictures."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from kvnotes_interp.compact import CompactCache
from kvnotes_interp.errors import ControlError, InputError
from kvnotes_interp.model import Model
from kvnotes_interp.operators import eviction
from kvnotes_interp.operators.blocks import cut_texts
from kvnotes_interp.operators.still import new_still
from kvnotes_interp.plots import compaction_ratio, compaction_time
from kvnotes_interp.probes import compaction_quality
from kvnotes_interp.probes.compaction import measure
from kvnotes_interp.probes.compaction.points import Point, points_of
from kvnotes_interp.results import Result
from kvnotes_interp.tasks import documents
from kvnotes_interp.tasks.documents import Question
from tests.reference import answer_with_cache, full_cache, full_logits
from tests.tiny import tiny_with_tokenizer
from tests.tiny_tokenizer import train

FAST: dict[str, Any] = {
    "compactors": ("streaming", "snapkv"),
    "ratios": (2, 4),
    "max_new_tokens": 3,
    "timing": 0,
    "progress": False,
}
SMALL = {**FAST, "compactors": ("streaming",), "ratios": (2,), "max_new_tokens": 1}


@pytest.fixture(scope="module")
def questions() -> list[Question]:
    return documents.load("biography", n=3, seed=0, documents=3, facts=2)


@pytest.fixture(scope="module")
def tokenizer(questions: list[Question]) -> Any:
    drawn = documents.load("biography", n=60, seed=1, documents=4)
    return train([q.text + q.answer for q in [*drawn, *questions]], vocab=900)


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> Model:
    return tiny_with_tokenizer("llama3", tokenizer, seed=2)


@pytest.fixture(scope="module")
def result(model: Model, questions: list[Question]) -> Result:
    return compaction_quality(model, questions, **{**FAST, "timing": 2})


def value(result: Result, pair: str, site: str, readout: str) -> float:
    frame = result.frame
    got = frame[(frame["pair"] == pair) & (frame["site"] == site) & (frame["readout"] == readout)]["value"]
    assert len(got) == 1, (pair, site, readout)
    return float(got.iloc[0])


def blocks_of(model: Model, question: Question) -> Any:
    return cut_texts(model.tokenizer, question.prefix, question.documents, question.suffix, answer=question.answer)


# --- numbers -------------------------------------------------------------------------------------------------------


def test_sinks_and_recent_slots_answer_as_transformers_does_on_them(
    model: Model, questions: list[Question], result: Result
) -> None:
    """The kept keys and values cut out of transformers' own cache, the question run at its own positions."""
    for question in questions:
        cut = blocks_of(model, question)
        n, tail = cut.blocks.n_context, torch.tensor([cut.blocks.suffix])
        kv = full_cache(model.hf, torch.tensor([cut.blocks.context]), torch.arange(n))
        full = full_logits(model.hf, torch.tensor([cut.blocks.token_ids]))[0, -1].double()
        for ratio in (2, 4):
            budget = -(-n // ratio)
            keep = [*range(4), *range(n - budget + 4, n)]
            small: Any = [(k[:, :, keep], v[:, :, keep]) for k, v in kv]
            logits = answer_with_cache(model.hf, small, tail, torch.arange(n, n + tail.shape[1]))[0, -1].double()
            p, q = full.softmax(-1), logits.softmax(-1)
            site = f"streaming_{ratio}x"
            assert value(result, question.key, site, "kl") == pytest.approx(float((p * (p / q).log()).sum()), abs=1e-6)
            right = cut.answer[0]
            best = float(torch.cat((logits[:right], logits[right + 1 :])).max())
            assert value(result, question.key, site, "margin") == pytest.approx(float(logits[right]) - best, abs=1e-6)
            assert value(result, question.key, site, "slots") == budget
            assert value(result, question.key, site, "share") == pytest.approx(budget / n)
            assert value(result, question.key, site, "observed") == 0
        assert value(result, question.key, "full", "kl") == 0
        assert value(result, question.key, "full", "share") == 1


def test_no_context_is_the_prompt_without_documents(model: Model, questions: list[Question], result: Result) -> None:
    for question in questions:
        cut = blocks_of(model, question)
        logits = full_logits(model.hf, torch.tensor([[*cut.blocks.prefix, *cut.blocks.suffix]]))[0, -1]
        right = cut.answer[0]
        best = float(torch.cat((logits[:right], logits[right + 1 :])).max())
        assert value(result, question.key, "no_context", "margin") == pytest.approx(float(logits[right]) - best)


def test_a_document_within_the_budget_is_answered_from(model: Model) -> None:
    """Sinks and the supporting document, the last one, are kept: transformers on exactly these slots says the same."""
    question = documents.load("biography", n=1, seed=3, documents=3, facts=2)[0]
    gold = question.documents[question.gold[0]]
    rest = [d for i, d in enumerate(question.documents) if i not in question.gold]
    last = replace(question, documents=(*rest, gold), gold=(2,))
    cut = blocks_of(model, last)
    start, n = cut.blocks.spans[2][0], cut.blocks.n_context
    got = compaction_quality(model, [last], **{**SMALL, "ratios": (n / (n - start + 4),)})
    site = next(s for s in got.frame["site"].unique() if s.startswith("streaming"))
    assert value(got, last.key, site, "slots") == n - start + 4  # the sinks, and every token of the document
    assert set(got.frame["position"].dropna()) == {start}
    kv = full_cache(model.hf, torch.tensor([cut.blocks.context]), torch.arange(n))
    keep = [*range(4), *range(start, n)]
    small: Any = [(k[:, :, keep], v[:, :, keep]) for k, v in kv]
    tail = torch.tensor([cut.blocks.suffix])
    logits = answer_with_cache(model.hf, small, tail, torch.arange(n, n + tail.shape[1]))[0, -1]
    rows = got.frame[(got.frame["site"] == site) & (got.frame["readout"] == "exact_match")]
    assert rows["token"].iloc[0] == re.split(r"[.\n]", model.tokenizer.decode([int(logits.argmax())]))[0]
    best = float(torch.cat((logits[: cut.answer[0]], logits[cut.answer[0] + 1 :])).max())
    assert value(got, last.key, site, "margin") == pytest.approx(float(logits[cut.answer[0]]) - best, abs=1e-6)


def test_utilisation_is_the_share_of_what_documents_add(result: Result, model: Model) -> None:
    from kvnotes_interp.probes.compaction.summary import by_arm, utilisation

    rows = [
        {"site": site, "compactor": site, "readout": "token_f1", "pair": pair, "content": pair, "value": v, "view": "x"}
        for site, values in (("full", (1.0, 0.8)), ("no_context", (0.2, 0.0)), ("a_2x", (0.6, 0.5)))
        for pair, v in zip("pq", values, strict=True)
    ]
    found = utilisation(by_arm(pd.DataFrame(rows)), "a_2x", seed=0)
    assert found.mean == pytest.approx((0.4 + 0.5) / (0.8 + 0.8))
    summary = result.summary().to_dict()
    assert {"f1_full", "f1_no_context", "f1_snapkv_4x", "kl_random@4_2x", "share_streaming_4x"} <= set(summary)


def test_query_aware_observes_the_question_and_says_so(model: Model, questions: list[Question]) -> None:
    aware = compaction_quality(model, questions[:1], **FAST, query_aware=True)
    blind = compaction_quality(model, questions[:1], **FAST)
    key = questions[0].key
    blocks = blocks_of(model, questions[0]).blocks
    assert value(aware, key, "snapkv_2x", "observed") == pytest.approx(len(blocks.suffix) / blocks.n_context)
    assert value(aware, key, "snapkv_2x", "kl") != value(blind, key, "snapkv_2x", "kl")
    assert value(aware, key, "streaming_2x", "kl") == value(blind, key, "streaming_2x", "kl")
    assert any(note.startswith("query-aware") for note in aware.summary().notes)


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "qwen3", "phi", "cohere2", "granite", "olmo3"])
def test_a_budget_of_all_slots_is_the_full_cache(name: str, questions: list[Question], tokenizer: Any) -> None:
    """The control, in float64, on other architectures and with every compactor that needs no training."""
    model = tiny_with_tokenizer(name, tokenizer, seed=1)
    names = ("random", "streaming", "key_norm", "h2o", "snapkv", "attention_matching")
    sliding = "keep" if name != "gemma3" else "compact"
    got = compaction_quality(model, questions[:1], **{**SMALL, "compactors": names}, sliding=sliding)
    controls = {control.name: control for control in got.summary().controls}
    assert set(controls) == {"documents_matter", "full_twice", "ratio_1"}
    assert controls["ratio_1"].value < 1e-9


# --- what is run ---------------------------------------------------------------------------------------------------


def test_random_slots_are_always_among_the_arms() -> None:
    assert [p.name for p in points_of(("snapkv",), (2, 8))] == [
        *("random@4_2x", "random@4_8x"),
        *("snapkv_2x", "snapkv_8x"),
    ]
    assert [p.name for p in points_of(("random", "snapkv"), (2.5,))] == ["random_2.5x", "snapkv_2.5x"]
    assert len(points_of()) == 6 * 4


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"compactors": ("snapkw",)}, 'Did you mean "snapkv"'),
        ({"compactors": ()}, "no compactor was named"),
        ({"ratios": (1,)}, "each above 1"),
        ({"ratios": ()}, "each above 1"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"timing": -1}, "timing=-1"),
        ({"sliding": "drop"}, "sliding='drop'"),
        ({"memory_budget": 1000}, "more than the memory budget"),
    ],
)
def test_wrong_options_are_refused(
    model: Model, questions: list[Question], options: dict[str, Any], match: str
) -> None:
    with pytest.raises(InputError, match=match):
        compaction_quality(model, questions, **{**FAST, **options})


def test_times_are_of_every_point_and_the_prefill(result: Result) -> None:
    rows = result.frame[result.frame["view"] == "time"]
    names = {"full", *(p.name for p in points_of(FAST["compactors"], FAST["ratios"]))}
    assert set(rows["site"]) == names
    seconds = rows[rows["readout"] == "seconds"].set_index(["pair", "site"])["value"]
    prefills = rows[rows["readout"] == "prefills"].set_index(["pair", "site"])["value"]
    pair = result.pairs["pair"].iloc[0]
    assert (seconds > 0).all()
    assert prefills[pair, "snapkv_4x"] == pytest.approx(seconds[pair, "snapkv_4x"] / seconds[pair, "full"])
    assert (prefills.xs("full", level=1) == 1).all()


# --- controls ------------------------------------------------------------------------------------------------------


def test_a_compactor_that_loses_a_slot_at_ratio_1_fails(
    model: Model, questions: list[Question], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = measure.Measure.compact

    def loses(self: Any, point: Point, item: Any, cache: Any) -> Any:
        made = real(self, point, item, cache)
        if point.ratio > 1:
            return made
        keep = torch.arange(made.cache.slots[0] - 1).expand(cache.n_kv_heads, -1)
        return eviction.Compacted(made.cache.kept([keep] * cache.n_layers))

    monkeypatch.setattr(measure.Measure, "compact", loses)
    with pytest.raises(ControlError, match=r"'ratio_1' failed.*budget of all slots"):
        compaction_quality(model, questions[:1], **SMALL)


def test_a_shifted_compact_path_fails(model: Model, questions: list[Question], monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys one position off: the next token then reads every distance wrongly."""
    real = CompactCache.of
    shifted = lambda cache: (lambda whole: whole.placed([p + 1 for p in whole.positions]))(real(cache))  # noqa: E731
    monkeypatch.setattr(CompactCache, "of", shifted)
    with pytest.raises(ControlError, match="'ratio_1' failed"):
        compaction_quality(model, questions[:1], **SMALL)


def test_documents_that_do_not_matter_fail(
    model: Model, questions: list[Question], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvnotes_interp import engine

    def whole(self: Any, item: Any) -> Any:
        return engine.prefill(self.model, item.blocks.context), item.blocks.suffix

    monkeypatch.setattr(measure.Measure, "without_documents", whole)
    with pytest.raises(ControlError, match="'documents_matter' failed"):
        compaction_quality(model, questions[:1], **SMALL)


# --- runs and pictures ---------------------------------------------------------------------------------------------


def test_a_killed_run_goes_on_and_gives_the_same_bytes(
    model: Model, questions: list[Question], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = compaction_quality(model, questions, **SMALL, out=tmp_path / "whole")
    real, seen = measure.Measure.__call__, []

    def dies(self: Any, item: Any, question: Any) -> Any:
        seen.append(item.key)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return real(self, item, question)

    monkeypatch.setattr(measure.Measure, "__call__", dies)
    with pytest.raises(KeyboardInterrupt):
        compaction_quality(model, questions, **SMALL, out=tmp_path / "killed")
    again = compaction_quality(model, questions, **SMALL, out=tmp_path / "killed", resume=True)
    assert len(seen) == 2 + 2, "one of three was done, two were left"
    for name in ("table.parquet", "pairs.parquet", "summary.json"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    pd.testing.assert_frame_equal(again.frame, whole.frame)
    with pytest.raises(InputError, match=r"asked for something else.*ratios"):
        compaction_quality(model, questions, **{**SMALL, "ratios": (3,)}, out=tmp_path / "killed", resume=True)


def test_pictures_show_the_frames_numbers(result: Result) -> None:
    assert result.plots()[:2] == ("compaction_ratio", "compaction_time")
    fig = compaction_ratio.draw(result, readout="kl")
    table = pd.DataFrame(fig.layout.meta["table"]).set_index("site")  # type: ignore[index]
    assert table.loc["snapkv_4x", "mean"] == pytest.approx(result.summary().to_dict()["kl_snapkv_4x"]["mean"])
    assert table.loc["snapkv_4x", "ratio"] == 4
    assert {trace.name for trace in fig.data} >= {"SnapKV", "StreamingLLM", "random slots (4)"}
    f1 = pd.DataFrame(compaction_ratio.draw(result).layout.meta["table"]).set_index("site")  # type: ignore[index]
    assert f1.loc["full", "mean"] == pytest.approx(result.summary().to_dict()["f1_full"]["mean"])
    times = pd.DataFrame(compaction_time.draw(result, ratio=4).layout.meta["table"]).set_index("site")  # type: ignore[index]
    want = result.frame[(result.frame["readout"] == "prefills") & (result.frame["site"] == "snapkv_4x")]["value"].mean()
    assert times.loc["snapkv_4x", "time"] == pytest.approx(want)
    assert "snapkv_2x" not in times.index
    with pytest.raises(InputError, match="ratio=3: this result holds 2, 4"):
        compaction_time.draw(result, ratio=3)
    with pytest.raises(InputError, match="unit='hours'"):
        compaction_time.draw(result, unit="hours")


def test_a_trained_compactor_is_one_of_the_arms(
    model: Model, questions: list[Question], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = eviction.Compactor("still", "still.operator", "still", "trained", "", "adapter")
    monkeypatch.setitem(eviction.COMPACTORS, "still", entry)
    new_still(model).save(tmp_path / "still")
    name = f"still@{tmp_path / 'still'}"
    got = compaction_quality(model, questions[:1], **{**SMALL, "compactors": (name,)}, out=tmp_path / "run")
    site = f"{name}_2x"
    n = blocks_of(model, questions[0]).blocks.n_context
    assert value(got, questions[0].key, site, "slots") == -(-n // 2)
    assert name in got.manifest["request"]["options"]["adapters"]
    assert any("Still (" in str(trace.name) for trace in compaction_ratio.draw(got, readout="kl").data)
