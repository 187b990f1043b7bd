"""Read heads: every patch against hooks on the model's own projections; all heads are the new run exactly."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
import torch

from kvnotes_interp.errors import ControlError
from kvnotes_interp.probes.circuit import decide, read_heads
from kvnotes_interp.probes.circuit.attribution import record
from kvnotes_interp.probes.circuit.decide import Row
from kvnotes_interp.probes.measure import Case
from tests.probes.circuit.by_hand import head_outputs, heads_replaced, score
from tests.probes.circuit.conftest import NAMES

CaseOf = Callable[[str], Case]


@pytest.mark.parametrize("name", NAMES)
def test_patches_are_those_of_hooks_on_the_output_projections(case_of: CaseOf, name: str) -> None:
    case = case_of(name)
    hf, n_heads = case.model.hf, case.model.shape.n_heads
    new_z = head_outputs(hf, case.pair.new_ids, n_heads)
    last = [case.pair.length - 1]
    # In sliding layers the first ones see nothing that differs.
    sets = [[(2, 1)], [(1, 0), (2, 3)], [(0, 0), (0, 2), (1, 1), (2, 2)]]
    _, new = read_heads.both_runs(case)
    got = decide.decide(case, [Row(case.base, heads=s, outputs=record(new.heads)[:, 0]) for s in sets])
    want = []
    for heads in sets:
        with heads_replaced(hf, new_z, heads, last, n_heads):
            want.append(score(hf, case.pair.old_ids, case.answers))
    assert got == pytest.approx(want, abs=1e-8)
    assert len({round(s, 6) for s in [*got, case.old]}) == 4


@pytest.mark.parametrize("name", NAMES)
def test_all_heads_of_the_new_run_are_the_new_run(case_of: CaseOf, name: str) -> None:
    rows = read_heads.controls(case_of(name), *read_heads.both_runs(case_of(name)))
    gaps = rows[rows["readout"] == "gap"].set_index("site")["value"]
    assert set(gaps.index) == {"no_heads", "own_heads", "all_heads", "all_writes"}
    assert (gaps < 1e-9).all()


def test_a_layer_left_out_fails_a_control_that_names_a_layer(case_of: CaseOf, monkeypatch: pytest.MonkeyPatch) -> None:
    right = decide.head_patch

    def forgets(*args: Any) -> Any:
        patch = right(*args)
        keep = {layer: t for layer, t in patch.take.items() if layer != 1} if patch else {}
        return patch and dataclasses.replace(patch, outputs={i: patch.outputs[i] for i in keep}, take=keep)

    monkeypatch.setattr(decide, "head_patch", forgets)
    case = case_of("llama")
    with pytest.raises(ControlError, match=r"control 'all_heads' failed on tiny-llama .* layer \d is furthest off"):
        read_heads.controls(case, *read_heads.both_runs(case))


def test_ablations_are_named_for_what_stands_in(case_of: CaseOf) -> None:
    """Zero, mean and resample of one head in the new run, each against a hook."""
    case = case_of("qwen3")
    hf, n_heads = case.model.hf, case.model.shape.n_heads
    last, n_layers = case.pair.length - 1, case.model.shape.n_layers
    shares = _planted(case, best=(1, 2))
    z = [torch.full((last + 1, n_heads, 16), 0.25, dtype=torch.float64) for _ in range(n_layers)]
    kept = [{"pair": "x", "content": "other", "layer": i, "z": z[i][0].flatten().tolist()} for i in range(n_layers)]
    kept += [{"pair": "y", "content": case.pair.pair.content, "layer": i, "z": [9.0] * 64} for i in range(n_layers)]
    rows = read_heads.curves(
        case, shares, ks=(1,), draws=0, seed=0, ablations=read_heads.ABLATIONS, outputs=pd.DataFrame(kept)
    )
    rows = rows[(rows["readout"] == "logit_diff") & (rows["ranking"] == "other_half") & (rows["site"] == "ablated")]
    got = rows.set_index("ablation")["value"].to_dict()
    stand_in = {
        "resample": head_outputs(hf, case.pair.old_ids, n_heads),
        "mean": z,
        "zero": [torch.zeros_like(t) for t in z],
    }
    for name, outputs in stand_in.items():
        with heads_replaced(hf, outputs, [(1, 2)], [last], n_heads):
            assert got[name] == pytest.approx(score(hf, case.pair.new_ids, case.answers), abs=1e-8), name


def _planted(case: Case, *, best: tuple[int, int]) -> pd.DataFrame:
    """Attributions in which the pair's own content favours head (0, 0) and the other content `best`."""
    rows = []
    for content, favourite in ((case.pair.pair.content, (0, 0)), ("other", best)):
        for layer in range(case.model.shape.n_layers):
            for head in range(case.model.shape.n_heads):
                value = 1.0 if (layer, head) == favourite else 0.0
                pair = case.pair.pair.key if content != "other" else "x"
                rows.append({"pair": pair, "content": content, "layer": layer, "head": head, "value": value})
    return pd.DataFrame(rows)


def test_a_ranking_never_sees_the_pairs_own_content(case_of: CaseOf) -> None:
    case = case_of("llama")
    sets = read_heads.head_sets(case, _planted(case, best=(2, 1)), ks=(1, 99), draws=2, seed=0, name="read")
    top = {about["ranking"]: heads for about, heads in sets if about["k"] == 1}
    assert top["other_half"] == [(2, 1)]
    assert top["same_pair"] == [(0, 0)]
    # k stops at the number of heads, and a draw's larger sets hold its smaller ones.
    assert {about["k"] for about, _ in sets} == {1, 12}
    draws = {about["draw"]: heads for about, heads in sets if about["ranking"] == "random" and about["k"] == 12}
    assert all(sorted(heads) == read_heads.every_head(case) for heads in draws.values())
    assert draws[0] != draws[1]


def test_attributions_of_a_pair_sum_to_one(case_of: CaseOf) -> None:
    case = case_of("gemma3")
    rows = read_heads.attributions(case, *read_heads.both_runs(case))
    shares = rows[rows["readout"] == "dla_share"]
    assert shares["value"].sum() == pytest.approx(1.0, abs=1e-9)
    assert rows[rows["readout"] == "dla"]["value"].sum() == pytest.approx(case.new - case.old, abs=1e-6)
