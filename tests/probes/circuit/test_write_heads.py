"""Write heads: path patches at prefill against full forwards with hooks and no cache."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pandas as pd
import pytest
import torch

from kvnotes_interp.errors import ControlError
from kvnotes_interp.probes.circuit import write_heads
from kvnotes_interp.probes.measure import Case, downstream_of
from tests.probes.circuit.by_hand import (
    attention_of,
    head_outputs,
    heads_replaced,
    hooked,
    layers_of,
    projection_of,
    score,
)
from tests.probes.circuit.conftest import NAMES
from tests.reference import answer_with_cache, full_cache, patched

CaseOf = Callable[[str], Case]
SETS = [[(0, 1)], [(1, 0), (2, 3)], [(0, 0), (0, 2), (1, 1), (2, 2)]]


def aggregators(case: Case) -> tuple[int, ...]:
    where = downstream_of(case.pair)
    return where[1], where[3], where[-1]


@pytest.mark.parametrize("name", NAMES)
def test_path_patches_are_those_of_full_forwards(case_of: CaseOf, name: str) -> None:
    case = case_of(name)
    hf, n_heads, n = case.model.hf, case.model.shape.n_heads, case.pair.length - 1
    slots, ids = aggregators(case), torch.tensor([case.pair.old_ids])
    new_z = head_outputs(hf, case.pair.new_ids[:n], n_heads)
    got = write_heads.head_prefills(case, write_heads.run_both(case, slots), SETS)
    old = full_cache(hf, ids[:, :n])
    for heads, (recomputed, frozen) in zip(SETS, got, strict=True):
        with heads_replaced(hf, new_z, heads, slots, n_heads):
            want = score(hf, case.pair.old_ids, case.answers)
            edited = full_cache(hf, ids[:, :n])
        assert recomputed == pytest.approx(want, abs=1e-8)
        logits = answer_with_cache(
            hf, patched(old, edited, layers=None, positions=slots), ids[:, n:], torch.tensor([n])
        )[0, -1]
        assert frozen == pytest.approx(float(logits[case.answers[1]] - logits[case.answers[0]]), abs=1e-8)
    assert len({round(s, 7) for s, _ in got}) == len(SETS)


@pytest.mark.parametrize("name", NAMES)
def test_all_heads_frozen_are_the_patched_cache(case_of: CaseOf, name: str) -> None:
    case = case_of(name)
    changes = write_heads.contributions(case, write_heads.run_both(case, aggregators(case)))
    rows = write_heads.measure_curve(case, aggregators(case), changes, ks=(1, 3), draws=2, seed=0)
    gaps = rows[rows["readout"] == "gap"].set_index("site")["value"]
    assert set(gaps.index) == {"write_nothing", "write_all_heads"}
    assert (gaps < 1e-8).all()
    share = write_heads.measure_share(case, write_heads.run_both(case, aggregators(case)))
    gaps = share[share["readout"] == "gap"].set_index("site")["value"]
    assert set(gaps.index) == {"writes_of_itself", "writes_all"}
    assert (gaps < 1e-8).all()


def test_an_aggregator_left_out_fails_a_control_that_names_a_layer(
    case_of: CaseOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_of("llama")
    right = write_heads.head_patch

    def forgets(slots: Any, outputs: Any, sets: Any) -> Any:
        return right(slots[:-1], [o[:, :-1] for o in outputs], sets)

    monkeypatch.setattr(write_heads, "head_patch", forgets)
    slots = downstream_of(case.pair)[-4:]
    with pytest.raises(ControlError, match=r"control 'write_all_heads' failed .* entering layer \d is furthest"):
        write_heads.measure_curve(case, slots, _no_changes(case), ks=(1,), draws=0, seed=0)


def _no_changes(case: Case) -> pd.DataFrame:
    return pd.DataFrame({"pair": ["x"], "content": ["other"], "layer": [0], "head": [0], "value": [0.0]})


@pytest.mark.parametrize(("part", "site"), [("attention", "attention"), ("mlp", "mlp")])
def test_the_share_holds_the_other_kind_at_the_old_run(case_of: CaseOf, part: str, site: str) -> None:
    """On a Llama, whose writes are the outputs of its two blocks: hooks put every output in place."""
    case = case_of("llama")
    hf, n, slots = case.model.hf, case.pair.length - 1, aggregators(case)
    blocks = {
        "attention": [projection_of(layer) for layer in layers_of(hf)],
        "mlp": [layer.mlp for layer in layers_of(hf)],  # type: ignore[union-attr]
    }

    def outputs(ids: Any, kind: str) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []
        with hooked(blocks[kind], lambda _i: lambda _m, _a, out: seen.append(out[0].clone()), before=False):
            score(hf, ids, case.answers)
        return seen

    theirs = {kind: outputs(case.pair.new_ids if kind == part else case.pair.old_ids, kind) for kind in blocks}

    def put(kind: str) -> Callable[[int], Any]:
        def hook(index: int) -> Any:
            def replace(_m: Any, _a: Any, out: torch.Tensor) -> torch.Tensor:
                out = out.clone()
                out[0, list(slots)] = theirs[kind][index][list(slots)]
                return out

            return replace

        return hook

    with ExitStack() as stack:
        for kind, modules in blocks.items():
            stack.enter_context(hooked(modules, put(kind), before=False))
        want = score(hf, case.pair.old_ids, case.answers)
    rows = write_heads.measure_share(case, write_heads.run_both(case, slots))
    here = rows[(rows["site"] == site) & (rows["band"] == "recomputed") & (rows["readout"] == "logit_diff")]
    assert here["value"].iloc[0] == pytest.approx(want, abs=1e-8)
    assert n > max(slots)


def test_contributions_and_stream_shares_are_worked_out_by_hand(case_of: CaseOf) -> None:
    case = case_of("llama")
    hf, slots = case.model.hf, list(aggregators(case))
    runs = write_heads.run_both(case, slots)
    got = write_heads.contributions(case, runs).set_index(["layer", "head"])["value"]
    z = [head_outputs(hf, ids, 4) for ids in (case.pair.old_ids, case.pair.new_ids)]
    hidden = [
        hf(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
        for ids in (case.pair.old_ids, case.pair.new_ids)
    ]
    for layer, head in ((0, 2), (1, 3)):
        weight = attention_of(layers_of(hf)[layer]).o_proj.weight[:, head * 8 : (head + 1) * 8]
        change = (z[1][layer][slots, head] - z[0][layer][slots, head]) @ weight.T
        want = (change.norm(dim=-1) / hidden[0][layer + 1][0, slots].norm(dim=-1)).mean()
        assert got[layer, head] == pytest.approx(float(want), abs=1e-9)
    # The change of the stream after layer 0 is what attention and MLP of layer 0 changed: the tokens are the same.
    whole = (hidden[1][1] - hidden[0][1])[0, slots]
    attention = sum(((z[1][0][slots] - z[0][0][slots]).flatten(1) @ layers_of(hf)[0].self_attn.o_proj.weight.T)[None])
    want = float((attention * whole).sum() / (whole**2).sum())
    shares = write_heads.stream_shares(case, runs).set_index("layer")["value"]
    assert shares[0] == pytest.approx(want, abs=1e-9)
