"""Weight edits against cache edits on tiny models: the algebra of the update, and that nothing is left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import kvnotes_interp as kv
from experiments.notes import weight_edits, weight_methods, weight_readouts
from experiments.notes.weight_methods import Rewrite, Trained
from kvnotes_interp.errors import ControlError, InputError, UnsupportedError
from kvnotes_interp.tasks import EncodedPair, encode_all
from tests.tiny import tiny, tiny_with_tokenizer
from tests.tiny_tokenizer import train


@pytest.fixture(scope="module")
def model() -> Any:
    pairs = kv.tasks.pronoun(n=400, seed=1)
    texts = [text for p in pairs for text in (p.text_old, p.text_new + " he she")]
    return tiny_with_tokenizer("llama", train(texts, vocab=1000), seed=3)


@pytest.fixture(scope="module")
def pool(model: Any) -> list[EncodedPair]:
    return encode_all(model.tokenizer, kv.tasks.pronoun(n=200, seed=2))[0]


@pytest.fixture(scope="module")
def target(model: Any, pool: list[EncodedPair]) -> EncodedPair:
    return weight_readouts.flips_rightly(model, pool)[0]


def logits(model: Any, ids: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.hf(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0, -1]


# --- the update ------------------------------------------------------------------------------------------------------


def test_rank_one_by_hand() -> None:
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    key, value = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 29.0])
    # With the identity the direction is the key: (v - Wk) k^T / 25, with v - Wk = (0, 25).
    new = weight_methods.rank_one(weight, key, value, torch.eye(2))
    torch.testing.assert_close(new, torch.tensor([[1.0, 0.0], [3.0, 5.0]], dtype=torch.float64))
    # A second moment diag(1, 4) turns the direction to (3, 1): (v - Wk) (3, 1) / 13.
    new = weight_methods.rank_one(weight, key, value, torch.diag(torch.tensor([1.0, 4.0])))
    expected = torch.tensor([[1.0, 0.0], [75 / 13, 1 + 25 / 13]], dtype=torch.float64)
    torch.testing.assert_close(new, expected, rtol=1e-12, atol=1e-12)


def test_rank_one_answers_the_key_and_spares_what_is_unlike_it() -> None:
    draw = torch.Generator().manual_seed(0)
    weight, other = torch.randn(5, 8, generator=draw).double(), torch.randn(8, 8, generator=draw).double()
    key, value = torch.randn(8, generator=draw).double(), torch.randn(5, generator=draw).double()
    moment = other @ other.T + torch.eye(8).double()
    new = weight_methods.rank_one(weight, key, value, moment)
    torch.testing.assert_close(new @ key, value, rtol=1e-12, atol=1e-12)
    assert torch.linalg.matrix_rank(new - weight, rtol=1e-9) == 1
    # A key with no overlap in the metric of the moment gets the old answer; a random one does not.
    direction = torch.linalg.inv(moment) @ key
    probe = torch.randn(8, generator=draw).double()
    spared = probe - direction * (direction @ probe) / (direction @ direction)
    torch.testing.assert_close(new @ spared, weight @ spared, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(new @ probe, weight @ probe, rtol=1e-3)


def test_second_moments_are_those_of_the_mlps_inner_layer(model: Any, pool: list[EncodedPair]) -> None:
    texts = [pair.old_ids for pair in pool[:3]]
    mlp = model.hf.model.layers[1].mlp
    rows: list[torch.Tensor] = []
    handle = mlp.register_forward_pre_hook(lambda module, given: rows.append(given[0][0].detach()))
    found = weight_methods.second_moments(model, texts, [1])[1]
    handle.remove()
    inner = [torch.nn.functional.silu(x @ mlp.gate_proj.weight.T) * (x @ mlp.up_proj.weight.T) for x in torch.cat(rows)]
    slow = sum(torch.outer(k, k) for k in inner) / len(inner)
    assert len(inner) == sum(map(len, texts))
    torch.testing.assert_close(found, slow, rtol=1e-10, atol=1e-14)


def test_models_without_such_a_projection_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="down_proj"):
        weight_methods.down_projection(tiny("gpt_neox"), 0)


# --- edits and their undoing -----------------------------------------------------------------------------------------


def test_rome_writes_the_value_and_is_undone(model: Any, target: EncodedPair, pool: list[EncodedPair]) -> None:
    before = weight_methods.bits(model.hf)
    clean = logits(model, target.old_ids)
    plan = Rewrite((0, 1), steps=6, lr=0.5)
    moments = weight_methods.second_moments(model, [pair.old_ids for pair in pool[:8]], plan.layers)
    tries = {layer: weight_methods.wanted_value(model, target, layer, plan) for layer in plan.layers}
    best = max(tries, key=lambda layer: tries[layer][2])
    key, value, likely, _ = tries[best]
    assert likely > float(clean.softmax(-1)[target.answer_new_id])
    with weight_methods.rome(model, target, moments, plan) as (_, layer):
        assert layer == best
        weight = weight_methods.down_projection(model, layer).weight
        torch.testing.assert_close(weight @ key, value, rtol=1e-9, atol=1e-12)
        # No other token of this short prompt has the field's key, but they may move: the promised size is what is read.
        now = float(logits(model, target.old_ids).softmax(-1)[target.answer_new_id])
        assert now > float(clean.softmax(-1)[target.answer_new_id])
        with pytest.raises(ControlError, match="down_proj"):
            weight_methods.check_restored(model.hf, before)
    weight_methods.check_restored(model.hf, before)
    assert torch.equal(logits(model, target.old_ids), clean)


def test_lora_off_is_the_base_and_nothing_stays(model: Any, target: EncodedPair) -> None:
    before, kinds = weight_methods.bits(model.hf), [type(m) for m in model.hf.modules()]
    clean = logits(model, target.old_ids)
    other = logits(model, target.new_ids)
    with weight_methods.lora(model, target, Trained(rank=2, steps=4, lr=1e-2)) as (steps, wrapped):
        assert steps == 4
        on = logits(model, target.old_ids)
        assert on.log_softmax(-1)[target.answer_new_id] > clean.log_softmax(-1)[target.answer_new_id] + 0.1
        assert not torch.equal(logits(model, target.new_ids), other)
        with wrapped.disable_adapter():
            assert torch.equal(logits(model, target.old_ids), clean)
        with pytest.raises(ControlError, match="other weights"):
            weight_methods.check_restored(model.hf, before)
    weight_methods.check_restored(model.hf, before)
    assert [type(m) for m in model.hf.modules()] == kinds
    assert torch.equal(logits(model, target.old_ids), clean)
    assert not any(p.requires_grad for p in model.hf.parameters())
    assert "peft_config" not in vars(model.hf)


def test_an_error_inside_leaves_the_model_as_it_was(model: Any, target: EncodedPair, pool: list[EncodedPair]) -> None:
    before = weight_methods.bits(model.hf)
    moments = weight_methods.second_moments(model, [pool[0].old_ids], [1])

    def broken(edit: Any) -> None:
        with edit:
            raise RuntimeError("ours")

    for edit in (
        weight_methods.lora(model, target, Trained(steps=1)),
        weight_methods.rome(model, target, moments, Rewrite((1,), steps=1)),
    ):
        with pytest.raises(RuntimeError, match="ours"):
            broken(edit)
        weight_methods.check_restored(model.hf, before)


def test_one_bit_is_seen(model: Any) -> None:
    before = weight_methods.bits(model.hf)
    weight = model.hf.model.layers[0].mlp.up_proj.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[0, 0] = torch.nextafter(kept[0, 0], kept[0, 0] + 1)
    with pytest.raises(ControlError, match="up_proj"):
        weight_methods.check_restored(model.hf, before)
    with torch.no_grad():
        weight.copy_(kept)
    weight_methods.check_restored(model.hf, before)


# --- what is asked ---------------------------------------------------------------------------------------------------


def test_cache_edits_against_plain_forward_passes(model: Any, target: EncodedPair) -> None:
    def margin(ids: Any) -> float:
        found = logits(model, ids)
        return float(found[target.answer_new_id] - found[target.answer_old_id])

    full, seconds = weight_readouts.cache_edit(model, target, "full_downstream")
    assert full == pytest.approx(margin(target.new_ids), abs=1e-6)
    assert seconds > 0
    alone, _ = weight_readouts.cache_edit(model, target, "field_only")
    assert alone != pytest.approx(full, abs=1e-6)
    told = kv.tasks.encode(model.tokenizer, weight_readouts.with_erratum(target.pair)).old_ids
    assert len(told) > target.length
    assert weight_readouts.cache_edit(model, target, "erratum")[0] == pytest.approx(margin(told), abs=1e-6)


@pytest.mark.parametrize("family", ["pronoun", "account_role"])
def test_the_erratum_stands_before_the_decision(family: str) -> None:
    pair = kv.tasks.load(family, n=1)[0]
    told = weight_readouts.with_erratum(pair, "It is {value} ({label}). ")
    added = f"It is {pair.field_new} ({pair.label}). "
    assert told.text_old.replace(added, "") == pair.text_old
    assert told.text_old.count(added) == 1
    rest = told.text_old.split(added)[1]
    decision = [piece.text for piece in kv.tasks.pair.pieces_of(pair.old) if piece.region == "decision"]
    assert rest.startswith(decision[0])


def test_margins_are_those_of_single_prompts(model: Any, pool: list[EncodedPair]) -> None:
    asked = [request for pair in pool[:6] for request in weight_readouts.requests_of(pair)]
    found = weight_readouts.margins(model, asked, batch=4)
    for request, margin in zip(asked, found.tolist(), strict=True):
        own = logits(model, request.ids)
        assert margin == pytest.approx(float(own[request.right] - own[request.wrong]), abs=1e-5)
    assert asked[0].right == asked[1].wrong


def test_damage_is_zero_until_something_is_damaged(model: Any, target: EncodedPair, pool: list[EncodedPair]) -> None:
    asked = weight_readouts.competent(model, [weight_readouts.requests_of(pair)[0] for pair in pool[:40]])
    texts = [pool[0].old_ids, pool[1].old_ids]
    ground = weight_readouts.ground_for(model, target, pool, asked, texts, n=6)
    assert 0 < len(ground.same_value) <= 6
    assert all(r.value == target.pair.field_old and r.ids != target.old_ids for r in ground.same_value)
    assert all(r.value not in (target.pair.field_old, target.pair.field_new) for r in ground.other_value)
    clean = weight_readouts.damage(model, ground)
    assert clean == {"same_value": 0, "other_value": 0, "battery": 0, "next_token": 0, "kl": 0}
    head = model.hf.get_output_embeddings().weight
    kept = head.detach().clone()
    with torch.no_grad():
        head.neg_()  # every margin turns its sign
    broken = weight_readouts.damage(model, ground)
    with torch.no_grad():
        head.copy_(kept)
    assert (broken["same_value"], broken["other_value"], broken["battery"]) == (1, 1, 1)
    assert broken["next_token"] == 1
    assert (broken["kl"] or 0) > 0
    assert weight_readouts.damage(model, ground) == clean


def test_a_run_writes_its_table(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(weight_edits, "BATTERY", ("pronoun", "capital"))
    monkeypatch.setattr(kv, "load", lambda name: model)
    command = ["--targets", "2", "--requests", "4", "--pool", "200", "--out", str(tmp_path / "run")]
    assert weight_edits.main(command) == 0
    printed = capsys.readouterr().out
    assert printed == (tmp_path / "run" / "table.md").read_text()
    record = json.loads((tmp_path / "run" / "weight_edits.json").read_text())
    rows = record["outcomes"]
    assert [row["method"] for row in rows[:6]] == list(weight_edits.METHODS)
    assert record["request"]["targets"] == len(rows) / 6
    for row in rows:
        if row["method"] in ("field_only", "full_downstream", "erratum", "erratum_plain"):
            assert (row["same_value"] or 0, row["other_value"], row["next_token"], row["kl"]) == (0, 0, 0, 0)
        if row["method"] == "full_downstream":
            assert row["flipped"]
        if row["method"] in ("lora", "rome"):
            assert row["kl"] > 0
    assert record["second_moments_s"] > 0
    assert weight_edits.main(command) == 2
    assert "holds a run already" in capsys.readouterr().err


def test_an_erratum_that_the_tokenizer_cannot_write_is_skipped_and_said() -> None:
    organism = kv.load("organism:notes")
    pair = weight_readouts.flips_rightly(organism, encode_all(organism.tokenizer, kv.tasks.signal(n=8))[0])[0]
    with pytest.raises(InputError, match="no words for the erratum"):
        weight_readouts.cache_edit(organism, pair, "erratum")
    outcomes, extra = weight_edits.compare(organism, [pair], [], [], [], methods=("erratum", "full_downstream"))
    assert [one.method for one in outcomes] == ["full_downstream"]
    assert outcomes[0].same_value is None
    assert "erratum" in extra["skipped"]
    assert "none" in weight_edits.table(outcomes)
