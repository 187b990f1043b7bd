"""The whole probe on tiny models: complete, resumable, and right where the mechanism is known by construction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import kvnotes_interp as kv
from kvnotes_interp import tasks
from kvnotes_interp.errors import InputError
from kvnotes_interp.model import Model
from kvnotes_interp.probes import circuit
from kvnotes_interp.probes.circuit import ablation, ranking
from kvnotes_interp.results import Result
from kvnotes_interp.tasks import Pair

SMALL: dict[str, Any] = {"notes": 3, "draws": 2, "donors": 1, "grid_pairs": 1, "ks": (1, 3), "progress": False}


@pytest.fixture(scope="module")
def mixed() -> Model:
    """Half of its heads take notes, the other half read the field: every analysis has something to find."""
    return kv.load("organism:mixed")


@pytest.fixture(scope="module")
def signals() -> list[Pair]:
    return tasks.load("signal", n=4, seed=0)


@pytest.fixture(scope="module")
def result(mixed: Model, signals: list[Pair]) -> Result:
    return circuit.circuit_ablation(mixed, signals, ablations=("resample", "mean", "zero"), **SMALL)


def good(result: Result, **where: Any) -> pd.DataFrame:
    frame = result.frame[result.frame["readout"] == where.pop("readout", "recovery")]
    for column, value in where.items():
        frame = frame[(frame[column] == value).fillna(False)]
    return frame


def test_every_view_is_there_for_every_competent_pair(result: Result) -> None:
    competent = set(result.pairs.loc[result.pairs["competent"].astype(bool), "pair"])
    assert len(competent) == 4
    for view in ("state", "position", "knockout", "edge", "read_curve", "write_curve", "write_share", "scrub", "dose"):
        assert set(good(result, view=view)["pair"]) == competent, view
    assert set(good(result, view="write_head", readout="change")["pair"]) == competent
    assert "z" not in result.frame.columns
    controls = {c.name for c in result.summary().controls}
    assert {"everything", "cut_everything", "all_heads", "all_writes", "write_all_heads", "writes_all"} <= controls
    assert result.summary().passed
    curve = good(result, view="read_curve", site="ablated")
    assert set(curve["ablation"]) == {"resample", "mean", "zero"}


def test_means_are_over_pairs_with_draws_averaged_first(result: Result) -> None:
    rows = good(result, view="read_curve", site="patched", ranking="random", k=3)
    want = rows.groupby("pair")["value"].mean().mean()
    summary = result.summary().rows.set_index("quantity")["mean"]
    assert summary["read_top3_random"] == pytest.approx(want)
    assert summary["dla_heads"] + summary["dla_mlps"] == pytest.approx(
        1
        - good(result, readout="dla_share", site="rest").groupby("pair")["value"].sum().mean()
        - good(result, readout="dla_share", site="embedding").groupby("pair")["value"].sum().mean()
    )


def test_the_ranked_heads_beat_random_ones_on_the_pair_they_are_ranked_on(result: Result) -> None:
    top = good(result, view="read_curve", site="patched", ranking="same_pair", k=3).groupby("pair")["value"].mean()
    chance = good(result, view="read_curve", site="patched", ranking="random", k=3).groupby("pair")["value"].mean()
    assert (top - chance).mean() > 0.1


def test_halves_are_of_contents_and_do_not_overlap() -> None:
    half = ranking.halves(["b", "a", "c", "a", "d"])
    assert half == {"a": 0, "b": 1, "c": 0, "d": 1}


def test_a_single_content_cannot_be_ranked_on_others(mixed: Model, signals: list[Pair], result: Result) -> None:
    competent = set(result.pairs.loc[result.pairs["competent"].astype(bool), "pair"])
    one = [p for p in signals if p.key in competent][:1]
    alone = circuit.circuit_ablation(mixed, one, analyses=("read_heads", "write_heads", "dose"), **SMALL)
    assert set(good(alone, view="read_curve")["ranking"]) == {"same_pair", "random"}
    assert good(alone, view="dose").empty
    assert good(alone, view="write_curve").empty
    rows = alone.summary().rows.set_index("quantity")
    assert rows.loc["write_frozen_top3", "n"] == 0
    assert "no pair" in rows.loc["read_top3", "note"]


def test_a_killed_run_goes_on_to_the_same_table(
    mixed: Model, signals: list[Pair], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, options = signals[:3], {**SMALL, "analyses": ("read_heads", "write_heads"), "grid_pairs": 0}
    whole = circuit.circuit_ablation(mixed, few, out=tmp_path / "whole", **options)
    right, calls = ablation._ranked, iter(range(100))

    def dies(*args: Any) -> Any:
        if next(calls) == 1:
            raise KeyboardInterrupt
        return right(*args)

    monkeypatch.setattr(ablation, "_ranked", dies)
    with pytest.raises(KeyboardInterrupt):
        circuit.circuit_ablation(mixed, few, out=tmp_path / "killed", **options)
    monkeypatch.setattr(ablation, "_ranked", right)
    circuit.circuit_ablation(mixed, few, out=tmp_path / "killed", resume=True, **options)
    assert (tmp_path / "killed/table.parquet").read_bytes() == (tmp_path / "whole/table.parquet").read_bytes()
    assert len(whole.frame)


def test_analyses_are_chosen_and_wrong_options_get_a_hint(mixed: Model, signals: list[Pair]) -> None:
    few = circuit.circuit_ablation(mixed, signals[:2], analyses=("knockout",), **SMALL)
    assert set(few.frame["view"]) == {"control", "state", "knockout", "edge", "edge_head", "attention"}
    with pytest.raises(InputError, match=r"analyses holds 'knokout'.* Did you mean \"knockout\""):
        circuit.circuit_ablation(mixed, signals, analyses=("knokout",), **SMALL)
    with pytest.raises(InputError, match=r"ablations holds 'man'.* Did you mean \"mean\""):
        circuit.circuit_ablation(mixed, signals, ablations=("man",), **SMALL)
    with pytest.raises(InputError, match=r"ks=\(0, 3\)"):
        circuit.circuit_ablation(mixed, signals, **{**SMALL, "ks": (0, 3)})
    with pytest.raises(InputError, match="notes=0"):
        circuit.circuit_ablation(mixed, signals, **{**SMALL, "notes": 0})


def test_dissociation_is_the_states_of_a_pair_whose_field_is_a_trigger(mixed: Model, signals: list[Pair]) -> None:
    """On any pair the arms are defined: they must be those of local patching, and their joint the oracle."""
    found = circuit.dissociation(mixed, signals, notes=3, draws=2, progress=False)
    states = kv.probes.local_patching(mixed, signals, views=(), parts=("kv",), progress=False)
    rows, want = (r.summary().rows.set_index("quantity")["mean"] for r in (found, states))
    assert rows["trigger_only"] == pytest.approx(want["field_only"], abs=1e-5)
    assert rows["all_notes"] == pytest.approx(want["downstream_only"], abs=1e-5)
    assert rows["trigger_and_notes"] == pytest.approx(1.0, abs=1e-5)
    assert found.summary().passed


@pytest.mark.parametrize(
    ("name", "read", "unread"), [("notes", "downstream", "field"), ("direct", "field", "downstream")]
)
def test_edges_of_organisms_are_as_they_were_built(name: str, read: str, unread: str) -> None:
    """Everything new: cutting off what is not read changes next to nothing, and cutting off what is read does.

    The field has no edge at all in `notes`. In `direct` the other keys get a little attention, which a cut gives back.
    """
    found = circuit.circuit_ablation(
        kv.load(f"organism:{name}"),
        tasks.load("signal", n=3, seed=0),
        analyses=("knockout",),
        grid_pairs=0,
        draws=2,
        progress=False,
    )
    edge = good(found, view="edge", base="oracle", ranking="chosen").groupby("site")["value"]
    assert (edge.get_group(read) - 1).abs().min() > 0.2
    np.testing.assert_allclose(edge.get_group(unread), 1.0, atol=1e-4 if name == "notes" else 0.1)
    mass = good(found, view="attention", base="oracle", readout="mass").groupby("site")["value"].max()
    assert mass["field"] == 0.0 if name == "notes" else mass["field"] > 0.1


def test_in_the_mixed_organism_only_the_direct_heads_read_the_field(mixed: Model, result: Result) -> None:
    cut = good(result, view="edge_head", site="field")
    moved = (cut["value"] - 1).abs().groupby(cut["head"].astype(int)).max()
    half = mixed.shape.n_heads // 2
    assert (moved[:half] < 1e-4).all()
    assert (moved[half:] > 1e-3).any()


@pytest.mark.slow
def test_on_smollm2_the_note_is_read_and_written_by_few_heads(smollm2: Any) -> None:
    found = circuit.circuit_ablation(
        smollm2,
        tasks.pronoun(n=6, seed=0),
        analyses=("knockout", "read_heads", "write_heads"),
        grid_pairs=0,
        draws=2,
        progress=False,
    )
    rows = found.summary().rows.set_index("quantity")["mean"]
    assert found.summary().passed
    assert rows["cut_downstream_field_only"] > rows["field_only"] + 0.3
    assert rows["cut_top25"] > rows["cut_top25_random"]
    assert rows["read_top12"] > 0.3 > rows["read_top12_random"]
    assert rows["write_frozen_top12"] > 0.3 > rows["write_frozen_top12_random"]
