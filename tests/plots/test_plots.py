from __future__ import annotations

import importlib

import pandas as pd
import pytest

from kvnotes_interp import plots
from kvnotes_interp.errors import InputError
from kvnotes_interp.plots import export, layer_map, style
from kvnotes_interp.plots.tokens import cells, label, visible
from kvnotes_interp.probes.patching import VIEWS
from kvnotes_interp.results import Result
from tests.results.factory import N_LAYERS, make_result


@pytest.fixture(scope="module")
def result() -> Result:
    return make_result()


# The kinds of patching; those of other probes have tests of their own beside them.
PATCHING = [name for name, kind in plots.KINDS.items() if kind.view in ("cumulative", *VIEWS, "state", "window")]


def test_every_kind_names_a_file_that_draws() -> None:
    for name, kind in plots.KINDS.items():
        module = importlib.import_module(f"kvnotes_interp.plots.{kind.module}")
        assert callable(module.draw), name


@pytest.mark.parametrize("kind", PATCHING)
def test_every_kind_draws_and_carries_its_data(result: Result, kind: str) -> None:
    fig = plots.draw(result, kind)
    assert fig.layout.meta["kind"] == kind
    assert len(export.data_of(fig))
    assert len(fig.data)
    assert fig.to_json() == plots.draw(result, kind).to_json()


def test_kinds_follow_the_views_and_wrong_names_get_a_hint() -> None:
    states = make_result(views=("state",))
    assert states.plots() == ("states",)
    assert states.plot().layout.meta["kind"] == "states"
    with pytest.raises(InputError, match=r"no plot 'stats'\. Did you mean \"states\""):
        states.plot("stats")
    with pytest.raises(InputError, match="needs recovery in the view 'layer_position'"):
        states.plot("map")
    with pytest.raises(InputError, match=r"no option 'prt'\. Did you mean \"part\""):
        states.plot(prt="k")
    with pytest.raises(InputError, match=r"part='q'.*\['k', 'kv', 'v'\]"):
        states.plot(part="q")


def test_pairs_that_are_not_competent_are_kept_out(result: Result) -> None:
    frame = result.frame.copy()
    other = frame[frame["view"] == "state"].assign(pair="pronoun-005", value=99.0)
    spoiled = Result.build(probe="p", frame=pd.concat([frame, other]), pairs=result.pairs, summary=result.summary())
    assert plots.draw(spoiled, "states").layout.meta["table"] == plots.draw(result, "states").layout.meta["table"]


def test_states_hold_the_means(result: Result) -> None:
    table = export.data_of(plots.draw(result, "states", part="kv")).set_index("site")
    rows = result.frame[(result.frame["view"] == "state") & (result.frame["part"] == "kv")]
    expected = rows[rows["site"] == "field_only"]["value"].mean()
    assert table.loc["field_only", "mean"] == pytest.approx(expected)
    assert table.loc["random", "n"] == 10
    assert table.loc["field_only", "n_effective"] == 3


def test_map_averages_over_shared_anchors(result: Result) -> None:
    fig = plots.draw(result, "map")
    assert fig.data[0].z.shape == (N_LAYERS, 24)
    ticks = " ".join(fig.layout.xaxis.ticktext)
    assert "‹place›" in ticks
    assert "⏎" in ticks
    rows = result.frame[(result.frame["view"] == "layer_position") & (result.frame["anchor"] == "2:-1")]
    column = next(i for i, t in enumerate(fig.layout.xaxis.ticktext) if t == "<b>.</b>")
    expected = rows[rows["layer"] == 6]["value"].mean()
    assert fig.data[0].z[6][column] == pytest.approx(expected)


def test_map_falls_back_to_one_pair_and_takes_one(result: Result) -> None:
    frame = result.frame.copy()
    frame["anchor"] = (frame["pair"] + "/" + frame["position"].astype("string")).fillna("")
    apart = Result.build(probe="p", frame=frame, pairs=result.pairs, summary=result.summary())
    assert "pair pronoun-" in plots.draw(apart, "map").layout.title.text
    assert "pair pronoun-003" in plots.draw(result, "map", pair="pronoun-003").layout.title.text
    with pytest.raises(InputError, match="pair='pronoun-005' has no rows"):
        plots.draw(result, "map", pair="pronoun-005")


def test_long_prompts_label_what_matters() -> None:
    n = 400
    columns = pd.DataFrame({"region": ["field"] + ["filler"] * (n - 1)})
    grid = [[0.0] * n]
    grid[0][200] = 0.9
    fig = style.figure("t", width=1000)
    fig.add_heatmap(z=grid)
    assert layer_map._labelled(fig, columns) == [0, 200]


def test_strip_wraps_and_outlines_the_field(result: Result) -> None:
    fig = plots.draw(result, "strip", pair="pronoun-003")
    table = export.data_of(fig)
    assert table["line"].max() >= 2
    assert table.loc[table["field"], "token"].tolist() == ["David"]
    assert table["value"].isna().sum() == 8  # what stands before the field, and the decision position
    texts = [a.text for a in fig.layout.annotations]
    assert "⏎" in texts
    assert "·went" in texts


def test_regions_compare_with_the_share_of_positions(result: Result) -> None:
    table = export.data_of(plots.draw(result, "regions")).set_index("site")
    assert table["share_of_positions"].sum() == pytest.approx(1.0)
    assert table.loc["delimiter", "ratio"] > 3 > table.loc["filler", "ratio"]


def test_recovery_scale_is_white_at_zero_and_even_on_both_sides() -> None:
    assert style.recovery_colour(0.0) == "rgb(255,255,255)"
    scale, low, high = style.recovery_scale([-0.05, 0.9])
    assert (low, high) == (-0.2, 1.0)
    assert scale[0][1] == style.recovery_colour(-0.2)
    assert scale[-1][1] == style.recovery_colour(1.0)
    assert style.recovery_scale([0.0, 0.021])[2] == 0.03
    assert style.recovery_scale([-3.0, 0.8])[1] == -1.0
    assert style.recovery_scale([])[2] == 1.0


def test_tokens_as_text() -> None:
    assert visible(" the\n") == "·the⏎"
    assert visible("\x1b") == "\\x1b"
    assert visible("") == "∅"
    assert label("<|im_start|>") == "&lt;|im_start|&gt;"
    assert label(" extraordinarily") == "·extraordinar…"
    assert (cells("ab"), cells("日本"), cells("e\u0301")) == (2, 4, 1)
