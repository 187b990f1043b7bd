"""The attention-deviation probe as a whole: frame, summary, controls that fail, resume, wrong uses, SmolLM2."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvnotes_interp import operators, tasks
from kvnotes_interp.errors import ControlError, InputError
from kvnotes_interp.model import Model, wrap
from kvnotes_interp.operators import Blocks
from kvnotes_interp.probes.deviation import measure as deviation_measure
from kvnotes_interp.probes.deviation.maps import _repeats, attention_deviation
from kvnotes_interp.probes.deviation.measure import plan_rows
from kvnotes_interp.probes.deviation.rows import Grain
from kvnotes_interp.probes.items import items_of
from kvnotes_interp.results import Result
from kvnotes_interp.sources import ModelSource
from kvnotes_interp.tasks import documents
from tests.architectures import build
from tests.tiny import tiny_with_tokenizer
from tests.tiny_tokenizer import train

LENIENT = {"min_gap": 0.0, "min_gap_noise": 0.0, "progress": False}


@pytest.fixture(scope="module")
def questions() -> list[documents.Question]:
    return documents.load("biography", n=4, seed=0, documents=2, facts=2)


@pytest.fixture(scope="module")
def qa(questions: list[documents.Question]) -> Model:
    return tiny_with_tokenizer("llama3", train([q.text + q.answer for q in questions], vocab=700), seed=2)


@pytest.fixture(scope="module")
def result(qa: Model, questions: list[documents.Question]) -> Result:
    return attention_deviation(
        qa, questions, operators=("no_recompute", "full_recompute"), bins=5, max_new_tokens=3, progress=False
    )


def test_the_frame_holds_every_view_and_full_recompute_deviates_by_nothing(result: Result, qa: Model) -> None:
    frame = result.frame
    assert set(frame["view"]) == {
        *("deviation", "region", "retrieval", "retrieval_head", "kv", "sink", "readout", "cost", "control"),
    }
    zero = frame[(frame["site"] == "full_recompute") & frame["view"].isin(("deviation", "region", "retrieval", "kv"))]
    zero = zero[~zero["readout"].isin(("mass", "norm_ratio"))]
    # Cosine distance is 1 minus a quotient of sums, hence not exactly 0.
    assert float(zero.loc[zero["readout"] != "cosine_distance", "value"].abs().max()) == 0
    assert float(zero["value"].abs().max()) < 1e-12
    join = frame[frame["site"] == "no_recompute"]
    assert (join.loc[(join["view"] == "region"), "value"] > 0).all()
    cells = join[(join["view"] == "deviation") & (join["readout"] == "deviation")]
    assert len(cells) == 4 * 5 * qa.shape.n_layers
    assert sorted(set(cells["relative"])) == pytest.approx([0.1, 0.3, 0.5, 0.7, 0.9])
    assert set(frame.loc[frame["view"] == "region", "edge"]) == {0.1, 0.2, 0.3}
    assert len(join[join["view"] == "retrieval_head"]) == 4 * 3 * qa.shape.n_layers * qa.shape.n_heads
    # Readouts and sinks of full recompute stand once, beside the operators'.
    for view in ("readout", "sink"):
        keys = frame.loc[frame["view"] == view, ["pair", "site", "readout", "layer", "position"]]
        assert not keys.duplicated().any()
        assert set(keys["site"]) == {"no_recompute", "full_recompute"}
    cost = frame[(frame["view"] == "cost") & (frame["readout"] == "layer_tokens")].groupby("site")["value"].max()
    assert cost["no_recompute"] == 0 < cost["full_recompute"]


def test_the_mean_over_bins_is_the_regions_weighted_by_their_share(result: Result) -> None:
    frame = result.frame[(result.frame["site"] == "no_recompute") & (result.frame["readout"] == "deviation")]
    bins = frame[frame["view"] == "deviation"].groupby("pair")["value"].mean()
    for edge in (0.1, 0.2, 0.3):
        parts = frame[(frame["view"] == "region") & (frame["edge"] == edge)].pivot(
            index="pair", columns="region", values="value"
        )
        total = edge * parts["prefix"] + (1 - 2 * edge) * parts["interior"] + edge * parts["suffix"]
        np.testing.assert_allclose(total.loc[bins.index], bins, rtol=1e-9)


def test_summary_and_tables(result: Result, questions: list[documents.Question]) -> None:
    summary = result.summary()
    quantities = set(summary.rows["quantity"])
    assert {
        "deviation_no_recompute",
        "interior_no_recompute",
        "kl_no_recompute",
        "token_f1_full_recompute",
    } <= quantities
    assert {"sink_first_no_recompute", "sink_first_full_recompute", "k_angle_no_recompute"} <= quantities
    assert "deviation_full_recompute" not in quantities
    assert [c.name for c in summary.controls] == ["full_recompute_twice", "first_block", "unmoved_keys_differ"]
    assert summary.passed
    assert summary.counts["n_tried"] == summary.counts["n_competent"] == 4
    row = summary.rows.set_index("quantity").loc["deviation_no_recompute"]
    cells = result.frame[
        (result.frame["view"] == "deviation")
        & (result.frame["site"] == "no_recompute")
        & (result.frame["readout"] == "deviation")
    ]
    assert row["mean"] == pytest.approx(cells.groupby("pair")["value"].mean().mean())
    assert row["n_effective"] == len({q.content for q in questions})
    assert result.pairs["kind"].tolist() == ["question"] * 4
    assert result.pairs["n_chunks"].tolist() == [2] * 4


def test_prompts_that_share_their_chunks_are_noted(qa: Model, questions: list[documents.Question]) -> None:
    item = items_of(qa, questions)[0][0]
    assert _repeats([item]) == []
    assert _repeats([item, replace(item, key="twin"), replace(item, key="third")])[0].startswith(
        "the chunks measured hold 2 different texts in 3 prompts"
    )


def test_the_answer_is_the_greedy_one(qa: Model, questions: list[documents.Question]) -> None:
    """Against transformers' own generate on the full prompt."""
    measure = deviation_measure.Measure(qa, {}, "terminal", Grain(), 4, deviation_measure.Competence())
    for item in items_of(qa, questions)[0]:
        arm = measure.look(item, "full", operators.full_recompute(qa, item.blocks).cache)
        ids = torch.tensor([item.blocks.token_ids])
        out = qa.hf.generate(ids, max_new_tokens=4, do_sample=False, attention_mask=torch.ones_like(ids))
        text = qa.tokenizer.decode([i for i in out[0, ids.shape[1] :].tolist() if i not in qa.stop_ids])
        assert arm.text == text.split(".")[0].split("\n")[0]


def test_pairs_are_cut_at_sentences_and_judged(model: Model, pairs: list[tasks.Pair], tmp_path: Path) -> None:
    """The fixture family puts its decision text behind one sentence or two; pairs with one block are set aside."""
    got = attention_deviation(model, pairs[:12], bins=4, **LENIENT)  # type: ignore[arg-type]
    lines = got.pairs.set_index("pair")
    assert set(lines.index) == {p.key for p in pairs[:12]}
    measured = set(got.frame["pair"])
    assert measured == set(lines.index[lines["competent"].fillna(False).astype(bool)])
    assert measured
    for key in measured:
        assert lines.loc[key, "s_old"] < 0 < lines.loc[key, "s_new"]
        shown = got.frame[(got.frame["pair"] == key) & (got.frame["view"] == "readout")]
        margin = shown[(shown["site"] == "full_recompute") & (shown["readout"] == "answer_margin")]["value"]
        assert float(margin.iloc[0]) == pytest.approx(-lines.loc[key, "s_old"])
    correct = got.summary().rows.set_index("quantity").loc["answer_correct_full_recompute", "mean"]
    assert correct == 1  # that is what competent means


@pytest.mark.parametrize("rows", ["suffix", "answer"])
def test_other_query_rows(qa: Model, questions: list[documents.Question], result: Result, rows: Any) -> None:
    got = attention_deviation(qa, questions[:1], rows=rows, bins=5, max_new_tokens=3, progress=False)
    item = items_of(qa, questions)[0][0]
    tail, at = deviation_measure.tail_of(item, rows)
    if rows == "answer":
        assert tail == [*item.blocks.suffix, *item.answer[:-1]]
        assert at == list(range(len(item.blocks.suffix) - 1, len(tail)))
    else:
        assert (tail, at) == (list(item.blocks.suffix), list(range(len(item.blocks.suffix))))
    # Readouts do not depend on the rows, the map does (unless there is one row only).
    pick = lambda r, view: r.frame[(r.frame["view"] == view) & (r.frame["pair"] == item.key)]  # noqa: E731
    same = pick(got, "readout").merge(pick(result, "readout"), on=["site", "readout"])
    np.testing.assert_allclose(same["value_x"], same["value_y"], atol=1e-9)
    if len(at) > 1:
        maps = pick(got, "deviation").merge(pick(result, "deviation"), on=["site", "readout", "layer", "position"])
        assert float((maps["value_x"] - maps["value_y"]).abs().max()) > 1e-4


def test_a_run_resumes_to_the_same_bytes(qa: Model, questions: list[documents.Question], tmp_path: Path) -> None:
    options: dict[str, Any] = {"bins": 4, "max_new_tokens": 2, "progress": False}
    attention_deviation(qa, questions, out=tmp_path / "whole", **options)
    calls = 0
    operator = operators.find("no_recompute")

    def dies(model: Model, blocks: Blocks) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return operator(model, blocks)

    with pytest.raises(KeyboardInterrupt):
        attention_deviation(qa, questions, operators=(("no_recompute", dies),), out=tmp_path / "cut", **options)
    attention_deviation(qa, questions, out=tmp_path / "cut", resume=True, **options)
    for name in ("table.parquet", "pairs.parquet", "summary.json"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "cut" / name).read_bytes()
    with pytest.raises(InputError, match=r"options\.bins"):
        attention_deviation(qa, questions, out=tmp_path / "cut", resume=True, **{**options, "bins": 5})


def test_controls_that_fail_are_errors(
    qa: Model, questions: list[documents.Question], monkeypatch: pytest.MonkeyPatch
) -> None:
    real_join, real_unmoved = operators.no_recompute, deviation_measure.unmoved

    def run() -> None:
        attention_deviation(qa, questions[:1], bins=4, max_new_tokens=1, progress=False)

    with monkeypatch.context() as patch:  # keys "not moved" that are moved all the same
        patch.setattr(deviation_measure, "unmoved", lambda cache, _blocks: cache)
        with pytest.raises(ControlError, match="unmoved_keys_differ"):
            run()

    def bent(scale: float) -> Any:
        def join(model: Model, blocks: Blocks, **options: Any) -> Any:
            made = real_join(model, blocks, **options)
            keys = tuple(k * scale for k in made.cache.keys)
            return replace(made, cache=replace(made.cache, keys=keys))

        return join

    with monkeypatch.context() as patch:  # a join that changes the first block
        patch.setattr(operators, "no_recompute", bent(1.5))
        with pytest.raises(ControlError, match="full_recompute_twice"):
            run()
    with monkeypatch.context() as patch:  # too little to be seen in the attention, but seen in the keys
        patch.setattr(operators, "no_recompute", bent(1 + 4e-5))
        with pytest.raises(ControlError, match="first_block"):
            run()
    assert deviation_measure.unmoved is real_unmoved
    run()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_controls_hold_in_the_dtypes_that_models_run_in(
    questions: list[documents.Question], qa: Model, dtype: torch.dtype
) -> None:
    hf = build("llama3", attn="sdpa", seed=2, vocab=len(qa.tokenizer), dtype=dtype)
    model = wrap(hf, qa.tokenizer, ModelSource(name="tiny", kind="live"))
    got = attention_deviation(model, questions[:1], bins=4, max_new_tokens=1, progress=False)
    controls = {c.name: c for c in got.summary().controls}
    assert got.summary().passed
    # In 16 bits as well, a tolerance is a small part of what a misplaced key does.
    assert controls["full_recompute_twice"].tolerance < 0.1
    assert controls["first_block"].tolerance < 0.1
    exact = attention_deviation(qa, questions[:1], bins=4, max_new_tokens=1, progress=False)
    row = lambda r: r.summary().rows.set_index("quantity").loc["deviation_no_recompute", "mean"]  # noqa: E731
    assert row(got) == pytest.approx(row(exact), rel=0.2 if dtype == torch.bfloat16 else 1e-3)


def test_unmoved_is_the_naive_join(qa: Model, questions: list[documents.Question]) -> None:
    for item in items_of(qa, questions)[0]:
        moved = operators.no_recompute(qa, item.blocks).cache
        naive = operators.no_recompute(qa, item.blocks, move_keys=False).cache
        back = deviation_measure.unmoved(moved, item.blocks)
        assert back.positions.tolist() == naive.positions.tolist()
        assert back.end == naive.end
        for a, b in zip(back.keys, naive.keys, strict=True):
            torch.testing.assert_close(a, b, atol=1e-9, rtol=0)


def test_bytes_are_known_before_anything_runs(
    qa: Model, questions: list[documents.Question], capsys: pytest.CaptureFixture[str]
) -> None:
    item = items_of(qa, questions)[0][0]
    plan = plan_rows(qa.shape, item, "suffix")
    assert (plan.layers, plan.heads, plan.rows, plan.keys) == (3, 4, len(item.blocks.suffix), len(item.blocks))
    assert plan.nbytes == 3 * 4 * plan.rows * plan.keys * 4 * 7
    with pytest.raises(InputError, match=r'more than the memory budget of 10 B\. Take rows="terminal"'):
        attention_deviation(qa, questions, memory_budget=10, progress=False)
    attention_deviation(qa, questions[:1], bins=2, max_new_tokens=1)
    assert "attention rows of the longest prompt: 3 layers x 4 heads x 1 row x" in capsys.readouterr().err


def test_wrong_uses_are_named(qa: Model, questions: list[documents.Question], pairs: list[tasks.Pair]) -> None:
    for options, match in (
        ({"operators": ("no_recompte",)}, r"no operator 'no_recompte'\. Did you mean \"no_recompute\""),
        ({"operators": ()}, "no operator was named"),
        ({"operators": ("no_recompute", "no_recompute")}, "named twice"),
        ({"rows": "terminl"}, r"rows='terminl'.*Did you mean \"terminal\""),
        ({"bins": 0}, "bins=0"),
        ({"edges": (0.1, 0.6)}, r"edges=\(0.1, 0.6\)"),
        ({"binning": "center"}, r"Did you mean \"centre\""),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
    ):
        with pytest.raises(InputError, match=match):
            attention_deviation(qa, questions, progress=False, **options)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="no pairs or questions"):
        attention_deviation(qa, [], progress=False)
    with pytest.raises(InputError, match="one kind at a time"):
        attention_deviation(qa, [*questions, *pairs[:1]], progress=False)  # type: ignore[list-item]

    def short(model: Model, blocks: Blocks) -> Any:
        made = operators.no_recompute(model, blocks)
        return replace(made, cache=made.cache[1:])

    with pytest.raises(InputError, match="operator 'short' gave a cache of"):
        attention_deviation(qa, questions, operators=(("short", short),), progress=False)


def test_a_prompt_of_one_block_is_set_aside(qa: Model, questions: list[documents.Question]) -> None:
    one = replace(questions[0], prefix="", documents=questions[0].documents[:1], gold=(0,))
    got = attention_deviation(qa, [one, questions[1]], bins=3, max_new_tokens=1, progress=False)
    lines = got.pairs.set_index("pair")
    assert lines.loc[one.key, "reason"] == "one block only"
    assert set(got.frame["pair"]) == {questions[1].key}


@pytest.mark.slow
def test_two_biographies_on_smollm2(smollm2: Model) -> None:
    """Documents prefilled apart are read differently, keys moved or not; the first token of each draws too much."""
    questions = documents.load("biography", n=6, seed=0, documents=2)
    got = attention_deviation(smollm2, questions, operators=("no_recompute", "no_recompute_unmoved"), progress=False)
    rows = got.summary().rows.set_index("quantity")
    assert got.summary().passed
    assert rows.loc["interior_no_recompute", "low"] > 0
    assert rows.loc["prefix_no_recompute", "mean"] > 3 * rows.loc["interior_no_recompute", "mean"]
    assert rows.loc["k_angle_no_recompute_unmoved", "mean"] > rows.loc["k_angle_no_recompute", "mean"] > 0.1
    assert rows.loc["v_angle_no_recompute_unmoved", "mean"] == pytest.approx(rows.loc["v_angle_no_recompute", "mean"])
    assert rows.loc["sink_first_no_recompute", "mean"] > 5 * rows.loc["sink_first_full_recompute", "mean"]
    assert rows.loc["kl_no_recompute", "mean"] > 0.01
    assert rows.loc["logit_cosine_no_recompute", "mean"] > 0.95  # and says nothing about the decision
    assert rows.loc["answer_correct_full_recompute", "mean"] >= rows.loc["answer_correct_no_recompute", "mean"]
    # In layer 0 keys come from the tokens alone: once moved, they are those of full recompute.
    kv = got.frame[(got.frame["view"] == "kv") & (got.frame["readout"] == "angle") & (got.frame["layer"] == 0)]
    by = kv.groupby(["site", "part"])["value"].max()
    assert by["no_recompute", "k"] < 1e-4
    assert by["no_recompute", "v"] < 1e-4
    assert by["no_recompute_unmoved", "k"] > 0.1
