"""What survives compaction: decisions, edits and origins against values worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from kvnotes_interp import engine
from kvnotes_interp.compact import CompactCache
from kvnotes_interp.errors import ControlError, InputError
from kvnotes_interp.metrics import Competence
from kvnotes_interp.model import Model
from kvnotes_interp.operators import eviction
from kvnotes_interp.operators.still import new_still
from kvnotes_interp.plots import survival as picture
from kvnotes_interp.probes import compaction_survival
from kvnotes_interp.probes.compaction import decoding, surviving
from kvnotes_interp.probes.compaction.origins import Origins, origin_rows
from kvnotes_interp.probes.compaction.points import Point
from kvnotes_interp.probes.compaction.survival_summary import _shuffled
from kvnotes_interp.probes.compaction.surviving import field_patched
from kvnotes_interp.probes.making import Making
from kvnotes_interp.probes.measure import Case, Sweeper, open_case
from kvnotes_interp.results import Result
from kvnotes_interp.tasks import Pair, encode_all
from tests.probes.conftest import LENIENT

FAST: dict[str, Any] = {**LENIENT, "compactors": ("random", "streaming", "attention_matching"), "ratios": (2, 4)}


@pytest.fixture(scope="module")
def result(model: Model, pairs: list[Pair]) -> Result:
    return compaction_survival(model, pairs[:16], **FAST)


@pytest.fixture(scope="module")
def case(model: Model, pairs: list[Pair]) -> Case:
    encoded, _ = encode_all(model.tokenizer, pairs)
    making = Making(tail="suffix")
    lenient = Competence(0.0, 0.0)
    cases = (
        open_case(model, making.aligned(pair), competence=lenient, sweeper=Sweeper(), making=making) for pair in encoded
    )
    return next(case for case in cases if not case.reason)


def score(case: Case, cache: Any) -> float:
    logits = engine.decide(case.model, cache, case.tail, case.answers)[0]
    return float(logits[1] - logits[0])


# --- numbers -------------------------------------------------------------------------------------------------------


def test_full_rows_are_the_pairs_own_scores(result: Result) -> None:
    known = result.pairs[result.pairs["competent"]].set_index("pair")
    assert len(known) > 0
    rows = result.frame[(result.frame["site"] == "full") & (result.frame["view"] == "survival")]
    wide = rows.pivot_table(index="pair", columns="readout", values="value").loc[known.index]
    for side in ("s_old", "s_new"):
        assert wide[side].to_list() == pytest.approx(known[side].to_list(), abs=1e-9)
    assert wide["gap"].to_list() == pytest.approx([1.0] * len(wide))
    assert (wide["decided"] == 1).all()


def test_decisions_and_edits_from_a_compact_cache(result: Result, case: Case) -> None:
    """StreamingLLM at 2x, cut out and scored here."""
    key, n = case.pair.pair.key, len(case.base)
    budget = -(-n // 2)
    keep = torch.tensor([*range(4), *range(n - budget + 4, n)]).expand(case.base.n_kv_heads, -1)
    old, new = (CompactCache.of(c).kept([keep] * c.n_layers) for c in (case.base, case.donor))
    rows = result.frame[(result.frame["pair"] == key) & (result.frame["site"] == "streaming_2x")]
    assert len(rows), "the case is one of the run's"
    seen = {r["readout"]: r["value"] for _, r in rows[rows["view"] == "survival"].iterrows()}
    s_old, s_new = score(case, old), score(case, new)
    assert seen["s_old"] == pytest.approx(s_old, abs=1e-9)
    assert seen["s_new"] == pytest.approx(s_new, abs=1e-9)
    assert seen["gap"] == pytest.approx((s_new - s_old) / (case.new - case.old), abs=1e-7)
    edits = rows[rows["view"] == "compact_edit"].set_index(["edit", "readout"])["value"]
    patched = field_patched(case, old)
    assert patched is not None
    want = (score(case, patched) - s_old) / (case.new - case.old)
    assert edits["field_patched", "effect"] == pytest.approx(want, abs=1e-7)
    recovery = (score(case, patched) - case.old) / (case.new - case.old)
    assert edits["field_patched", "recovery"] == pytest.approx(recovery, abs=1e-7)


def test_the_field_is_patched_where_it_was_kept_and_only_there(case: Case) -> None:
    start, stop = case.pair.field
    n = len(case.base)
    whole = CompactCache.of(case.base)
    patched = field_patched(case, whole)
    assert patched is not None
    for mine, a, b in zip(patched.keys, case.donor.keys, case.base.keys, strict=True):
        torch.testing.assert_close(mine[:, :, start:stop], a[:, :, start:stop], rtol=0, atol=0)
        torch.testing.assert_close(mine[:, :, stop:], b[:, :, stop:], rtol=0, atol=0)
    without = torch.tensor([i for i in range(n) if not start <= i < stop]).expand(whole.n_kv_heads, -1)
    lost = whole.kept([without] * whole.n_layers)
    same = field_patched(case, lost)
    assert same is not None
    assert all(torch.equal(a, b) for a, b in zip(same.keys + same.values, lost.keys + lost.values, strict=True))
    fitted = eviction.find("attention_matching")(case.model, case.base, budget=n // 2).cache
    assert field_patched(case, fitted) is None
    # A slot that was kept and then changed is no copy either, though it names its token.
    updated = replace(lost, values=(lost.values[0] + 1, *lost.values[1:]))
    assert field_patched(case, updated) is None


def test_field_patched_at_full_is_the_field_edited(result: Result) -> None:
    """Nothing compacted: recomputing the field in place, and taking its slots from the new run, are the same."""
    rows = result.frame[(result.frame["site"] == "full") & (result.frame["readout"] == "effect")]
    wide = rows.pivot_table(index="pair", columns="edit", values="value")
    assert wide["field_patched"].to_list() == pytest.approx(wide["field_edited"].to_list(), abs=1e-6)
    fitted = result.frame[
        (result.frame["compactor"] == "attention_matching") & (result.frame["view"] == "compact_edit")
    ]
    assert set(fitted["edit"]) == {"erratum", "field_edited"}


# --- origins -------------------------------------------------------------------------------------------------------


def test_shares_and_attention_by_region(case: Case) -> None:
    """Six slots kept of two regions; attention is all accounted for."""
    n, heads = len(case.base), case.base.n_kv_heads
    numbers = [0] * (n - 4) + [1] * 4
    keep = torch.tensor([0, 1, 2, n - 3, n - 2, n - 1]).expand(heads, -1)
    compact = CompactCache.of(case.base).kept([keep] * case.base.n_layers)
    found = Origins(case.model, "keep")(None, case.base, compact, numbers, 2)
    assert found is not None
    rows = origin_rows(case.model, found, compact, case.tail, numbers, ["rest", "last"])
    got = {(row["region"], row["readout"]): row["value"] for row in rows}
    assert got["rest", "share"] == pytest.approx(0.5)
    assert got["last", "enrichment"] == pytest.approx(0.5 / (4 / n))
    assert sum(got[region, "attention"] for region in ("rest", "last", "tail")) == pytest.approx(1)
    rows_of = engine.attention_by_layer(case.model, compact, case.tail)
    want = torch.stack([layer[:, 0, 3:6].sum(-1).mean() for layer in rows_of]).mean()
    assert got["last", "attention"] == pytest.approx(float(want), abs=1e-6)


def test_what_still_wrote_is_shared_out_by_its_attribution(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = eviction.Compactor("still", "still.operator", "still", "trained", "", "adapter")
    monkeypatch.setitem(eviction.COMPACTORS, "still", entry)
    new_still(case.model).save(tmp_path)
    point = Point(eviction.find(f"still@{tmp_path}"), 2.0)
    compact = point.compactor(case.model, case.base, budget=-(-len(case.base) // 2)).cache
    n = len(case.base)
    found = Origins(case.model, "keep")(point, case.base, compact, [0] * (n // 2) + [1] * (n - n // 2), 2)
    assert found is not None
    for origin, slots in zip(found, compact.slots, strict=True):
        assert origin.shape == (case.base.n_kv_heads, slots, 2)
        torch.testing.assert_close(origin.sum(-1), torch.ones(origin.shape[:2]), atol=1e-5, rtol=0)
    # Latents are placed by position: the first ones are written from the first half.
    assert float(found[0][:, 0, 0].min()) > 0.9
    assert float(found[0][:, -1, 1].min()) > 0.9
    written = eviction.find("trained_cache@1")(case.model, case.base, budget=4).cache
    if any(bool((s < 0).any()) for s in written.sources):
        assert Origins(case.model, "keep")(None, case.base, written, [0] * n, 1) is None


# --- decoding, controls, runs --------------------------------------------------------------------------------------


def test_a_planted_direction_is_decoded_and_shuffled_labels_are_not(model: Model, pairs: list[Pair]) -> None:
    encoded, _ = encode_all(model.tokenizer, pairs)
    store = decoding.Store(None)
    generator = torch.Generator().manual_seed(0)
    answers = sorted({a for p in encoded for a in (p.pair.answer_old, p.pair.answer_new)})
    for pair in encoded:
        state = torch.randn(2, 8, generator=generator)
        noise = torch.randn(2, 8, generator=generator)
        for side, answer in enumerate((pair.pair.answer_old, pair.pair.answer_new)):
            state[side, 0] = 6.0 * (answers.index(answer) - (len(answers) - 1) / 2)
        store.put(pair.pair.key, {"planted": state, "noise": noise})
    arms = [{"site": name, "compactor": name, "ratio": 2.0} for name in ("planted", "noise")]
    rows, why = decoding.decoded(store, encoded, arms, draws=2, seed=0)
    assert not why
    mean = rows.groupby(["site", "readout"])["value"].mean()
    if len(answers) == 2:
        assert mean["planted", "accuracy"] > 0.95
    assert abs(mean["noise", "accuracy"] - 0.5) < 0.2
    control, _ = _shuffled(rows, 2)
    assert control[0].passed
    leaked = rows.assign(value=rows["value"].where(rows["readout"] == "accuracy", 1.0))
    with pytest.raises(ControlError, match="'shuffled_labels' failed"):
        _shuffled(leaked, 2)


def test_few_pairs_are_said_to_be_too_few(model: Model, pairs: list[Pair]) -> None:
    encoded, _ = encode_all(model.tokenizer, pairs[:3])
    rows, why = decoding.decoded(decoding.Store(None), encoded[:2], [], draws=1, seed=0)
    assert rows.empty
    assert "too few" in why


def test_a_compactor_that_changes_a_full_budget_fails(
    model: Model, pairs: list[Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = surviving.Surviving.compact

    def loses(self: Any, case: Any, point: Any, cache: Any) -> Any:
        made = real(self, case, point, cache)
        if point is None or point.ratio > 1:
            return made
        keep = torch.arange(1, made.slots[0]).expand(made.n_kv_heads, -1)
        return made.kept([keep] * made.n_layers)

    monkeypatch.setattr(surviving.Surviving, "compact", loses)
    with pytest.raises(ControlError, match=r"'ratio_1' failed.*budget of all slots"):
        compaction_survival(model, pairs[:16], **FAST)


def test_a_killed_run_goes_on_and_gives_the_same_bytes(
    model: Model, pairs: list[Pair], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**FAST, "compactors": ("streaming",), "ratios": (2,)}
    whole = compaction_survival(model, pairs[:16], **options, out=tmp_path / "whole")
    real, seen = surviving.Surviving.__call__, []

    def dies(self: Any, case: Any) -> Any:
        seen.append(case.pair.pair.key)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return real(self, case)

    monkeypatch.setattr(surviving.Surviving, "__call__", dies)
    with pytest.raises(KeyboardInterrupt):
        compaction_survival(model, pairs[:16], **options, out=tmp_path / "killed")
    again = compaction_survival(model, pairs[:16], **options, out=tmp_path / "killed", resume=True)
    for name in ("table.parquet", "pairs.parquet", "summary.json"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    pd.testing.assert_frame_equal(again.frame, whole.frame)


def test_summary_and_picture(result: Result) -> None:
    found = result.summary().to_dict()
    assert {"gap_streaming_2x", "decided_random_4x", "erratum_full", "field_enrichment_streaming_4x"} <= set(found)
    assert found["controls"]["ratio_1"]["passed"]
    assert result.plots()[0] == "survival"
    fig = picture.draw(result)
    table = pd.DataFrame(fig.layout.meta["table"])  # type: ignore[index]
    row = table[(table["compactor"] == "streaming") & (table["ratio"] == 2)].iloc[0]
    assert row["mean"] == pytest.approx(found["gap_streaming_2x"]["mean"])
    assert set(table["kind"]) == {"verbatim"}
    with pytest.raises(InputError, match="readout='gaps'"):
        picture.draw(result, readout="gaps")


def test_wrong_uses(model: Model, pairs: list[Pair]) -> None:
    with pytest.raises(InputError, match="each above 1"):
        compaction_survival(model, pairs[:4], **{**FAST, "ratios": (0.5,)})
    with pytest.raises(InputError, match="wording='overide'"):
        compaction_survival(model, pairs[:16], **{**FAST, "wording": "overide"})
