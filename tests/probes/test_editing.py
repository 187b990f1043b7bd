"""The editing frontier on organisms, where every number is known, and its tables, controls and picture."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

import kvnotes_interp as kv
from kvnotes_interp.errors import ControlError, InputError
from kvnotes_interp.probes.editing import frontier
from kvnotes_interp.probes.editing.thought import named_last

SMALL: dict[str, Any] = {"ks": (1, 4), "rankings": ("causal", "random"), "wordings": ("restate",), "progress": False}


@lru_cache(maxsize=2)
def result(name: str) -> kv.Result:
    model = kv.load(f"organism:{name}", device="cpu")
    return kv.probes.edit_frontier(model, kv.tasks.load("signal", n=6, seed=4), **SMALL)


def mean(found: kv.Result, arm: str, readout: str) -> float:
    rows = found.frame
    return float(rows.loc[(rows["arm"] == arm) & (rows["readout"] == readout), "value"].mean())


def test_on_notes_the_field_does_nothing_and_four_positions_do_all() -> None:
    found = result("notes")
    want = {"stale": 0, "field_only": 0, "full_downstream": 1, "oracle": 1, "recompute_top_4_causal": 1}
    for arm, recovery in want.items():
        assert mean(found, arm, "recovery") == pytest.approx(recovery, abs=1e-5), arm
        assert mean(found, arm, "correct") == recovery
    assert mean(found, "oracle", "kl") == 0
    assert mean(found, "oracle", "share") == 1
    assert mean(found, "stale", "share") == 0
    assert mean(found, "recompute_top_4_random", "recovery") < 0.7  # the control: positions at random


def test_on_direct_the_field_is_enough_and_the_rest_does_nothing_more() -> None:
    found = result("direct")
    assert mean(found, "field_only", "recovery") == pytest.approx(1, abs=1e-5)
    assert mean(found, "recompute_top_1_random", "recovery") == pytest.approx(1, abs=1e-5)


def test_costs_in_the_table_are_those_of_the_operators() -> None:
    found = result("notes")
    pairs = found.pairs.set_index("pair")
    rows = found.frame[found.frame["readout"] == "tokens"]
    for _, row in rows[rows["site"] == "recompute_top_k"].iterrows():
        pair = pairs.loc[row["pair"]]
        assert row["value"] == row["k"] + pair["field_stop"] - pair["field_start"]
    assert mean(found, "oracle", "tokens") == (pairs["length"] - 1).mean()
    seconds = found.frame.loc[found.frame["readout"] == "seconds", "value"]
    assert (seconds > 0).all()


def test_the_result_draws_saves_and_comes_back(tmp_path: Any) -> None:
    found = result("notes")
    assert found.plots()[0] == "frontier"
    for readout in ("correct", "recovery", "agreement"):
        assert len(found.plot("frontier", readout=readout).data) >= 6
    with pytest.raises(InputError, match="readout='kl'"):
        found.plot("frontier", readout="kl")
    found.save(tmp_path / "run", figures=False)
    back = kv.Result.load(tmp_path / "run")
    assert back.frame.equals(found.frame)
    assert "erratum_no_op" in set(back.summary().rows["quantity"])


def test_a_recompute_that_is_not_a_prefill_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvnotes_interp.operators import edits

    broken = edits.Edit("full_downstream", edits.states.stale, "")
    monkeypatch.setitem(edits.EDITS, "full_downstream", broken)
    model = kv.load("organism:notes", device="cpu")
    with pytest.raises(ControlError, match="full_downstream = oracle"):
        kv.probes.edit_frontier(model, kv.tasks.load("signal", n=1, seed=4), **SMALL)


def test_arithmetic_per_layer_token_is_that_of_the_matrices() -> None:
    model = kv.load("organism:notes", device="cpu")
    layer = model.hf.model.layers[0]
    weights = sum(p.numel() for p in layer.parameters() if p.ndim == 2)
    assert frontier.flops_per_layer_token(model, 0) == 2 * weights
    more = frontier.flops_per_layer_token(model, 10) - frontier.flops_per_layer_token(model, 0)
    assert more == 2 * 2 * 10 * model.shape.n_heads * model.shape.d_head  # scores and their sum of values


def test_wrong_options_are_refused_by_name() -> None:
    model = kv.load("organism:notes", device="cpu")
    pairs = kv.tasks.load("signal", n=1)
    with pytest.raises(InputError, match="rankings holds 'causl'"):
        kv.probes.edit_frontier(model, pairs, rankings=("causl",))
    with pytest.raises(InputError, match="wordings is empty"):
        kv.probes.edit_frontier(model, pairs, wordings=())


def test_over_many_turns_the_grown_cache_is_the_prefill_and_on_direct_the_last_word_decides() -> None:
    model = kv.load("organism:direct", device="cpu")
    found = kv.probes.edit_frontier(model, kv.tasks.load("signal", n=3, seed=4), turns=4, **SMALL)
    rows = found.frame[found.frame["view"] == "horizon"]
    assert set(rows["k"]) == {1, 2, 3, 4}
    assert rows.loc[rows["readout"] == "gap", "value"].max() < 1e-4
    lengths = rows[rows["readout"] == "length"].groupby("k")["value"].mean()
    assert lengths.is_monotonic_increasing
    assert {"horizon_first_half", "horizon_second_half"} <= set(found.summary().rows["quantity"])


def test_a_thought_is_written_on_the_edited_cache_and_counted() -> None:
    model = kv.load("organism:direct", device="cpu")
    found = kv.probes.edit_frontier(model, kv.tasks.load("signal", n=3, seed=4), thought_tokens=5, **SMALL)
    rows = found.frame[found.frame["view"] == "thought"]
    assert set(rows["site"]) == {"stale", "field_only", "oracle", "erratum", "field_erratum"}
    assert rows.loc[rows["readout"] == "thought_tokens", "value"].max() <= 5
    both = rows[rows["readout"] == "logit_diff"].pivot_table(index="pair", columns="site", values="value")
    # The decision reads the field itself, and what is written between does not see it.
    assert both["oracle"].to_numpy() == pytest.approx(both["field_only"].to_numpy(), abs=1e-4)
    assert abs(both["oracle"] - both["stale"]).max() > 1e-2


def test_the_answer_that_a_text_names_last() -> None:
    assert named_last("He went. Then she left.", " he", " she") == "new"
    assert named_last("She, no: he.", " he", " she") == "old"
    assert named_last("The shelter.", " he", " she") is None


@pytest.mark.slow
def test_on_a_real_model_errata_that_say_nothing_change_nothing(smollm2: Any) -> None:
    found = kv.probes.edit_frontier(
        smollm2, kv.tasks.pronoun(n=4, seed=0), ks=(8,), rankings=("causal", "random"), progress=False
    )
    assert mean(found, "full_downstream", "recovery") == pytest.approx(1, abs=1e-3)
    assert abs(mean(found, "erratum_no_op", "recovery")) < abs(mean(found, "erratum", "recovery")) + 1
    assert mean(found, "patch_top_8_causal", "recovery") > mean(found, "field_only", "recovery")
    assert torch.isfinite(torch.tensor(found.frame["value"].to_numpy(float))).all()
