"""Suffix concentration: rankings that have not seen the pair, curves that end where they must."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from kvnotes_interp import probes, tasks
from kvnotes_interp.metrics import Competence
from kvnotes_interp.model import Model
from kvnotes_interp.probes import concentration, measure
from kvnotes_interp.results import Result
from kvnotes_interp.tasks import Pair
from tests.probes.conftest import LENIENT


@pytest.fixture(scope="module")
def result(model: Model, pairs: list[Pair]) -> Result:
    return probes.suffix_concentration(model, pairs, draws=2, **LENIENT)


@pytest.fixture(scope="module")
def good(result: Result) -> pd.DataFrame:
    return result.frame[result.frame["readout"] == "recovery"]


def test_every_curve_ends_at_all_of_the_downstream(model: Model, pairs: list[Pair], good: pd.DataFrame) -> None:
    states = probes.local_patching(model, pairs, views=(), **LENIENT).frame
    states = states[
        (states["readout"] == "recovery") & (states["site"] == "downstream_only") & (states["part"] == "kv")
    ]
    want = states.set_index("pair")["value"]
    curves = good[good["view"] == "cumulative"]
    ends = curves.loc[curves.groupby(["pair", "ranking", "draw"], dropna=False)["k"].idxmax()]
    assert set(ends["ranking"]) == set(concentration.RANKINGS)
    np.testing.assert_allclose(ends["value"], ends["pair"].map(want), atol=1e-8)
    windows = good[(good["view"] == "window") & good["site"].str.endswith(":100%")]
    np.testing.assert_allclose(windows["value"], windows["pair"].map(want), atol=1e-8)


def test_the_first_of_the_same_pair_ranking_is_the_best_position(good: pd.DataFrame) -> None:
    best = good[good["view"] == "position"].groupby("pair")["value"].max()
    first = good[(good["ranking"] == "same_pair") & (good["k"] == 1)].set_index("pair")["value"]
    np.testing.assert_allclose(first, best.loc[first.index], atol=1e-9)


def test_other_pairs_never_sees_a_pair_of_its_own_content(model: Model, pairs: list[Pair]) -> None:
    """Effects planted on the pair itself, and on a pair of the same content, must not move its ranking."""
    encoded, _ = tasks.encode_all(model.tokenizer, pairs)
    pair, other = encoded[0], next(e for e in encoded if e.pair.content != encoded[0].pair.content)
    case = measure.open_case(model, pair, competence=Competence(0, 0), sweeper=measure.Sweeper())
    where = measure.downstream_of(pair)

    def effects(source: str, content: str, favourite: int) -> pd.DataFrame:
        return pd.DataFrame(
            {
                "pair": source,
                "content": content,
                "anchor": [pair.anchors[p] for p in where],
                "position": where,
                "value": [1.0 if p == favourite else 0.0 for p in where],
            }
        )

    planted = pd.concat(
        [
            effects(pair.pair.key, pair.pair.content, where[1]),
            effects("a twin", pair.pair.content, where[1]),
            effects(other.pair.key, other.pair.content, where[3]),
        ]
    )
    rankings = concentration.rankings_of(case, planted)
    assert rankings["other_pairs"][0] == where[3]
    assert rankings["same_pair"][0] == where[1]
    assert rankings["bottom"][-1] == where[3]
    for order in rankings.values():
        assert sorted(order) == list(where)


def test_the_attention_ranking_is_the_old_runs_attention(model: Model, pairs: list[Pair]) -> None:
    from tests.architectures import build

    encoded, _ = tasks.encode_all(model.tokenizer, pairs)
    case = measure.open_case(model, encoded[0], competence=Competence(0, 0), sweeper=measure.Sweeper())
    empty = pd.DataFrame({"pair": [], "content": [], "anchor": [], "position": [], "value": []})
    where = measure.downstream_of(encoded[0])
    planted = pd.DataFrame({**{c: [""] * len(where) for c in empty}, "position": where, "value": 0.0})
    planted["pair"] = encoded[0].pair.key
    import torch

    eager = build("llama", attn="eager", seed=6, vocab=len(model.tokenizer))
    ids = torch.tensor([encoded[0].old_ids])
    weights = torch.stack(eager(input_ids=ids, output_attentions=True).attentions)[:, 0, :, -1].mean(dim=(0, 1))
    want = sorted(where, key=lambda p: -float(weights[p]))
    assert concentration.rankings_of(case, planted)["attention"] == want


@pytest.mark.parametrize("n", [1, 2, 7, 12, 13, 40, 300])
def test_the_grid_rises_to_n(n: int) -> None:
    ks = concentration.grid(n)
    assert ks[0] == 1
    assert ks[-1] == n
    assert ks == sorted(set(ks))
    assert set(range(1, min(n, 12) + 1)) <= set(ks)


def test_k_for_half_is_read_off_the_curve() -> None:
    curve = pd.DataFrame(
        {
            "pair": ["a"] * 3 + ["b"] * 3,
            "content": ["x"] * 3 + ["y"] * 3,
            "k": [1, 2, 4] * 2,
            "value": [0.2, 0.6, 1.0, 0.55, 0.4, 0.95],
        }
    )
    half = concentration._first_k(curve, 0.5).set_index("pair")["value"]
    assert half.to_dict() == {"a": 2.0, "b": 1.0}
    # Of b's own 0.95, not of 1: every pair gets there.
    assert concentration._first_k(curve, 0.97).set_index("pair")["value"].to_dict() == {"a": 4.0, "b": 4.0}
    assert concentration._at(curve, 3)["value"].tolist() == [0.6, 0.4]


def test_thirds_cover_every_layer_once(model: Model, pairs: list[Pair]) -> None:
    encoded, _ = tasks.encode_all(model.tokenizer, pairs[:1])
    layers = [layer for _, site in concentration.thirds(encoded[0], 32) for layer in site.layers or ()]
    assert layers == list(range(32))
