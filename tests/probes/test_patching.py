"""Local patching: every number against a patch made by hand, and controls that can fail."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from kvnotes_interp import engine, probes, tasks
from kvnotes_interp.errors import ControlError, InputError
from kvnotes_interp.model import Model
from kvnotes_interp.probes import measure
from kvnotes_interp.results import Result
from kvnotes_interp.tasks import EncodedPair, Pair
from tests.probes.conftest import LENIENT
from tests.reference import full_cache, full_logits, patched_logits


@pytest.fixture(scope="module")
def result(model: Model, pairs: list[Pair]) -> Result:
    return probes.local_patching(model, pairs, map_pairs=40, draws=3, **LENIENT)


def by_hand(model: Model, pair: EncodedPair, positions: Any, layers: Any, part: str) -> float:
    """Recovery of one patch, from plain forwards on cloned caches."""
    old, new = torch.tensor([pair.old_ids]), torch.tensor([pair.new_ids])
    n = old.shape[1] - 1
    answers = [pair.answer_old_id, pair.answer_new_id]

    def score(logits: torch.Tensor) -> float:
        row = logits.reshape(-1, logits.shape[-1])[-1][answers]
        return float(row[1] - row[0])

    patched = patched_logits(
        model.hf,
        full_cache(model.hf, old[:, :n]),
        full_cache(model.hf, new[:, :n]),
        layers=layers,
        positions=positions,
        part=part,
        kv_heads=None,
        tail_ids=old[:, n:],
        tail_positions=torch.tensor([n]),
    )
    s_old, s_new = score(full_logits(model.hf, old)), score(full_logits(model.hf, new))
    return (score(patched) - s_old) / (s_new - s_old)


def recovery(result: Result, **where: Any) -> pd.DataFrame:
    frame = result.frame[result.frame["readout"] == "recovery"]
    for column, value in where.items():
        frame = frame[frame[column] == value]
    return frame


def test_numbers_are_those_of_a_patch_made_by_hand(model: Model, pairs: list[Pair], result: Result) -> None:
    competent = list(result.pairs.loc[result.pairs["competent"], "pair"])
    assert len(competent) >= 3, "choose another seed: the random model changes its answer on too few pairs"
    encoded, _ = tasks.encode_all(model.tokenizer, pairs)
    pair = next(p for p in encoded if p.pair.key == competent[0])
    field, downstream = measure.field_of(pair), measure.downstream_of(pair)
    cells = [
        ({"view": "state", "site": "field_only", "part": "kv"}, field, None),
        ({"view": "state", "site": "downstream_only", "part": "kv"}, downstream, None),
        ({"view": "state", "site": "downstream_only", "part": "k"}, downstream, None),
        ({"view": "state", "site": "field_only", "part": "v"}, field, None),
        ({"view": "position", "part": "kv", "position": downstream[2]}, downstream[2:3], None),
        ({"view": "position", "part": "v", "position": field[0]}, field[:1], None),
        ({"view": "layer", "site": "downstream", "layer": 1}, downstream, [1]),
        ({"view": "layer_position", "layer": 2, "position": downstream[-1]}, downstream[-1:], [2]),
    ]
    for where, positions, layers in cells:
        got = recovery(result, pair=pair.pair.key, **where)["value"]
        assert len(got) == 1, where
        want = by_hand(model, pair, positions, layers, where.get("part", "kv"))
        assert float(got.iloc[0]) == pytest.approx(want, abs=1e-8), where


def test_field_and_downstream_is_the_oracle(result: Result) -> None:
    joint = recovery(result, view="state", site="field_and_downstream", part="kv")["value"]
    np.testing.assert_allclose(joint, 1.0, atol=1e-6)
    assert (recovery(result, view="state", site="stale")["value"] == 0).all()
    assert (recovery(result, view="state", site="oracle")["value"] == 1).all()


def test_interaction_is_what_the_parts_leave(result: Result) -> None:
    rows = result.summary().rows.set_index("quantity")["mean"]
    left = rows["field_and_downstream"] - rows["field_only"] - rows["downstream_only"]
    assert rows["interaction"] == pytest.approx(left, abs=1e-9)


def test_enrichment_averages_to_one_over_positions(result: Result) -> None:
    """Weighted by their share of positions, the enrichments of one pair's regions sum to 1."""
    from kvnotes_interp.probes.patching import _enrichment

    good = result.frame[result.frame["readout"] == "recovery"]
    groups = _enrichment(good)
    here = recovery(result, view="position", part="kv")
    total = 0.0
    pair = next(iter(groups.values()))["pair"].iloc[0]
    for name, rows in groups.items():
        region = name.removeprefix("enrichment_")
        mine = here[here["pair"] == pair]
        share = (mine["region"] == region).mean()
        total += float(rows.loc[rows["pair"] == pair, "value"].iloc[0]) * share
    assert total == pytest.approx(1.0)


def test_every_view_is_complete(model: Model, result: Result) -> None:
    row = result.pairs[result.pairs["competent"]].iloc[0]
    n = int(row["length"] - 1 - row["field_start"])
    here = recovery(result, pair=row["pair"])
    sizes = here.groupby("view").size()
    layers = model.shape.n_layers
    assert sizes["position"] == 3 * n
    assert sizes["layer_position"] == layers * n
    assert sizes["layer"] == 2 * layers
    assert sizes["random"] == 3
    assert set(here.loc[here["view"] == "random", "size"]) == {int(row["field_stop"] - row["field_start"])}


def test_controls_are_measured_and_reported(result: Result) -> None:
    controls = {c.name: c for c in result.summary().controls}
    assert set(controls) == {"no_patch", "self_patch", "everything", "before_field"}
    assert all(c.passed and c.n >= 3 for c in controls.values())
    assert result.manifest["noise_floor"] is not None
    assert result.manifest["sweep_path"] == ["shared"]


def test_a_broken_patch_fails_a_control(model: Model, pairs: list[Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    right = engine.sweep

    def keys_are_forgotten(model: Model, base: Any, donor: Any, sites: Any, *args: Any, **options: Any) -> Any:
        return right(model, base, donor, [dataclasses.replace(s, part="v") for s in sites], *args, **options)

    monkeypatch.setattr(engine, "sweep", keys_are_forgotten)
    with pytest.raises(ControlError, match=r"control 'everything' failed on tiny-llama .* layer \d"):
        probes.local_patching(model, pairs, views=(), **LENIENT)


def test_a_sweep_that_drifts_fails_a_control(model: Model, pairs: list[Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    right, calls = engine.sweep, iter(range(10_000))

    def drifts(*args: Any, **options: Any) -> Any:
        result = right(*args, **options)
        return dataclasses.replace(result, scores=result.scores + torch.tensor([0.0, 0.01 * next(calls)]))

    monkeypatch.setattr(engine, "sweep", drifts)
    with pytest.raises(ControlError, match="off by"):
        probes.local_patching(model, pairs, views=(), **LENIENT)


def test_pairs_that_do_not_flip_are_set_aside_and_counted(model: Model, pairs: list[Pair], result: Result) -> None:
    counts = result.summary().counts
    assert counts["n_tried"] == len(pairs) == counts["n_competent"] + sum(counts["set_aside"].values())
    good = result.pairs[result.pairs["competent"]]
    assert ((good["s_old"] < 0) & (good["s_new"] > 0)).all()
    assert set(result.frame["pair"]) == set(good["pair"])
    strict = probes.local_patching(model, pairs, views=(), **{**LENIENT, "min_gap": 1e9})
    data = strict.summary().to_dict()
    assert data["n_competent"] == 0
    assert data["set_aside"]["gap below minimum"] == counts["n_competent"]
    assert data["field_only"]["mean"] is None


def test_the_effective_n_is_the_number_of_contents(model: Model, pairs: list[Pair]) -> None:
    same = [dataclasses.replace(p, content="one") for p in pairs]
    row = probes.local_patching(model, same, views=(), **LENIENT).summary().rows.set_index("quantity").loc["field_only"]
    assert row["n"] >= 3
    assert row["n_effective"] == 1
    assert np.isnan(row["low"])


def test_both_sweep_paths_give_the_same_table(model: Model, pairs: list[Pair]) -> None:
    fast, plain = (probes.local_patching(model, pairs[:8], path=path, **LENIENT).frame for path in ("shared", "plain"))
    assert fast.drop(columns="value").equals(plain.drop(columns="value"))
    measured = fast["view"] != "control"
    np.testing.assert_allclose(fast["value"][measured], plain["value"][measured], atol=1e-8)


def test_a_stopped_run_resumes_to_the_same_bytes(
    model: Model, pairs: list[Pair], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**LENIENT, "draws": 2, "views": ("position", "random")}
    probes.local_patching(model, pairs, out=tmp_path / "whole", **options)
    measured: list[str] = []
    right = measure.identity_controls

    def stops(case: measure.Case) -> pd.DataFrame:
        measured.append(case.pair.pair.key)
        if len(measured) == 3:
            raise KeyboardInterrupt
        return right(case)

    monkeypatch.setattr("kvnotes_interp.probes.patching.identity_controls", stops)
    with pytest.raises(KeyboardInterrupt):
        probes.local_patching(model, pairs, out=tmp_path / "part", **options)
    with pytest.raises(InputError, match="unfinished run"):
        Result.load(tmp_path / "part")
    resumed = probes.local_patching(model, pairs, out=tmp_path / "part", resume=True, **options)
    assert len(measured) == len(set(measured)) + 1, "only the pair that was interrupted is measured again"
    whole, part = ((tmp_path / name / "table.parquet").read_bytes() for name in ("whole", "part"))
    assert whole == part
    again = probes.local_patching(model, pairs, out=tmp_path / "part", resume=True, **options)
    assert again.frame.equals(resumed.frame)
    with pytest.raises(InputError, match="draws"):
        probes.local_patching(model, pairs, out=tmp_path / "part", resume=True, **{**options, "draws": 9})


def test_a_control_family_has_no_recovery_and_says_so(model: Model, pairs: list[Pair]) -> None:
    as_control = [dataclasses.replace(p, kind="control") for p in pairs[:6]]
    summary = probes.local_patching(model, as_control, views=(), **LENIENT).summary()
    rows = summary.rows.set_index("quantity")
    assert 0 <= rows.loc["answer_kept", "mean"] <= 1
    assert rows.loc["field_only", "n"] == 0


def test_wrong_input_is_named(model: Model, pairs: list[Pair]) -> None:
    with pytest.raises(InputError, match='Did you mean "position"'):
        probes.local_patching(model, pairs, views=("positions",))
    with pytest.raises(InputError, match="'q' is none of"):
        probes.local_patching(model, pairs, parts=("q",))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="no pairs"):
        probes.local_patching(model, [])
    with pytest.raises(InputError, match="without a tokenizer"):
        probes.local_patching(dataclasses.replace(model, tokenizer=None), pairs)
