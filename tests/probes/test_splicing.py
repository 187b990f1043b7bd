"""Splice quality: every number against plain forwards, controls that can fail, resuming, and the real model."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from kvnotes_interp import engine, metrics, operators
from kvnotes_interp.errors import ControlError, InputError
from kvnotes_interp.model import Model
from kvnotes_interp.operators.blocks import cut_texts
from kvnotes_interp.plots import splice_documents, splice_share, splice_ttft
from kvnotes_interp.plots import splicing as shared
from kvnotes_interp.probes.answering import answer_words
from kvnotes_interp.probes.splicing import measure as splicing_measure
from kvnotes_interp.probes.splicing import quality as splicing
from kvnotes_interp.probes.splicing.quality import arms_of, cut_down, splice_quality
from kvnotes_interp.probes.splicing.summary import quality_table
from kvnotes_interp.results import Result
from kvnotes_interp.tasks import documents
from kvnotes_interp.tasks.documents import Question
from tests.reference import answer_with_cache, full_cache, full_logits
from tests.tiny import tiny_with_tokenizer
from tests.tiny_tokenizer import train

FAST: dict[str, Any] = {
    "operators": ("epic@0.3", "splice", "cacheblend"),
    "shares": (0.5,),
    "seam_repair": (2, "all"),
    "documents": (1, 2),
    "max_new_tokens": 3,
    "timing": 0,
    "progress": False,
}

SMALL = {**FAST, "operators": ("splice@2",), "max_new_tokens": 1}


@pytest.fixture(scope="module")
def questions() -> list[Question]:
    return documents.load("biography", n=3, seed=0, documents=3, facts=2)


@pytest.fixture(scope="module")
def model(questions: list[Question]) -> Model:
    drawn = documents.load("biography", n=60, seed=1, documents=4)
    return tiny_with_tokenizer("llama3", train([q.text + q.answer for q in [*drawn, *questions]], vocab=900), seed=2)


@pytest.fixture(scope="module")
def result(model: Model, questions: list[Question]) -> Result:
    return splice_quality(model, questions, **{**FAST, "timing": 1})


def value(result: Result, pair: str, site: str, readout: str) -> float:
    frame = result.frame
    got = frame[(frame["pair"] == pair) & (frame["site"] == site) & (frame["readout"] == readout)]["value"]
    assert len(got) == 1, (pair, site, readout)
    return float(got.iloc[0])


def decoded(hf: Any, ids: list[int], n: int) -> list[int]:
    """Greedy continuation by plain forwards without a cache."""
    out = list(ids)
    for _ in range(n):
        out.append(int(full_logits(hf, torch.tensor([out]))[0, -1].argmax()))
    return out[len(ids) :]


# --- numbers -------------------------------------------------------------------------------------------------------


def test_full_recompute_is_the_plain_model(model: Model, questions: list[Question], result: Result) -> None:
    for question in cut_down(questions, (1, 2))[0]:
        cut = cut_texts(model.tokenizer, question.prefix, question.documents, question.suffix, answer=question.answer)
        ids = list(cut.blocks.token_ids)
        logits = full_logits(model.hf, torch.tensor([ids]))[0, -1]
        right = cut.answer[0]
        best = float(torch.cat((logits[:right], logits[right + 1 :])).max())
        got = {name: value(result, question.key, "full_recompute", name) for name in ("margin", "first_token", "kl")}
        assert got["margin"] == pytest.approx(float(logits[right]) - best, abs=1e-8)
        assert got["first_token"] == float(int(logits.argmax()) == right)
        assert got["kl"] == 0
        text = model.tokenizer.decode(decoded(model.hf, ids, 3))
        text = re.split(r"[.\n]", text)[0]  # the stops of a biography
        rows = result.frame[(result.frame["pair"] == question.key) & (result.frame["site"] == "full_recompute")]
        assert rows.loc[rows["readout"] == "exact_match", "token"].iloc[0] == text


def test_the_bare_join_is_what_plain_caches_make_of_it(model: Model, questions: list[Question], result: Result) -> None:
    """Each piece prefilled by transformers at its place; distances written out here."""
    question = cut_down(questions, (2,))[0][1]
    blocks = cut_texts(model.tokenizer, question.prefix, question.documents, question.suffix).blocks
    pieces = [(0, len(blocks.prefix)), *blocks.spans]
    kvs = [
        full_cache(model.hf, torch.tensor([ids]), torch.arange(a, b))
        for (a, b), ids in zip(pieces, (blocks.prefix, *blocks.chunks), strict=True)
    ]
    joined = [
        tuple(torch.cat([kv[layer][i] for kv in kvs], 2) for i in (0, 1)) for layer in range(model.shape.n_layers)
    ]
    n = blocks.n_context
    tail = torch.tensor([blocks.suffix])
    mine = answer_with_cache(model.hf, joined, tail, torch.arange(n, n + tail.shape[1]))[0, -1].double()  # type: ignore[arg-type]
    full = full_logits(model.hf, torch.tensor([blocks.token_ids]))[0, -1].double()
    p, q = full.softmax(-1), mine.softmax(-1)
    got = {k: value(result, question.key, "no_recompute", k) for k in ("kl", "logit_cosine", "top1_agreement")}
    assert got["kl"] == pytest.approx(float((p * (p / q).log()).sum()), abs=1e-6)
    assert got["kl"] > 1e-3
    assert got["logit_cosine"] == pytest.approx(float(full @ mine / full.norm() / mine.norm()), abs=1e-6)
    assert got["top1_agreement"] == float(int(full.argmax()) == int(mine.argmax()))


def test_costs_and_columns(model: Model, questions: list[Question], result: Result) -> None:
    layers = model.shape.n_layers
    for question in cut_down(questions, (1, 2))[0]:
        blocks = cut_texts(model.tokenizer, question.prefix, question.documents, question.suffix).blocks
        stale = blocks.n_context - len(blocks.prefix)
        want = {
            "full_recompute": blocks.n_context * layers,
            "no_recompute": 0,
            "no_recompute_unmoved": 0,
            "splice@2": 2 * len(blocks.chunks) * layers,
            "splice@all": stale * layers,
            "epic@0.3": int(0.3 * stale + 0.5) * layers,
            "cacheblend@0.5": 2 * stale + int(0.5 * stale + 0.5) * (layers - 2),
            "random_recompute@0.3": int(0.3 * stale + 0.5) * layers,
        }
        for site, tokens in want.items():
            assert value(result, question.key, site, "layer_tokens") == tokens, site
            assert value(result, question.key, site, "layer_share") == pytest.approx(tokens / want["full_recompute"])
        rows = result.frame[result.frame["pair"] == question.key]
        assert set(rows["documents"]) == {len(question.documents)}
        assert set(rows["size"]) == {blocks.n_context}
        assert set(rows["position"]) == {blocks.spans[question.gold[0]][0]}
    assert set(result.frame.loc[result.frame["site"] == "epic@0.3", "share"]) == {0.3}


def test_all_repaired_is_full_recompute_in_every_readout(result: Result) -> None:
    frame = result.frame[result.frame["view"] == "quality"]
    wide = frame.pivot_table(index=["pair", "readout"], columns="site", values="value")
    np.testing.assert_allclose(wide["splice@all"], wide["full_recompute"], atol=1e-7)
    assert float((wide["no_recompute_unmoved"] - wide["full_recompute"]).abs().max()) > 1e-2


def test_micro_f1_is_that_of_the_whole_corpus(questions: list[Question], result: Result) -> None:
    answers = {q.key: (q.answer, *q.aliases) for q in cut_down(questions, (1, 2))[0]}
    table = quality_table(result)
    for site in ("full_recompute", "no_recompute", "epic@0.3"):
        rows = result.frame[(result.frame["site"] == site) & (result.frame["readout"] == "exact_match")]
        want = metrics.micro_f1(list(rows["token"]), [answers[pair] for pair in rows["pair"]])
        assert result.summary().to_dict()[f"f1_{site}"]["mean"] == pytest.approx(want)
        for n in (1, 2):
            own = rows[rows["documents"] == n]
            want = metrics.micro_f1(list(own["token"]), [answers[pair] for pair in own["pair"]])
            got = table[(table["site"] == site) & (table["documents"] == n) & (table["readout"] == "micro_f1")]
            assert float(got["mean"].iloc[0]) == pytest.approx(want)


@pytest.mark.parametrize(
    ("text", "answers"),
    [(" a big dog", (" dog",)), ("", (" dog",)), (" St. Louis", (" Paris", " St Louis MO")), (" the", (" a",))],
)
def test_answer_words_pool_to_micro_f1(text: str, answers: tuple[str, ...]) -> None:
    common, words = answer_words(text, answers)
    more = answer_words(" red cat", (" cat",))
    want = metrics.micro_f1([text, " red cat"], [answers, (" cat",)])
    assert (common + more[0]) / (words + more[1]) == pytest.approx(want)


def test_answered_and_kept(questions: list[Question], model: Model) -> None:
    """With no least margin, a question is answered exactly when the right token beats the distractors'."""
    options = {**SMALL, "documents": (2,)}
    result = splice_quality(model, questions, **options, min_gap=0.0, min_gap_noise=0.0)
    for _, row in result.pairs.iterrows():
        assert bool(row["answered"]) == (value(result, row["pair"], "full_recompute", "margin_distractors") >= 0)
    none = splice_quality(model, questions[:1], **options, min_gap=1e9)
    assert not none.pairs["answered"].any()
    assert "kept_no_recompute" not in none.summary().to_dict()
    assert none.pairs["competent"].all(), "quality counts every question"


# --- what is run ---------------------------------------------------------------------------------------------------


def test_the_frame_of_reference_is_always_run() -> None:
    arms = list(arms_of(("cacheblend", "splice@3"), shares=(0.05, 0.9)))
    assert arms[:3] == ["full_recompute", "no_recompute_unmoved", "no_recompute"]
    assert {"cacheblend@0.05", "cacheblend@0.9", "splice@3"} <= set(arms)
    assert {"random_recompute@0.05", "random_recompute@0.9"} <= set(arms), "random tokens at the same budgets"
    assert len(arms_of()) == 3 + 3 + 3 * 5


def test_questions_are_cut_down_to_nested_documents() -> None:
    whole = documents.load("biography", n=20, seed=0, documents=8)
    cut, aside = cut_down(whole, (1, 2, 4, 8))
    assert not aside
    by_key = {q.key: q for q in cut}
    places = []
    for question in whole:
        kept = [set(by_key[f"{question.key}.d{n}"].documents) for n in (1, 2, 4, 8)]
        assert [len(k) for k in kept] == [1, 2, 4, 8]
        assert kept[0] < kept[1] < kept[2] < kept[3]
        for n in (1, 2, 4, 8):
            small = by_key[f"{question.key}.d{n}"]
            assert small.documents[small.gold[0]] == question.documents[question.gold[0]]
            assert [d for d in question.documents if d in small.documents] == list(small.documents)
            assert (small.suffix, small.answer, small.content) == (question.suffix, question.answer, question.content)
        places.append(by_key[f"{question.key}.d2"].gold[0])
    assert {0, 1} == set(places), "the supporting document is not always the last"
    few, aside = cut_down(whole[:1], (2, 16))
    assert len(few) == 1
    assert aside[0]["reason"] == splicing.TOO_FEW
    two = dataclasses.replace(whole[0], gold=(0, 1))
    assert cut_down([two], (1, 2))[1][0]["reason"] == splicing.TOO_MANY
    assert cut_down(whole, None) == (whole, [])


def test_a_question_with_too_few_documents_is_set_aside(model: Model, questions: list[Question]) -> None:
    result = splice_quality(model, questions[:1], **{**SMALL, "documents": (2, 9)})
    assert result.summary().counts == {"n_tried": 2, "n_competent": 1, "set_aside": {splicing.TOO_FEW: 1}}


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"operators": ("epik",)}, 'Did you mean "epic"'),
        ({"operators": ()}, "no operator was named"),
        ({"shares": (1.5,)}, "share=1.5"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"timing": -1}, "timing=-1"),
        ({"documents": (0,)}, "documents="),
        ({"memory_budget": 1000}, "more than the memory budget"),
    ],
)
def test_wrong_options_are_refused(
    model: Model, questions: list[Question], options: dict[str, Any], match: str
) -> None:
    with pytest.raises(InputError, match=match):
        splice_quality(model, questions, **{**FAST, **options})
    with pytest.raises(InputError, match="no questions were given"):
        splice_quality(model, [], **FAST)


# --- controls ------------------------------------------------------------------------------------------------------


def test_the_controls_passed_and_are_kept(result: Result) -> None:
    controls = {c.name: c for c in result.summary().controls}
    assert set(controls) == {"full_recompute_twice", "all_repaired", "own_place", "unmoved_keys_differ"}
    assert all(c.passed and c.n == 6 for c in controls.values())


def test_a_wrong_place_fails(model: Model, questions: list[Question], monkeypatch: pytest.MonkeyPatch) -> None:
    real = splicing_measure.attach
    monkeypatch.setattr(
        splicing_measure,
        "attach",
        lambda m, c, chunk: real(m, c, dataclasses.replace(chunk, positions=chunk.positions + 1)),
    )
    with pytest.raises(ControlError, match=r"'own_place' failed.*spliced where it stood"):
        splice_quality(model, questions[:1], **SMALL)


def test_a_repair_that_forgets_a_token_fails(
    model: Model, questions: list[Question], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = engine.recompute
    monkeypatch.setattr(engine, "recompute", lambda m, c, slots, **o: real(m, c, list(slots)[:-3], **o))
    with pytest.raises(ControlError, match="'all_repaired' failed"):
        splice_quality(model, questions[:1], **SMALL)


def test_keys_that_need_not_move_fail(model: Model, questions: list[Question], monkeypatch: pytest.MonkeyPatch) -> None:
    """If the naive join were full recompute, no number here would mean anything."""
    real = operators.Operator.__call__

    def call(self: operators.Operator, m: Model, blocks: Any, **options: Any) -> Any:
        if self.name == "no_recompute_unmoved":
            return operators.full_recompute(m, blocks)
        return real(self, m, blocks, **options)

    monkeypatch.setattr(operators.Operator, "__call__", call)
    with pytest.raises(ControlError, match=r"'unmoved_keys_differ' failed"):
        splice_quality(model, questions[:1], **SMALL)


# --- runs and pictures ---------------------------------------------------------------------------------------------


def test_a_killed_run_goes_on_and_gives_the_same_bytes(
    model: Model, questions: list[Question], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = questions[:2]
    whole = splice_quality(model, questions, **SMALL, out=tmp_path / "whole")
    real, seen = splicing_measure.Measure.__call__, []

    def dies(self: Any, item: Any, question: Any) -> Any:
        seen.append(item.key)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return real(self, item, question)

    monkeypatch.setattr(splicing_measure.Measure, "__call__", dies)
    with pytest.raises(KeyboardInterrupt):
        splice_quality(model, questions, **SMALL, out=tmp_path / "killed")
    again = splice_quality(model, questions, **SMALL, out=tmp_path / "killed", resume=True)
    assert len(seen) == 3 + 2, "two of four were done, two were left"
    for name in ("table.parquet", "pairs.parquet", "summary.json"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    pd.testing.assert_frame_equal(again.frame, whole.frame)
    with pytest.raises(InputError, match=r"asked for something else.*max_new_tokens"):
        splice_quality(model, questions, **{**SMALL, "max_new_tokens": 2}, out=tmp_path / "killed", resume=True)


def test_times_are_of_every_operator(result: Result) -> None:
    rows = result.frame[result.frame["view"] == "ttft"]
    assert set(rows["site"]) == set(arms_of(FAST["operators"], shares=(0.5,), seam_repair=(2, "all")))
    seconds = rows[rows["readout"] == "seconds"].set_index(["pair", "site"])["value"]
    assert (seconds > 0).all()
    speedup = rows[rows["readout"] == "speedup"].set_index(["pair", "site"])["value"]
    pair = result.pairs["pair"].iloc[0]
    want = seconds[pair, "full_recompute"] / seconds[pair, "no_recompute"]
    assert speedup[pair, "no_recompute"] == pytest.approx(want)
    assert (speedup.xs("full_recompute", level=1) == 1).all()


def test_pictures_show_the_frames_numbers(result: Result) -> None:
    fig = splice_share.draw(result)
    table = pd.DataFrame(fig.layout.meta["table"])  # type: ignore[index]
    row = table[table["site"] == "epic@0.3"].iloc[0]
    assert row["mean"] == pytest.approx(result.summary().to_dict()["f1_epic@0.3"]["mean"])
    assert row["share"] == pytest.approx(result.summary().to_dict()["layer_share_epic@0.3"]["mean"])
    assert {t.name for t in fig.data if t.name} >= {
        "EPIC",
        "CacheBlend",
        "random tokens",
        "no recompute, keys not moved",
    }
    kl = pd.DataFrame(splice_share.draw(result, readout="kl", documents=2).layout.meta["table"])  # type: ignore[index]
    frame = result.frame[(result.frame["readout"] == "kl") & (result.frame["documents"] == 2)]
    assert kl.loc[kl["site"] == "no_recompute", "mean"].iloc[0] == pytest.approx(
        frame.loc[frame["site"] == "no_recompute", "value"].mean()
    )
    by_documents = pd.DataFrame(splice_documents.draw(result, readout="kl", share=0.4).layout.meta["table"])  # type: ignore[index]
    assert set(by_documents["documents"]) == {1, 2}
    assert {"epic@0.3", "cacheblend@0.5", "splice@2"} <= set(by_documents["site"])
    times = pd.DataFrame(splice_ttft.draw(result, bins=2).layout.meta["table"])  # type: ignore[index]
    assert set(times.loc[times["site"] == "full_recompute", "mean"]) == {1.0}
    with pytest.raises(InputError, match='Did you mean "kl"'):
        shared.check_readout("kll")
    with pytest.raises(InputError, match="documents=7: this result holds 1, 2"):
        splice_share.draw(result, documents=7)


@pytest.mark.slow
def test_smollm2_answers_from_spliced_biographies(smollm2: Model) -> None:
    questions = documents.load("biography", n=4, seed=0, documents=2)
    result = splice_quality(
        smollm2,
        questions,
        operators=("splice", "random_recompute"),
        shares=(0.9,),
        seam_repair=(16, "all"),
        documents=(2,),
        timing=0,
        progress=False,
    )
    found = result.summary().to_dict()
    assert all(control["passed"] for control in found["controls"].values())
    assert found["f1_full_recompute"]["mean"] > 0, "measured: 2 of these 4 answered"
    assert found["kl_splice@all"]["mean"] < 1e-6
    assert found["kl_splice@all"]["mean"] < found["kl_random_recompute@0.9"]["mean"] < found["kl_no_recompute"]["mean"]
    assert found["logit_cosine_no_recompute"]["mean"] > 0.9
