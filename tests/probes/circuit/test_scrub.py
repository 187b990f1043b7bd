"""Scrubbing and dose-response: donors that hold what they should, at the positions where they should."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvnotes_interp import engine, tasks
from kvnotes_interp.model import Model
from kvnotes_interp.probes.circuit import scrub
from kvnotes_interp.probes.measure import Case, downstream_of, field_of
from kvnotes_interp.tasks import EncodedPair, Pair
from tests.reference import full_cache, patched_logits

CaseOf = Callable[[str], Case]


@pytest.fixture(scope="module")
def encoded(model: Model, pairs: list[Pair]) -> list[EncodedPair]:
    return tasks.encode_all(model.tokenizer, pairs)[0]


def by_hand(case: Case, base: str, positions: tuple[int, ...]) -> float:
    """The score of one cache patched from the pair's other prompt, by copies."""
    hf, n = case.model.hf, case.pair.length - 1
    runs = {"old": torch.tensor([case.pair.old_ids]), "new": torch.tensor([case.pair.new_ids])}
    mine, theirs = (base, "new" if base == "old" else "old")
    logits = patched_logits(
        hf,
        full_cache(hf, runs[mine][:, :n]),
        full_cache(hf, runs[theirs][:, :n]),
        layers=None,
        positions=positions,
        part="kv",
        kv_heads=None,
        tail_ids=runs[mine][:, n:],
        tail_positions=torch.tensor([n]),
    )[0, -1]
    return float(logits[case.answers[1]] - logits[case.answers[0]])


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_neox"])
def test_an_aligned_donor_holds_its_slots_as_if_run_at_these_positions(case_of: CaseOf, name: str) -> None:
    """Keys of a prompt that starts five positions later, put back: the rotation is undone exactly."""
    case = case_of(name)
    ids = list(case.pair.new_ids[:-1])
    late = engine.prefill(case.model, ids, positions=range(5, 5 + len(ids)))
    slots = {4: 4, 6: 6, 7: 5}
    got = scrub.aligned(late, case.base, slots)
    want = full_cache(case.model.hf, torch.tensor([ids]))
    for layer in range(case.model.shape.n_layers):
        for p in (4, 6):
            torch.testing.assert_close(got.keys[layer][:, :, p], want[layer][0][:, :, p], rtol=0, atol=1e-6)
            torch.testing.assert_close(got.values[layer][:, :, p], want[layer][1][:, :, p], rtol=0, atol=1e-6)
    moved = full_cache(case.model.hf, torch.tensor([ids]), torch.arange(2, 2 + len(ids)))
    # The first layer's key of slot 5 depends on its token and position alone: at 7 it is the key of a run shifted by 2.
    torch.testing.assert_close(got.keys[0][:, :, 7], moved[0][0][:, :, 5], rtol=0, atol=1e-6)


def test_donors_end_in_the_answer_and_come_from_other_contents_first(encoded: list[EncodedPair]) -> None:
    pair = encoded[0]
    others = [e for e in encoded if e.pair.key != pair.pair.key]
    answer = others[0].answer_new_id
    donors = scrub.choose_donors(pair, [pair, *others], answer, n=6, seed=0)
    assert donors
    for other, side in donors:
        assert other.pair.key != pair.pair.key
        assert (other.answer_old_id if side == "old" else other.answer_new_id) == answer
    own = [other.pair.content == pair.pair.content for other, _ in donors]
    assert own == sorted(own)
    assert donors == scrub.choose_donors(pair, [pair, *others], answer, n=6, seed=0)


def test_own_arms_and_doses_are_patches_by_hand(language_case: Case, encoded: list[EncodedPair]) -> None:
    case = language_case
    where = downstream_of(case.pair)
    ranked = list(where[::-1])
    rows = scrub.measure_scrub(case, ranked, encoded, k=3, donors=2, draws=2, seed=0)
    scores = rows[rows["readout"] == "logit_diff"].set_index(["site", "ranking", "draw"])["value"]
    note = tuple(sorted(ranked[:3]))
    rest = tuple(p for p in field_of(case.pair) + where if p not in note)
    assert scores["opposite_note", "other_half", 0] == pytest.approx(by_hand(case, "old", note), abs=1e-8)
    own = rows[(rows["site"] == "opposite_rest") & (rows["readout"] == "logit_diff")]["value"].iloc[0]
    assert own == pytest.approx(by_hand(case, "old", rest), abs=1e-8)
    drift = rows[rows["readout"] == "drift"]
    recovery = rows[(rows["readout"] == "recovery") & (rows["site"] == "same_note")]
    assert drift["value"].tolist() == recovery["value"].abs().tolist()

    dose = scrub.measure_dose(case, ranked, draws=1, seed=0)
    got = dose[(dose["ranking"] == "other_half") & (dose["readout"] == "logit_diff")].set_index(["site", "k"])["value"]
    for k in (1, 4):
        top = tuple(ranked[:k])
        assert got["to_new", k] == pytest.approx(by_hand(case, "old", top), abs=1e-8)
        assert got["to_old", k] == pytest.approx(by_hand(case, "new", top), abs=1e-8)
    back = dose[(dose["site"] == "to_old") & (dose["ranking"] == "other_half")].set_index(["readout", "k"])["value"]
    want = (got["to_old", 4] - case.new) / (case.old - case.new)
    assert back["recovery", 4] == pytest.approx(want)
    assert back["flip", 4] == float(got["to_old", 4] < 0)
    # At its last k every order holds the same set.
    ends = dose[(dose["k"] == len(where)) & (dose["readout"] == "recovery")].groupby("site")["value"]
    assert (ends.max() - ends.min() < 1e-9).all()


def test_a_note_of_another_pair_is_that_pairs(language_case: Case, encoded: list[EncodedPair]) -> None:
    """Against copies by hand, with a donor that has the same places at the same positions."""
    case = language_case
    where = downstream_of(case.pair)
    twins = [e for e in encoded if e.length == case.pair.length and e.anchors == case.pair.anchors]
    donors = scrub.choose_donors(case.pair, twins, case.answers[1], n=4, seed=0)
    assert donors, "the family has no second pair of this shape: choose another pair"
    rows = scrub.measure_scrub(case, list(where), twins, k=2, donors=1, draws=0, seed=0)
    got = rows[(rows["site"] == "opposite_note_other") & (rows["readout"] == "logit_diff")]["value"].iloc[0]
    other, side = donors[0]
    ids = torch.tensor([other.old_ids if side == "old" else other.new_ids])
    n, old = case.pair.length - 1, torch.tensor([case.pair.old_ids])
    logits = patched_logits(
        case.model.hf,
        full_cache(case.model.hf, old[:, :n]),
        full_cache(case.model.hf, ids[:, :n]),
        layers=None,
        positions=where[:2],
        part="kv",
        kv_heads=None,
        tail_ids=old[:, n:],
        tail_positions=torch.tensor([n]),
    )[0, -1]
    assert got == pytest.approx(float(logits[case.answers[1]] - logits[case.answers[0]]), abs=1e-8)
