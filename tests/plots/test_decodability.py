"""Figures of a linear run: what is drawn is what the rows say, and wrong names get a hint."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from kvnotes_interp.errors import InputError
from kvnotes_interp.plots import decodability, direction, export, staleness
from kvnotes_interp.results import Result, Summary

LAYERS = (0, 2, 4)
CURVES = {
    "before": (0.5, 0.5, 0.5),
    "aggregator": (0.5, 0.75, 1.0),
    "aggregator:-2": (0.5, 0.5, 0.75),
    "decision": (0.5, 0.5, 1.0),
}


def make() -> Result:
    rows: list[dict[str, Any]] = []
    for pair in range(6):
        names = {"pair": f"p{pair}", "content": f"c{pair // 2}", "family": "pronoun"}

        def add(view: str, site: str, readout: str, value: float, names: Any = names, **more: Any) -> None:
            rows.append({**names, "view": view, "site": site, "readout": readout, "value": value, **more})

        for i, layer in enumerate(LAYERS):
            for part in ("residual", "keys"):
                at: dict[str, Any] = {"layer": layer, "part": part}
                for site, curve in CURVES.items():
                    for classifier, less in (("logistic", 0.0), ("mean_difference", 0.25)):
                        add("decodability", site, "accuracy", curve[i] - less, classifier=classifier, **at)
                        add("decodability", site, "shuffled", 0.45 if pair % 2 else 0.55, classifier=classifier, **at)
                    add("decodability", site, "random_direction", 0.6, classifier="", **at)
            at = {"layer": layer, "part": "residual"}
            for site, value in (("stale", 0.0), ("oracle", 1.0), ("erratum", float(pair > 2))):
                add("staleness", site, "reads_new", value, classifier="logistic", **at)
            for arm, value in (("add", 0.5), ("add_random", 0.01), ("remove", 0.7), ("remove_random", 1.0)):
                add("direction", "decision", "recovery", value, arm=arm, **at)
            add("lens", "decision", "margin_new", 1.0, **at)
    pairs = pd.DataFrame([{"pair": f"p{i}", "content": f"c{i // 2}", "competent": True} for i in range(6)])
    summary = Summary.of(
        "made up",
        [{"quantity": "write_depth", "mean": 0.5}, {"quantity": "commit_depth", "mean": 1.0}],
        counts={"n_tried": 6, "n_competent": 6},
    )
    return Result.build(probe="linear_decodability", frame=pd.DataFrame(rows), pairs=pairs, summary=summary)


@pytest.fixture(scope="module")
def result() -> Result:
    return make()


def test_accuracy_by_place_with_dashed_controls_and_both_depths(result: Result) -> None:
    fig = decodability.draw(result)
    table = export.data_of(fig)
    mine = table[table["readout"] == "accuracy"].pivot_table(index="site", columns="layer", values="mean")
    for site, curve in CURVES.items():
        assert tuple(mine.loc[site]) == pytest.approx(curve)
    shuffled = table[table["readout"] == "shuffled"]
    assert list(shuffled["mean"]) == pytest.approx([0.5] * 3)
    assert set(shuffled["n"]) == {6}
    assert set(table["n_effective"]) == {3}
    dashed = {trace.name for trace in fig.data if trace.line.dash == "dash"}
    assert dashed == {"shuffled labels (all places)", "random direction (decision)"}
    lines = {trace.name for trace in fig.data if trace.name} - dashed
    assert lines == {"before the field", "last delimiter", "delimiter -2", "decision token"}
    texts = [note.text for note in fig.layout.annotations]
    assert "write depth 0.50" in texts
    assert "commit depth 1.00" in texts
    assert [s.x0 for s in fig.layout.shapes if s.x0 == s.x1] == [2.0, 4.0]  # in layers
    assert fig.to_json() == decodability.draw(make()).to_json()


def test_features_and_classifiers_can_be_chosen(result: Result) -> None:
    table = export.data_of(decodability.draw(result, feature="keys", classifier="mean_difference"))
    top = table[(table["readout"] == "accuracy") & (table["site"] == "decision") & (table["layer"] == 4)]
    assert top["mean"].item() == pytest.approx(0.75)
    assert set(table["part"]) == {"keys"}
    with pytest.raises(InputError, match=r"feature='key' was not measured.*Did you mean \"keys\""):
        decodability.draw(result, feature="key")


def test_states_and_operators_have_a_line_each(result: Result) -> None:
    fig = staleness.draw(result)
    table = export.data_of(fig).set_index(["site", "layer"])["mean"]
    assert table["stale", 4] == 0.0
    assert table["oracle", 0] == 1.0
    assert table["erratum", 2] == 0.5
    assert {trace.name for trace in fig.data if trace.name} == {"stale", "oracle", "erratum"}
    assert fig.layout.meta["kind"] == "staleness"


def test_directions_stand_beside_random_ones(result: Result) -> None:
    fig = direction.draw(result)
    table = export.data_of(fig)
    assert table.groupby("arm")["mean"].first().to_dict() == pytest.approx(
        {"add": 0.5, "add_random": 0.01, "remove": 0.7, "remove_random": 1.0}
    )
    assert sum(bool(trace.name) for trace in fig.data) == 4


def test_a_result_of_another_probe_has_nothing_to_draw(result: Result) -> None:
    other = Result.build(probe="p", frame=result.frame[:0], pairs=result.pairs, summary=result.summary())
    for module in (decodability, staleness, direction):
        with pytest.raises(InputError, match="holds no"):
            module.draw(other)
