"""Knock-out: every cut against eager attention with an explicit -inf mask, and controls that can fail."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvnotes_interp import engine
from kvnotes_interp.engine import Cut, Edits
from kvnotes_interp.errors import ControlError
from kvnotes_interp.probes.circuit import knockout
from kvnotes_interp.probes.circuit.decide import Row, decide
from kvnotes_interp.probes.measure import Case, downstream_of, field_of
from tests.architectures import build
from tests.probes.circuit.by_hand import score_with_edges_cut
from tests.probes.circuit.conftest import NAMES
from tests.reference import KV, full_cache, patched

CaseOf = Callable[[str], Case]


def field_only(hf: Any, case: Case) -> list[KV]:
    n = case.pair.length - 1
    old, new = (full_cache(hf, torch.tensor([ids[:n]])) for ids in (case.pair.old_ids, case.pair.new_ids))
    return patched(old, new, layers=None, positions=field_of(case.pair))


@pytest.mark.parametrize("name", NAMES)
def test_cuts_are_minus_infinity_in_an_eager_mask(case_of: CaseOf, name: str) -> None:
    case = case_of(name)
    hf = case.model.hf
    was = hf.config._attn_implementation
    hf.set_attn_implementation("eager")
    try:
        kvs = field_only(hf, case)
        where = downstream_of(case.pair)
        # Each cuts something that a window of six tokens still sees.
        chosen = [
            Cut(where[::2]),
            Cut(where, layers=(1,)),
            Cut(where[-3:], layers=(0, 1), heads=(0, 3)),
            Cut((*field_of(case.pair), where[-1]), heads=(2,)),
        ]
        want = [
            score_with_edges_cut(hf, kvs, case.tail[0], case.answers, c.keys, layers=c.layers, heads=c.heads)
            for c in chosen
        ]
    finally:
        hf.set_attn_implementation(was)
    cache = knockout.bases_of(case)["field_only"]
    got = decide(case, [Row(cache, cuts=(c,)) for c in chosen])
    assert got == pytest.approx(want, abs=1e-8)
    assert len({round(s, 6) for s in got}) == len(got)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_and_everything_cut(case_of: CaseOf, name: str) -> None:
    case = case_of(name)
    rows = knockout.controls(case, knockout.bases_of(case)["field_only"])
    gaps = rows[rows["readout"] == "gap"].set_index("site")["value"]
    assert set(gaps.index) == {"cut_nothing", "cut_everything"}
    assert (gaps < 1e-6).all()


def test_cuts_that_are_ignored_fail_a_control(case_of: CaseOf, monkeypatch: pytest.MonkeyPatch) -> None:
    right = engine.capture

    def ignores(*args: Any, edits: Edits | None = None, **options: Any) -> Any:
        return right(*args, edits=None if edits is None else dataclasses.replace(edits, cuts=()), **options)

    monkeypatch.setattr(engine, "capture", ignores)
    case = case_of("llama")
    with pytest.raises(ControlError, match=r"control 'cut_everything' failed on tiny-llama .* tolerance"):
        knockout.controls(case, knockout.bases_of(case)["field_only"])


def test_attention_is_that_of_an_eager_model(case_of: CaseOf) -> None:
    case = case_of("llama")
    hf = build("llama", attn="eager")
    weights = torch.stack(hf(input_ids=torch.tensor([case.pair.new_ids]), output_attentions=True).attentions)
    want = weights[:, 0, :, -1].mean(dim=(0, 1))
    torch.testing.assert_close(knockout.attention(case, (case.base, case.donor))[1], want, rtol=0, atol=1e-9)


def test_controls_are_as_large_as_what_they_control(case_of: CaseOf) -> None:
    pair = case_of("llama").pair
    where = downstream_of(pair)
    knocks = list(knockout.graded(pair, where, 32, draws=3, seed=0)) + list(knockout.edges(pair, draws=3, seed=0))
    sizes = {"field": 0, "sink": 0}
    for about, cuts in knocks:
        keys = {k for c in cuts for k in c.keys}
        assert len(keys) == about["k"]
        if about["ranking"] == "random" and about["view"] == "edge":
            own = knockout.targets(pair)[about["site"]]
            assert not keys & set(own)
            assert len(keys) == len(own)
            sizes[about["site"]] += 1
    assert sizes == {"field": 3, "sink": 3}
    thirds = knockout.bands(32)
    assert [layer for layers in thirds.values() for layer in layers] == list(range(32))
    counted = knockout.count(pair, 32, 4, draws=3, grid=False)
    assert counted == len(knocks) + 3 + 2 + sum(1 for _ in knockout.edges(pair, draws=3, seed=0)) - 1


def test_the_measure_has_every_cell(case_of: CaseOf) -> None:
    case = case_of("llama")
    rows = knockout.measure(case, draws=2, seed=0, grid=True)
    good = rows[rows["readout"] == "recovery"]
    shape = case.model.shape
    assert (good["view"] == "edge_head").sum() == 2 * shape.n_layers * shape.n_heads
    nothing = good[(good["view"] == "edge") & (good["site"] == "none")].set_index("base")["value"]
    assert nothing["oracle"] == pytest.approx(1.0, abs=1e-6)
    start = good[(good["view"] == "knockout") & (good["share"] == 0)]["value"]
    assert start.iloc[0] == pytest.approx(nothing["field_only"], abs=1e-9)
    total = good[(good["view"] == "knockout") & (good["share"] == 1) & (good["band"] == "all")]["value"].iloc[0]
    edge = good[(good["view"] == "edge") & (good["site"] == "downstream") & (good["base"] == "field_only")]
    assert total == pytest.approx(edge[edge["ranking"] == "chosen"]["value"].iloc[0], abs=1e-9)
    mass = rows[(rows["readout"] == "mass") & (rows["base"] == "oracle")].set_index("site")["value"]
    before = list(range(field_of(case.pair)[0]))
    whole = knockout.attention(case, (case.donor,))[0]
    assert mass["field"] + mass["downstream"] + mass["itself"] + float(whole[before].sum()) == pytest.approx(1.0)
