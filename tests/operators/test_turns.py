"""Edit and compose over turns: exact where everything is recomputed, with exact costs, and drift where it is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvnotes_interp import engine
from kvnotes_interp.errors import InputError
from kvnotes_interp.operators.turns import Edit, Turn, compare_turns, run_turns
from tests.architectures import ARCHITECTURES
from tests.operators.test_splice import counted
from tests.reference import full_cache, full_logits
from tests.tiny import tiny

START = [5, 6, 7, 8, 9]
SKILLS = [[11, 12, 13, 14, 15, 16, 17, 18], [31, 32, 33]]


def turns(model: Any, also: Any) -> list[Turn]:
    first, second = (engine.prefill(model, ids) for ids in SKILLS)
    return [
        Turn(skill=first, text=(41, 42)),
        Turn(edit=Edit(7, (81, 82), also=also), text=(43,)),  # inside the first skill
        Turn(skill=second, edit=Edit(2, (83,), also=also), text=(44, 45)),
        Turn(skill=first),
        Turn(text=(46,)),
    ]


FINAL = [5, 6, 83, 8, 9, 11, 12, 81, 82, 15, 16, 17, 18, 41, 42, 43, 31, 32, 33, 44, 45, *SKILLS[0], 46]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_recomputing_all_of_every_turn_is_a_full_prefill(name: str) -> None:
    """Against plain transformers on the tokens written out by hand."""
    model = tiny(name)
    steps = list(run_turns(model, engine.prefill(model, START), turns(model, "all"), seam_repair="all"))
    last = steps[-1]
    assert last.cache.token_ids[0].tolist() == FINAL
    for layer, (keys, values) in enumerate(full_cache(model.hf, torch.tensor([FINAL]))):
        torch.testing.assert_close(last.cache.keys[layer], keys, atol=1e-9, rtol=0)
        torch.testing.assert_close(last.cache.values[layer], values, atol=1e-9, rtol=0)
    assert last.logits is not None
    torch.testing.assert_close(last.logits, full_logits(model.hf, torch.tensor([FINAL]))[0, -1], atol=1e-9, rtol=0)
    for report in compare_turns(model, steps):
        assert report.kl < 1e-12
        assert report.top1_agreement
        assert report.logit_cosine == pytest.approx(1.0, abs=1e-12)


def test_stale_notes_show_from_the_turn_of_the_edit_on() -> None:
    model = tiny("llama3")
    plain = [Turn(text=(41, 42)), Turn(text=(43,)), Turn(text=(44,))]
    assert all(r.kl < 1e-12 for r in compare_turns(model, run_turns(model, engine.prefill(model, START), plain)))
    edited = [plain[0], Turn(edit=Edit(1, (83,)), text=(43,)), plain[2]]
    before, at, after = compare_turns(model, run_turns(model, engine.prefill(model, START), edited))
    assert before.kl < 1e-12
    assert min(at.kl, after.kl) > 1e-3, "the slots behind the edit keep what they took from the old token"
    repaired = [plain[0], Turn(edit=Edit(1, (83,), also="all"), text=(43,)), plain[2]]
    assert all(r.kl < 1e-12 for r in compare_turns(model, run_turns(model, engine.prefill(model, START), repaired)))


@pytest.mark.parametrize(("also", "repair"), [((), 0), ((9, 10), 2), ("all", "all")])
def test_costs_are_what_the_layers_saw(also: Any, repair: Any) -> None:
    model = tiny("gemma2")
    start, plan = engine.prefill(model, START), turns(model, also)
    before, steps = start.keys[0].clone(), run_turns(model, start, plan, seam_repair=repair)
    for _ in plan:
        with counted(model) as seen:
            step = next(steps)
        assert sum(seen) == step.layer_tokens == step.recomputed_tokens * model.shape.n_layers
    assert torch.equal(before, start.keys[0])


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (Edit(4, (1, 2)), "does not fit a cache of 5 slots"),
        (Edit(0, ()), "0 tokens"),
        (Edit(1, (1, 2), also=(2,)), "also holds slot 2"),
        (Edit(1, (1,), also=(9,)), "also holds slot 9"),
    ],
)
def test_edits_that_do_not_fit_are_refused(edit: Edit, match: str) -> None:
    model = tiny("llama")
    with pytest.raises(InputError, match=match):
        list(run_turns(model, engine.prefill(model, START), [Turn(edit=edit)]))
