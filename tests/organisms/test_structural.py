"""Organisms hold by construction: identities to the last bit, in float64, by plain forwards on patched caches."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

import kvnotes_interp as kv
from kvnotes_interp import engine, organisms
from kvnotes_interp.organisms import structural
from kvnotes_interp.organisms.structural import Role
from kvnotes_interp.sites import Site

MECHANISMS = tuple(structural.MECHANISMS)


@lru_cache(maxsize=4)
def organism(name: str) -> Any:
    return kv.load(f"organism:{name}", device="cpu", dtype="float64")


@lru_cache(maxsize=4)
def encoded(name: str) -> Any:
    pairs = kv.tasks.load("signal", n=6, seed=3)
    ready, aside = kv.tasks.encode_all(organism(name).tokenizer, pairs)
    assert not aside
    return ready


def states(name: str, pair: Any) -> dict[str, torch.Tensor]:
    """Full logit rows of the four cache states, by plain forwards on patched caches."""
    model, stop = organism(name), pair.length - 1
    old, new = (engine.prefill(model, list(ids[:stop])) for ids in (pair.old_ids, pair.new_ids))
    field, rest = Site(range(*pair.field)), Site(range(pair.field[1], stop))
    caches = {
        "stale": old,
        "field": old.patched(field, new),
        "downstream": old.patched(rest, new),
        "oracle": new,
    }
    every = range(model.shape.vocab)
    return {k: engine.decide(model, cache, [pair.old_ids[-1]], every)[0] for k, cache in caches.items()}


def test_on_notes_the_field_carries_nothing_and_the_notes_everything() -> None:
    for pair in encoded("notes"):
        s = states("notes", pair)
        assert torch.equal(s["field"], s["stale"])
        assert torch.equal(s["downstream"], s["oracle"])
        assert (s["oracle"] - s["stale"]).abs().max() > 1


def test_on_direct_it_is_the_reverse() -> None:
    for pair in encoded("direct"):
        s = states("direct", pair)
        assert torch.equal(s["field"], s["oracle"])
        assert torch.equal(s["downstream"], s["stale"])
        assert (s["oracle"] - s["stale"]).abs().max() > 1


def test_on_mixed_both_ways_carry_some() -> None:
    for pair in encoded("mixed"):
        s = states("mixed", pair)
        for name in ("field", "downstream"):
            assert (s[name] - s["stale"]).abs().max() > 0.1
            assert (s[name] - s["oracle"]).abs().max() > 0.1


def test_on_null_the_field_reaches_nothing() -> None:
    for pair in encoded("null"):
        s = states("null", pair)
        assert all(torch.equal(s["stale"], other) for other in s.values())


@pytest.mark.parametrize("name", MECHANISMS)
def test_forbidden_edges_have_no_attention_at_all_and_allowed_ones_do(name: str) -> None:
    """Read off the attention rows of a full pass, for every pair of roles."""
    model, pair = organism(name), encoded(name)[0]
    roles = structural.roles_of(model.tokenizer, [pair.pair])[list(pair.old_ids)]
    rows = engine.capture(model, None, list(pair.old_ids), want=("patterns",)).patterns[:, 0]
    causal = torch.ones(pair.length, pair.length).tril().bool()
    for head, wiring in enumerate(structural.MECHANISMS[name]):
        for asking in Role:
            for asked in Role:
                edge = (roles == asking)[:, None] & (roles == asked)[None] & causal
                if asking is asked or not edge.any():
                    continue
                weights = rows[:, head][:, edge]
                if (asking, asked) in wiring.forbidden:
                    assert torch.equal(weights, torch.zeros_like(weights)), (head, asking, asked)
                else:
                    assert weights.max() > 0, (head, asking, asked)


@pytest.mark.parametrize("name", ["notes", "direct", "mixed"])
def test_organisms_are_competent_on_new_pairs(name: str) -> None:
    model = kv.load(f"organism:{name}", device="cpu")
    right = 0
    pairs, _ = kv.tasks.encode_all(model.tokenizer, kv.tasks.load("signal", n=40, seed=11))
    for pair in pairs:
        for ids, good, bad in (
            (pair.old_ids, pair.answer_old_id, pair.answer_new_id),
            (pair.new_ids, pair.answer_new_id, pair.answer_old_id),
        ):
            logits = engine.decide(model, engine.prefill(model, list(ids[:-1])), [ids[-1]], (good, bad))[0]
            right += int(logits[0] > logits[1])
    assert right >= 0.95 * 2 * len(pairs)


def test_the_same_bits_every_time_and_in_the_manifest_by_name() -> None:
    one, two = (structural.build("mixed")[0].state_dict() for _ in range(2))
    assert all(torch.equal(one[key], two[key]) for key in one)
    source = organism("notes").source
    assert (source.name, source.kind) == ("organism:notes", "organism")
    assert "only note tokens" in source.note
    assert kv.sources.shape_of("organism:notes").n_layers == structural.N_LAYERS


def test_an_organism_survives_a_folder(tmp_path: Any) -> None:
    hf, tokenizer = structural.build("notes")
    hf.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    back = kv.load(tmp_path, device="cpu")
    pair = encoded("notes")[0]
    with torch.no_grad():
        want = hf(torch.tensor([pair.old_ids])).logits
        assert torch.equal(back.hf(torch.tensor([pair.old_ids])).logits, want)
    assert back.tokenizer(pair.pair.text_old)["input_ids"] == list(pair.old_ids)


def test_unknown_organisms_are_refused_with_the_nearest() -> None:
    with pytest.raises(kv.InputError, match=r'no organism "note".*organism:notes'):
        kv.load("organism:note")
    with pytest.raises(kv.InputError, match="has no revision"):
        kv.load("organism:notes", revision="main")
    with pytest.raises(kv.InputError, match="no organism"):
        organisms.build("organism:")
