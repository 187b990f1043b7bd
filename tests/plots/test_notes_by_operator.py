"""The comparison of operators shows the numbers of the runs, where they stand, on pairs competent under all."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from kvnotes_interp.errors import InputError
from kvnotes_interp.plots import export, notes_by_operator
from kvnotes_interp.plots.notes_by_operator import REGIONS, compare, draw
from kvnotes_interp.results import Result, Summary

# 0-1: another document; 2-11: the field's, with the field at 4; 12-13: another.
DOCUMENTS = [0] * 2 + [1] * 10 + [2] * 2 + [-1] * 2
FIELD = 4


def made(scale: float, *, aside: str = "", documents: bool = True, shift: int = 0) -> Result:
    """Four pairs; a token recovers `scale` times its place behind the field, a region `scale` times its number.

    `shift` slots that hold no token stand before the first document, as a packet's do.
    """
    rows: list[dict[str, Any]] = []
    pairs: list[dict[str, Any]] = []
    owners = [-1] * shift + DOCUMENTS
    for index in range(4):
        names = {"pair": f"p{index}", "content": f"c{index // 2}", "family": "hand", "part": "kv"}
        line = {**names, "competent": names["pair"] != aside, "length": len(owners), "field_start": FIELD + shift}
        pairs.append({**line, "field_stop": FIELD + shift + 1, **({"documents": owners} if documents else {})})

        def add(view: str, site: str, value: float, names: dict[str, Any] = names, **more: Any) -> None:
            rows.append({**names, "view": view, "site": site, "readout": "recovery", "value": value, **more})

        for site in ("field_only", "downstream_only", "field_and_downstream"):
            add("state", site, scale)
        for number, region in enumerate(REGIONS):
            if region != "wrapper" or shift:
                add("region", region, scale * number, region=region)
        for slot in range(FIELD, 14):
            add("position", "position", scale * (slot - FIELD), position=slot + shift)
    summary = Summary.of("hand", [{"quantity": "x", "mean": 0.0}], counts={"n_tried": 4})
    return Result.build(probe="local_patching", frame=pd.DataFrame(rows), pairs=pd.DataFrame(pairs), summary=summary)


def test_relative_positions_are_inside_the_fields_document() -> None:
    table = compare({"full_recompute": made(0.1), "packet": made(0.2, shift=3)}, bins=10)
    for operator, scale in (("full_recompute", 0.1), ("packet", 0.2)):
        own = table[(table["operator"] == operator) & (table["view"] == "relative")]
        # Ten tokens, ten bins: the field is the third, what follows it are the fourth to the tenth.
        assert own["relative"].tolist() == pytest.approx([0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.95])
        assert own["mean"].tolist() == pytest.approx([scale * k for k in range(1, 8)])
        assert set(own["n"]) == {4}
        assert set(own["n_effective"]) == {2}
    coarse = compare({"x": made(0.1)}, bins=2)
    assert coarse.loc[coarse["view"] == "relative", "mean"].tolist() == pytest.approx([0.15, 0.5])
    regions = table[table["view"] == "region"].set_index(["operator", "site"])["mean"]
    assert regions["packet", "wrapper"] == pytest.approx(0.2 * list(REGIONS).index("wrapper"))
    assert ("full_recompute", "wrapper") not in regions.index


def test_only_pairs_that_are_competent_under_all_count() -> None:
    table = compare({"a": made(0.1, aside="p0"), "b": made(0.1, aside="p3")})
    assert set(table["n"]) == {2}
    nobody = made(0.1)
    nobody.pairs["competent"] = False
    with pytest.raises(InputError, match="competent pairs: a 4, b 0"):
        compare({"a": made(0.1), "b": nobody})


def test_what_cannot_be_compared_is_named() -> None:
    with pytest.raises(InputError, match="do not lie in documents"):
        compare({"a": made(0.1, documents=False)})
    with pytest.raises(InputError, match="no runs"):
        compare({})
    with pytest.raises(InputError, match="bins=0"):
        compare({"a": made(0.1)}, bins=0)


def test_the_figure_holds_the_table_and_a_line_and_bars_for_each(tmp_path: Any) -> None:
    results = {"full_recompute": made(0.1), "no_recompute": made(0.05), "packet@runs/p": made(0.2, shift=3)}
    fig = draw(results)
    lines = [t for t in fig.data if t.type == "scatter" and t.showlegend is not False]
    bars = [t for t in fig.data if t.type == "bar"]
    assert [t.name for t in lines] == [t.name for t in bars] == ["full recompute", "no recompute", "KV Packet (runs/p)"]
    assert list(bars[2].y) == pytest.approx([0.2 * list(REGIONS.values()).index(x) for x in bars[2].x])
    assert {t.xaxis for t in bars} == {"x2"}
    held = fig.layout.meta["table"]
    assert len(held["mean"]) == len(compare(results))
    written = export.write(fig, tmp_path / "notes", static=())
    assert {path.suffix for path in written} == {".html", ".json", ".csv"}
    assert "Pairs competent under all" in fig.layout.title.text.replace("<br>", " ")
    assert notes_by_operator.draw(results).to_json() == fig.to_json()
