"""Figures of a circuit ablation: what is drawn is what the rows hold."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pandas as pd
import pytest

from kvnotes_interp.errors import InputError
from kvnotes_interp.plots import _head_grid, export
from kvnotes_interp.results import Result, Summary

N_LAYERS, N_HEADS, N_PAIRS = 4, 3, 6
KINDS = ("read_heads", "write_heads", "edge_heads", "head_curve", "knockout", "edges", "scrub", "dose")


def draw(result: Result, kind: str, **options: Any) -> Any:
    return importlib.import_module(f"kvnotes_interp.plots.{kind}").draw(result, **options)


@pytest.fixture(scope="module")
def result() -> Result:
    rng = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    pairs = []
    for index in range(N_PAIRS):
        competent = index != 5
        pair = {"pair": f"p{index}", "content": f"c{index % 3}", "family": "pronoun"}
        pairs.append({**pair, "competent": competent, "s_old": -2.0, "s_new": 2.0})

        def add(value: float, pair: dict[str, Any] = pair, **more: Any) -> None:
            rows.append({**pair, "readout": "recovery", **more, "value": float(value)})

        for layer in range(N_LAYERS):
            for head in range(N_HEADS):
                at = {"layer": layer, "head": head}
                best = 0.5 if (layer, head) == (2, 1) else 0.01
                add(best + 0.1 * index, view="read_head", site="head", readout="dla_share", **at)
                add(best * 2, view="read_head", site="patched", part="kv", **at)
                add(best, view="write_head", site="head", readout="change", size=8, **at)
                for site in ("field", "downstream"):
                    add(1 - best, view="edge_head", site=site, part="kv", **at)
        for k in (1, 3, 5):
            for ranking, slope in (("other_half", 0.15), ("same_pair", 0.18), ("random", 0.01)):
                for view, site in (("read_curve", "patched"), ("write_curve", "frozen"), ("write_curve", "recomputed")):
                    for draw_ in range(2 if ranking == "random" else 1):
                        add(slope * k, view=view, site=site, ranking=ranking, k=k, draw=draw_, part="kv")
        add(0.99, view="write_curve", site="frozen", ranking="all", k=12, part="kv")
        for share in (0.0, 0.25, 1.0):
            for readout in ("recovery", "p_new", "flip"):
                here = {"view": "knockout", "share": share, "readout": readout, "part": "kv", "k": int(20 * share)}
                add(0.1 + 0.8 * share, ranking="attention", band="all", **here)
                if share == 0.25:
                    for band in ("early", "mid", "late"):
                        add(0.2, ranking="attention", band=band, **here)
                    for draw_ in range(2):
                        add(0.15, ranking="random", band="all", draw=draw_, **here)
        for base in ("field_only", "oracle"):
            add(1.0, view="edge", site="none", base=base, part="kv")
            for site in ("field", "downstream", "sink"):
                add(0.8, view="edge", site=site, base=base, ranking="chosen", part="kv")
                add(0.9 + rng.normal(0, 0.01), view="edge", site=site, base=base, ranking="random", draw=0, part="kv")
        for site, value in (("same_note", 0.02), ("opposite_note", 0.8), ("opposite_rest", 0.2)):
            add(value, view="scrub", site=site, ranking="other_half", size=8, part="kv")
            add(value / 2, view="scrub", site=site, ranking="random", size=8, draw=1, part="kv")
        for k in (1, 4, 20):
            for ranking in ("other_half", "random"):
                for readout in ("flip", "recovery"):
                    add(min(1, 0.2 * k), view="dose", site="to_new", ranking=ranking, k=k, readout=readout, part="kv")
    frame = pd.DataFrame(rows)
    summary = Summary.of("t", [{"quantity": "q", "mean": 0.0}], counts={"n_tried": 6, "n_competent": 5})
    manifest = {"request": {"model": {"name": "smollm2-135m"}}}
    return Result.build(
        probe="circuit_ablation", frame=frame, pairs=pd.DataFrame(pairs), summary=summary, manifest=manifest
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_draws_the_same_twice_and_carries_its_data(result: Result, kind: str) -> None:
    fig = draw(result, kind)
    assert fig.layout.meta["kind"] == kind
    assert len(export.data_of(fig))
    assert "smollm2-135m" in fig.layout.title.text
    assert fig.to_json() == draw(result, kind).to_json()


def test_maps_hold_the_mean_over_competent_pairs(result: Result) -> None:
    fig = draw(result, "read_heads")
    assert [trace.z.shape for trace in fig.data] == [(N_LAYERS, N_HEADS)] * 2
    assert fig.data[0].z[2][1] == pytest.approx(0.5 + 0.1 * 2)  # the mean of 0 to 4; pair 5 is not competent
    assert fig.data[1].z[2][1] == pytest.approx(1.0)
    assert len(draw(result, "read_heads", patched=False).data) == 1
    assert "2.1" in [a.text for a in fig.layout.annotations]
    table = export.data_of(draw(result, "edge_heads"))
    lost = table[(table["layer"] == 2) & (table["head"] == 1)]["mean"]
    assert lost.tolist() == pytest.approx([0.5, 0.5])


def test_a_head_that_was_not_measured_is_a_hole() -> None:
    rows = pd.DataFrame({"layer": [0, 1], "head": [0, 2], "value": [0.3, 0.7]})
    grid = _head_grid.grid_of(rows)
    assert grid.shape == (2, 3)
    assert np.isnan(grid).sum() == 4
    assert grid[1, 2] == 0.7


def test_curves_hold_every_ranking_and_take_the_mode(result: Result) -> None:
    table = export.data_of(draw(result, "head_curve"))
    read = table[table["panel"] == "read_curve"].set_index(["ranking", "k"])["mean"]
    assert read["other_half", 3] == pytest.approx(0.45)
    assert read["random", 5] == pytest.approx(0.05)
    assert set(table["panel"]) == {"read_curve", "write_curve"}
    assert set(table["ranking"]) == {"other_half", "same_pair", "random"}
    with pytest.raises(InputError, match="write='frosen'"):
        draw(result, "head_curve", write="frosen")


def test_knockout_and_dose_take_a_readout(result: Result) -> None:
    table = export.data_of(draw(result, "knockout", readout="p_new"))
    here = table[(table["ranking"] == "attention") & (table["band"] == "all")].set_index("percent")["mean"]
    assert here.to_dict() == pytest.approx({0.0: 0.1, 25.0: 0.3, 100.0: 0.9})
    with pytest.raises(InputError, match=r"readout='flips'.* Did you mean \"flip\""):
        draw(result, "knockout", readout="flips")
    with pytest.raises(InputError, match="readout='p'"):
        draw(result, "dose", readout="p")
    assert draw(result, "dose", readout="recovery").layout.yaxis.title.text.startswith("Recovery")
