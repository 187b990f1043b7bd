"""The deviation map and the sink figure show the numbers of the frame, and leave out what they should."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from kvnotes_interp.errors import InputError
from kvnotes_interp.plots import deviation, deviation_curve, export, kv_angles, sink
from kvnotes_interp.results import Result, Summary

LAYERS, BINS = 4, 5
OPERATORS = ("full_recompute", "no_recompute", "other")
REGIONS = ("prefix", "interior", "suffix")


def made(*, zeros: bool = False) -> Result:
    """Six prompts of three contents; values are simple functions of where they stand."""
    rows: list[dict[str, Any]] = []
    pairs = []
    for index in range(6):
        names = {"pair": f"p{index}", "content": f"c{index // 2}", "family": "biography", "part": "kv"}
        pairs.append({**names, "competent": index != 5})
        for number, site in enumerate(OPERATORS):
            about = {**names, "site": site}
            scale = 0.0 if number == 0 or zeros else 0.01 * number * (1 + index)
            for readout in ("deviation", "deviation_raw"):
                for layer in range(LAYERS):
                    for place in range(BINS):
                        value = scale * (layer + 1) * (BINS - place)
                        at = {"layer": layer, "position": place, "relative": (place + 0.5) / BINS}
                        rows.append({**about, "view": "deviation", "readout": readout, **at, "value": value})
                for edge in (0.1, 0.2):
                    for i, region in enumerate(REGIONS):
                        rows.append(
                            {
                                **about,
                                **{"view": "region", "readout": readout, "edge": edge, "region": region},
                                "value": scale * (3 - i) * (1 + edge),
                            }
                        )
            for part, per_layer in (("k", 0.1), ("v", 0.2)):
                for layer in range(LAYERS):
                    at = {"part": part, "layer": layer, "position": 0, "value": number * per_layer * layer}
                    rows.append({**about, "view": "kv", "readout": "angle", **at})
            for block in (1, 2):
                for layer in range(LAYERS):
                    for readout, value in (("first_token", 0.3), ("leading", 0.2), ("middle", 0.1)):
                        value = value * (1 + number) if readout == "first_token" else value
                        at = {"layer": layer, "position": block}
                        rows.append({**about, "view": "sink", "readout": readout, **at, "value": value})
    return Result.build(
        probe="attention_deviation",
        frame=pd.DataFrame(rows),
        pairs=pd.DataFrame(pairs),
        summary=Summary.of("t", [{"quantity": "q", "mean": 0.0}], counts={}),
        manifest={"request": {"model": {"name": "smollm2-135m"}}},
    )


@pytest.fixture(scope="module")
def result() -> Result:
    return made()


def test_one_panel_per_operator_and_none_for_full_recompute(result: Result) -> None:
    fig = deviation.draw(result)
    maps = [trace for trace in fig.data if trace.type == "heatmap"]
    bars = [trace for trace in fig.data if trace.type == "bar"]
    assert len(maps) == len(bars) == 2
    assert [note.text for note in fig.layout.annotations[:2]] == ["no recompute", "other"]
    # Competent prompts 0 to 4: the mean of 1 + index is 3.
    want = 0.03 * np.outer(np.arange(1, LAYERS + 1), np.arange(BINS, 0, -1))
    np.testing.assert_allclose(np.array(maps[0].customdata, dtype=float), want)
    # Colours are powers of ten, and the lowest few cells share the lowest colour.
    np.testing.assert_allclose(10.0 ** np.array(maps[0].z, dtype=float), np.maximum(want, 10.0 ** maps[0].zmin))
    np.testing.assert_allclose(np.array(maps[1].customdata, dtype=float), 2 * want)
    assert list(maps[0].y) == list(range(LAYERS))
    np.testing.assert_allclose(maps[0].x, [0.1, 0.3, 0.5, 0.7, 0.9])
    # Every panel is on the same scale, and one colour bar says which.
    assert (maps[0].zmin, maps[0].zmax) == (maps[1].zmin, maps[1].zmax)
    assert [trace.showscale for trace in maps] == [False, True]


def test_bars_are_as_wide_as_their_regions_and_stand_over_them(result: Result) -> None:
    bar = next(trace for trace in deviation.draw(result).data if trace.type == "bar")
    np.testing.assert_allclose(bar.y, 0.03 * 1.1 * np.array([3, 2, 1]))
    np.testing.assert_allclose(bar.width, [0.1, 0.8, 0.1])
    np.testing.assert_allclose(bar.x, [0.05, 0.5, 0.95])
    assert min(bar.error_y.array) > 0
    wide = next(trace for trace in deviation.draw(result, edge=0.2).data if trace.type == "bar")
    np.testing.assert_allclose(wide.width, [0.2, 0.6, 0.2])
    np.testing.assert_allclose(wide.y, 0.03 * 1.2 * np.array([3, 2, 1]))


def test_the_table_travels_with_the_figure(result: Result) -> None:
    fig = deviation.draw(result, readout="deviation_raw")
    assert fig.layout.meta["kind"] == "deviation"
    table = export.data_of(fig)
    assert len(table) == 2 * (LAYERS * BINS + 3)
    assert set(table["drawn"]) == {"map", "strip"}
    assert fig.to_json() == deviation.draw(result, readout="deviation_raw").to_json()


def test_options_choose_and_wrong_ones_are_named(result: Result) -> None:
    only = deviation.draw(result, operators="other", log=False)
    assert [note.text for note in only.layout.annotations[:1]] == ["other"]
    assert only.data[1].zmin == 0
    with pytest.raises(InputError, match=r"edge=0.25: this result was measured at 0.1, 0.2"):
        deviation.draw(result, edge=0.25)
    with pytest.raises(InputError, match="'othr' was not measured"):
        deviation.draw(result, operators="othr")


def test_all_zero_can_be_drawn() -> None:
    fig = deviation.draw(made(zeros=True))
    assert len(fig.data) == 4
    assert float(np.abs(np.array(fig.data[1].customdata, dtype=float)).max()) == 0


def test_sink_shows_densities_and_ratios_of_means(result: Result) -> None:
    fig = sink.draw(result)
    table = export.data_of(fig)
    density = table[table["drawn"] == "density"].set_index(["site", "readout"])["mean"]
    assert density["full_recompute", "first_token"] == pytest.approx(0.3)
    assert density["other", "first_token"] == pytest.approx(0.9)
    assert density["other", "middle"] == pytest.approx(0.1)
    ratio = table[table["drawn"] == "ratio"]
    assert len(ratio) == 3 * LAYERS
    assert ratio.loc[ratio["site"] == "no_recompute", "mean"].tolist() == pytest.approx([6.0] * LAYERS)
    # Full recompute comes first, in ink.
    assert next(trace for trace in fig.data if trace.name == "full recompute").marker.color == sink.style.INK
    assert fig.layout.meta["kind"] == "sink"


def test_a_layer_that_does_not_see_the_blocks_has_no_ratio(result: Result) -> None:
    frame = result.frame.copy()
    frame.loc[(frame["view"] == "sink") & (frame["layer"] == 2), "value"] = 0.0
    blind = Result.build(probe="p", frame=frame, pairs=result.pairs, summary=result.summary())
    ratio = export.data_of(sink.draw(blind))
    assert sorted(set(ratio.loc[ratio["drawn"] == "ratio", "layer"])) == [0, 1, 3]


def test_angles_are_in_degrees_by_layer_and_part(result: Result) -> None:
    fig = kv_angles.draw(result)
    table = export.data_of(fig).set_index(["site", "part", "layer"])["mean"]
    assert set(table.index.get_level_values("site")) == {"no_recompute", "other"}
    assert table["no_recompute", "k", 3] == pytest.approx(0.3 * 180 / np.pi)
    assert table["other", "v", 1] == pytest.approx(0.4 * 180 / np.pi)
    assert {trace.name for trace in fig.data if trace.name} == {
        *("no recompute, keys", "no recompute, values", "other, keys", "other, values"),
    }


def test_the_curve_averages_layers_and_competent_prompts_and_leaves_full_recompute_out() -> None:
    result = made()
    table = pd.DataFrame(deviation_curve.draw(result, edge=0.2).layout.meta["table"])
    assert set(table["site"]) == {"no_recompute", "other"}
    # Of the five competent prompts, scale 0.01 (1 + index) and layers 1 to 4: 0.03 x 2.5 x (BINS - place).
    curve = table[(table["drawn"] == "curve") & (table["site"] == "no_recompute")].sort_values("relative")
    assert list(curve["mean"]) == pytest.approx([0.03 * 2.5 * (BINS - place) for place in range(BINS)])
    assert list(curve["n"]) == [5] * BINS
    bars = table[(table["drawn"] == "bar") & (table["site"] == "other")].set_index("region")["mean"]
    assert [bars[region] for region in REGIONS] == pytest.approx([2 * 0.03 * (3 - i) * 1.2 for i in range(3)])
    with pytest.raises(InputError, match=r"measured at 0\.1, 0\.2"):
        deviation_curve.draw(result, edge=0.3)
    assert "deviation_curve" in result.plots()
