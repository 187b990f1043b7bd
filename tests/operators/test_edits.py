"""Edits: identities against plain prefills on every architecture, exact costs, controls, and refusals."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import kvnotes_interp as kv
from kvnotes_interp import compat, engine
from kvnotes_interp.operators import edits
from kvnotes_interp.operators.edits import states
from tests.architectures import ARCHITECTURES
from tests.reference import full_logits
from tests.tiny import tiny_with_tokenizer
from tests.tiny_tokenizer import train

OUT_OF_SIGHT = ("mistral", "gemma2", "starcoder2")  # windows so short that the field does not reach the decision
TOP_K = ("patch_top_k", "recompute_top_k")


@lru_cache(maxsize=1)
def words() -> Any:
    pairs = kv.tasks.load("signal", n=200, seed=1)
    return train([t for p in pairs for t in (p.text_old, p.text_new)] * 3, vocab=600)


@lru_cache(maxsize=64)
def setting(name: str) -> Any:
    model = tiny_with_tokenizer(name, words())
    pairs, _ = kv.tasks.encode_all(model.tokenizer, kv.tasks.load("signal", n=12, seed=2))
    return edits.open_setting(model, pairs[0])


def logits(s: Any, made: Any) -> Tensor:
    return engine.decide(s.model, made.cache, [s.pair.old_ids[-1]], range(s.model.shape.vocab))[0]


def reference(s: Any, ids: Any) -> Tensor:
    return full_logits(s.model.hf, torch.tensor([list(ids)]))[0, -1]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_ends_of_the_scale_are_plain_forwards(name: str) -> None:
    s = setting(name)
    old, new = reference(s, s.pair.old_ids), reference(s, s.pair.new_ids)
    if name not in OUT_OF_SIGHT:
        assert (old - new).abs().max() > 1e-5
    for edit, want in (("stale", old), ("oracle", new), ("full_downstream", new)):
        torch.testing.assert_close(logits(s, edits.find(edit)(s)), want, rtol=0, atol=1e-8)
    n = len(s.downstream)
    for edit in TOP_K:
        torch.testing.assert_close(logits(s, edits.find(edit)(s, k=n)), new, rtol=0, atol=1e-8)
        field = logits(s, edits.find(edit)(s, k=0))
        torch.testing.assert_close(field, logits(s, states.field_only(s)), rtol=0, atol=1e-8)
    blended = edits.find("cacheblend")(s, share=1.0)
    torch.testing.assert_close(logits(s, blended), new, rtol=0, atol=1e-8)


@pytest.mark.parametrize("name", ["llama3", "qwen3", "gemma3", "glm"])
def test_texts_that_are_appended_are_prefills_of_the_longer_prompt(name: str) -> None:
    s = setting(name)
    start, ids = s.decision_start, s.pair.old_ids
    label = s.pair.pair.label
    text = f"[UPDATE] {label}: {s.pair.pair.field_new}."
    for wording in ("tagged", "[UPDATE] {label}: {value}."):
        made = edits.find("erratum")(s, wording=wording)
        run = made.cache.token_ids[0, start:].tolist()
        assert s.model.tokenizer.decode(run).lstrip().startswith(text)
        assert run[-(s.stop - start) :] == list(ids[start : s.stop]) or s.stop == start
        torch.testing.assert_close(logits(s, made), reference(s, [*ids[:start], *run, ids[-1]]), rtol=0, atol=1e-8)
        assert made.recomputed_tokens == len(run)
    restated = edits.find("erratum")(s, wording="restate").cache.token_ids[0, start:].tolist()
    assert s.pair.pair.field_new in s.model.tokenizer.decode(restated)


def test_field_and_erratum_run_on_the_edited_cache_and_not_on_new_text() -> None:
    s = setting("qwen3")
    start = s.decision_start
    both = edits.find("field_erratum")(s)
    run = both.cache.token_ids[0, start:].tolist()
    edited = states.field_only(s).cache[:start]
    want, _ = engine.extend(s.model, edited, run)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(both.cache.keys, want.keys, strict=True))
    fresh = reference(s, [*s.pair.new_ids[:start], *run, s.pair.new_ids[-1]])
    assert (logits(s, both) - fresh).abs().max() > 1e-6  # what the faulty public code reports instead


def test_hoist_is_a_prefill_of_the_prompt_with_the_sentence_moved() -> None:
    s = setting("llama")
    made = edits.find("hoist")(s)
    ids = made.cache.token_ids[0].tolist()
    assert sorted(ids) == sorted(s.pair.new_ids[: s.stop])
    assert ids != list(s.pair.new_ids[: s.stop])
    torch.testing.assert_close(logits(s, made), reference(s, [*ids, s.pair.new_ids[-1]]), rtol=0, atol=1e-8)
    text = s.model.tokenizer.decode(ids)
    assert text.index(f"lamp was {s.pair.pair.field_new}") > text.index("came by with")
    assert made.recomputed_tokens < s.stop


@pytest.mark.parametrize("name", [e for e in edits.EDITS if e not in ("patch_top_k", "hoist")])
def test_costs_are_what_the_attention_modules_saw(name: str) -> None:
    s, seen = setting("qwen3"), [0]

    def count(_module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        hidden = kwargs["hidden_states"]
        seen[0] += hidden.shape[0] * hidden.shape[1]

    options = {"k": 3, "ranking": "last"} if edits.find(name).takes_k else {}
    layers = compat.layers(s.model.hf)
    handles = [compat.attention_module(layer).register_forward_pre_hook(count, with_kwargs=True) for layer in layers]
    made = edits.find(name)(s, **options)
    for handle in handles:
        handle.remove()
    assert made.layer_tokens == seen[0]
    if name == "field_only":
        assert made.recomputed_tokens == len(s.field)


def test_an_oracle_patch_and_a_true_recompute_are_not_the_same_thing() -> None:
    s = setting("llama")
    k = len(s.downstream) // 3
    patched, run = (edits.find(name)(s, k=k, ranking="last") for name in TOP_K)
    assert (logits(s, patched) - logits(s, run)).abs().max() > 1e-7
    assert patched.layer_tokens == s.stop * s.stale.n_layers
    assert run.layer_tokens == (k + len(s.field)) * s.stale.n_layers


@pytest.mark.parametrize("ranking", edits.RANKINGS)
def test_rankings_are_orders_of_all_positions_and_repeatable(ranking: str) -> None:
    s = setting("qwen3")
    order = edits.rank(s, ranking)
    assert sorted(order) == list(s.downstream)
    assert order == edits.rank(s, ranking)


def test_rankings_put_first_what_they_say() -> None:
    s = setting("llama")
    assert edits.rank(s, "last") == tuple(reversed(s.downstream))
    n = sum(s.pair.delimiter[p] for p in s.downstream)
    assert n
    assert all(s.pair.delimiter[p] for p in edits.rank(s, "punctuation")[:n])
    change = {
        p: sum(float((s.fresh.keys[i][0, :, p] - s.stale.keys[i][0, :, p]).square().sum()) for i in range(3))
        + sum(float((s.fresh.values[i][0, :, p] - s.stale.values[i][0, :, p]).square().sum()) for i in range(3))
        for p in s.downstream
    }
    assert edits.rank(s, "kv_change")[0] == max(change, key=change.__getitem__)
    assert edits.rank(s, "random", seed=1) != edits.rank(s, "random", seed=2)


def test_a_profile_of_another_value_needs_no_new_run_of_this_one() -> None:
    model = kv.load("organism:notes", device="cpu")
    pairs, _ = kv.tasks.encode_all(model.tokenizer, kv.tasks.load("signal", n=40, seed=2))
    s = edits.open_setting(model, pairs[0])
    other = next(p for p in pairs if p.answer_new_id not in (pairs[0].answer_old_id, pairs[0].answer_new_id))
    order = edits.profiled_on(s, other)
    n = sum(s.pair.tokens_old[p] == "." for p in s.downstream)
    assert {s.pair.tokens_old[p] for p in order[:n]} == {"."}  # the notes, whatever the value
    same = next(p for p in pairs if p.answer_new_id == pairs[0].answer_old_id)
    with pytest.raises(kv.InputError, match="cannot profile"):
        edits.profiled_on(s, same)


@given(k=st.integers(0, 30), ranking=st.sampled_from(edits.OLD_RUN))
@settings(max_examples=25, deadline=None)
def test_more_positions_never_cost_less_and_never_touch_the_parent(k: int, ranking: str) -> None:
    s = setting("llama")
    before = [t.clone() for t in s.stale.keys]
    made = edits.find("recompute_top_k")(s, k=k, ranking=ranking)
    assert made.recomputed_tokens == len(s.field) + min(k, len(s.downstream))
    assert all(torch.equal(a, b) for a, b in zip(before, s.stale.keys, strict=True))


def test_on_organisms_the_edits_do_what_the_wiring_says() -> None:
    for name, field_works in (("notes", False), ("direct", True)):
        model = kv.load(f"organism:{name}", device="cpu", dtype="float64")
        pair = kv.tasks.encode_all(model.tokenizer, kv.tasks.load("signal", n=4, seed=5))[0][0]
        s = edits.open_setting(model, pair)
        stale, new = logits(s, edits.find("stale")(s)), logits(s, edits.find("oracle")(s))
        field = logits(s, edits.find("field_only")(s))
        assert torch.allclose(field, new if field_works else stale, atol=1e-9)
        notes = tuple(p for p in s.downstream if pair.tokens_old[p] == ".")
        run = edits.find("recompute_top_k")(s, k=len(notes), order=notes)
        assert torch.allclose(logits(s, run), new, atol=1e-9)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: edits.find("erratun"), 'Did you mean "erratum"'),
        (lambda s: edits.find("erratum")(s, wording="overide"), 'Did you mean "override"'),
        (lambda s: edits.rank(s, "atention"), 'Did you mean "attention"'),
        (lambda s: edits.find("cacheblend")(s, share=0.0), r"share=0\.0"),
        (lambda s: edits.find("recompute_top_k")(s, k=-1), "k=-1"),
    ],
)
def test_bad_input_is_refused_by_name(call: Any, message: str) -> None:
    with pytest.raises(kv.InputError, match=message):
        call(setting("llama"))
