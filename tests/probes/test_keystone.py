"""The keystone: recoveries of an edit in both worlds, by hand, by construction, and when nothing is spliced."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import kvnotes_interp as kv
from kvnotes_interp import engine, tasks
from kvnotes_interp.errors import ControlError, InputError
from kvnotes_interp.model import Model
from kvnotes_interp.operators.blocks import cut_pair
from kvnotes_interp.probes import keystone
from kvnotes_interp.probes.keystone import edit_in_splice
from kvnotes_interp.results import Result
from kvnotes_interp.tasks import Pair
from tests.probes.conftest import LENIENT
from tests.reference import full_cache, patched_logits

BEFORE = "Today Anna came by with bread. It was early."
OPTIONS: dict[str, Any] = {"before": BEFORE, "ks": (2, 5), "draws": 2, **LENIENT}


def rows(result: Result, site: str, readout: str, world: str = "") -> pd.DataFrame:
    frame = result.frame[(result.frame["view"] == "keystone") & (result.frame["readout"] == readout)]
    frame = frame[frame["site"] == site]
    return frame[frame["world"] == world] if world else frame


@pytest.fixture(scope="module")
def signal() -> list[Pair]:
    return tasks.load("signal", n=6, seed=3)


@pytest.fixture(scope="module")
def notes(signal: list[Pair]) -> Result:
    return edit_in_splice(kv.load("organism:notes", check=False), signal, **OPTIONS)


def test_where_notes_decide_an_edit_of_the_field_does_nothing_in_both_worlds(notes: Result) -> None:
    """By construction: only full stops see the field, and only the decision sees them."""
    assert notes.pairs["competent"].all()
    for world in keystone.WORLDS:
        np.testing.assert_allclose(rows(notes, "field_only", "recovery", world)["value"], 0, atol=1e-4)
        np.testing.assert_allclose(rows(notes, "behind_only", "recovery", world)["value"], 1, atol=1e-4)
        top = rows(notes, "field_and_top", "recovery", world).groupby("k")["value"].mean()
        random = rows(notes, "field_and_random", "recovery", world).groupby("k")["value"].mean()
        assert float(top[5]) > float(random[5])
        assert float(top[5]) == pytest.approx(1, abs=0.05)
    assert (rows(notes, "field_only", "same_decision")["value"] == 1).all()


def test_where_the_field_is_read_an_edit_of_it_is_all_in_both_worlds(signal: list[Pair]) -> None:
    result = edit_in_splice(kv.load("organism:direct", check=False), signal[:3], **OPTIONS)
    assert result.pairs["competent"].all()
    for world in keystone.WORLDS:
        np.testing.assert_allclose(rows(result, "field_only", "recovery", world)["value"], 1, atol=1e-4)
        np.testing.assert_allclose(rows(result, "behind_only", "recovery", world)["value"], 0, atol=1e-4)


@pytest.fixture(scope="module")
def mixed() -> Model:
    """Half of its heads take notes, the other half read the field."""
    return kv.load("organism:mixed", check=False)


def test_numbers_are_those_of_patches_made_by_hand(mixed: Model, signal: list[Pair]) -> None:
    """Both worlds from plain forwards: the skill prefilled behind the prefix, and alone at its place."""
    result = edit_in_splice(mixed, signal[:2], **OPTIONS)
    assert result.pairs["competent"].all()
    encoded, _ = tasks.encode_all(mixed.tokenizer, signal[:1])
    pair = encoded[0]
    ahead = mixed.tokenizer(BEFORE, add_special_tokens=False)["input_ids"]
    cut = cut_pair(pair)
    assert cut.prefix == ()
    n, stop = len(ahead), cut.n_context
    tail, places = torch.tensor([pair.old_ids[stop:]]), torch.arange(n + stop, n + pair.length)
    field = list(range(pair.field[0] + n, pair.field[1] + n))

    def together(ids: tuple[int, ...]) -> Any:
        return full_cache(mixed.hf, torch.tensor([[*ahead, *ids[:stop]]]))

    def joined(ids: tuple[int, ...]) -> Any:
        parts = (
            full_cache(mixed.hf, torch.tensor([ahead])),
            full_cache(mixed.hf, torch.tensor([ids[:stop]]), torch.arange(n, n + stop)),
        )
        return [tuple(torch.cat([a[i], b[i]], 2) for i in (0, 1)) for a, b in zip(*parts, strict=True)]

    found = {}
    for world, make in (("recomputed", together), ("spliced", joined)):
        old, new = make(pair.old_ids), make(pair.new_ids)

        def score(positions: list[int], old: Any = old, new: Any = new) -> float:
            where = {"layers": None, "positions": positions, "part": "kv", "kv_heads": None}
            logits = patched_logits(mixed.hf, old, new, **where, tail_ids=tail, tail_positions=places)[0, -1]
            return float(logits[pair.answer_new_id] - logits[pair.answer_old_id])

        s_old, s_new = score([]), score(list(range(n, n + stop)))
        here = rows(result, "field_only", "recovery", world)
        found[world] = float(here.loc[here["pair"] == pair.pair.key, "value"].iloc[0])
        assert found[world] == pytest.approx((score(field) - s_old) / (s_new - s_old), abs=1e-4), world
        assert 0.01 < abs(found[world]) < 0.99, "the control of this test: the field carries a part only"
        suffix = "" if world == "recomputed" else "_spliced"
        line = result.pairs[result.pairs["pair"] == pair.pair.key].iloc[0]
        assert (line[f"s_old{suffix}"], line[f"s_new{suffix}"]) == pytest.approx((s_old, s_new), abs=1e-4)
    gap = rows(result, "field_only", "difference")
    got = float(gap.loc[gap["pair"] == pair.pair.key, "value"].iloc[0])
    assert got == pytest.approx(found["spliced"] - found["recomputed"], abs=1e-9)


def test_a_skill_repaired_all_along_is_the_recomputed_one(mixed: Model, signal: list[Pair]) -> None:
    gaps = {}
    for repair in ("all", 0):
        result = edit_in_splice(mixed, signal[:2], **OPTIONS, seam_repair=repair)  # type: ignore[arg-type]
        gaps[repair] = result.frame.loc[result.frame["readout"] == "difference", "value"].abs().max()
    assert gaps["all"] < 1e-4
    assert gaps[0] > 10 * gaps["all"], "the control of this test: a bare splice is another world"


def test_a_pair_must_flip_in_both_worlds(mixed: Model, signal: list[Pair]) -> None:
    blind = kv.load("organism:null", check=False)
    for model, pairs in ((mixed, signal[:2]), (blind, signal[:3])):
        result = edit_in_splice(model, pairs, **OPTIONS)
        tried = result.pairs
        flips = (
            (tried["s_old"] < 0) & (tried["s_new"] > 0) & (tried["s_old_spliced"] < 0) & (tried["s_new_spliced"] > 0)
        )
        assert (flips == tried["competent"].astype(bool)).all()
    assert not tried["competent"].any(), "no token sees the field there"
    assert all(reason.startswith(("recomputed: ", "spliced: ")) for reason in tried["reason"])
    assert result.frame.empty
    assert result.summary().to_dict()["field_only_spliced"]["mean"] is None


def test_a_prefix_that_merges_is_set_aside(mixed: Model, signal: list[Pair]) -> None:
    """A blank before the prompt's first word would be that word's."""
    result = edit_in_splice(mixed, signal[:2], **{**OPTIONS, "before": BEFORE + " "})
    assert set(result.pairs["reason"]) == {keystone.MERGES}


def test_controls_fail_where_they_must(signal: list[Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    organism = kv.load("organism:notes", check=False)
    real = keystone.attach

    def recomputed(model: Model, cache: Any, chunk: Any, **_: Any) -> Any:
        return real(model, cache, chunk, seam_repair="all")

    monkeypatch.setattr(keystone, "attach", recomputed)
    with pytest.raises(ControlError, match="'worlds_differ' failed"):
        edit_in_splice(organism, signal[:1], **OPTIONS)
    monkeypatch.setattr(keystone, "attach", real)
    sweep = engine.sweep

    def forgets(model: Model, base: Any, donor: Any, sites: Any, *rest: Any, **options: Any) -> Any:
        cut = [dataclasses.replace(s, positions=s.positions[:-6]) if len(s.positions) > 6 else s for s in sites]
        return sweep(model, base, donor, cut, *rest, **options)

    monkeypatch.setattr(engine, "sweep", forgets)
    with pytest.raises(ControlError, match="'everything_recomputed' failed"):
        edit_in_splice(organism, signal[:1], **OPTIONS)


def test_a_finished_run_is_read_and_wrong_options_refused(
    signal: list[Pair], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    organism = kv.load("organism:notes", check=False)
    first = edit_in_splice(organism, signal[:2], **OPTIONS, out=tmp_path / "run")
    monkeypatch.setattr(keystone._Measure, "__call__", lambda *_: pytest.fail("nothing is left to measure"))
    again = edit_in_splice(organism, signal[:2], **OPTIONS, out=tmp_path / "run", resume=True)
    pd.testing.assert_frame_equal(again.frame, first.frame)
    for options, match in (
        ({"ks": (0,)}, "start at 1"),
        ({"draws": 0}, "draws=0"),
        ({"seam_repair": -1}, "seam_repair=-1"),
    ):
        monkeypatch.undo()
        with pytest.raises(InputError, match=match):
            edit_in_splice(organism, signal[:1], **{**OPTIONS, **options})
    with pytest.raises(InputError, match="no pairs"):
        edit_in_splice(organism, [], **OPTIONS)
