"""Skills on disk: what may be read back, what is refused by name, and splicing them between texts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvnotes_interp import engine, operators
from kvnotes_interp.errors import InputError
from kvnotes_interp.model import Model, wrap
from kvnotes_interp.operators import Skill, SkillStore, precompile_skill, splice_skills
from kvnotes_interp.operators.skills import tokenizer_fingerprint
from kvnotes_interp.rope import LayerRope, RopeGeometry
from kvnotes_interp.sources import ModelSource
from tests.architectures import build
from tests.tiny import tiny_with_tokenizer
from tests.tiny_tokenizer import tiny_tokenizer, train

TEXT = "The light is red, so we stop.\n"
OTHER = "Anna lives in Paris and works in France.\n"
PREFIX = "You are a helpful assistant.\n"
SUFFIX = "Where does Anna live? In"


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_with_tokenizer("llama3", tiny_tokenizer(bos=True))


def same(a: Any, b: Any) -> bool:
    return bool(a.cache == b.cache and a.text == b.text and a.tokenizer == b.tokenizer and a.revision == b.revision)


def test_a_skill_is_its_text_run_alone_without_bos(model: Model) -> None:
    skill = precompile_skill(model, TEXT)
    ids = model.tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert skill.token_ids == tuple(ids)
    assert model.tokenizer(TEXT)["input_ids"] == [1, *ids], "the tokenizer would put BOS in front"
    assert skill.cache == engine.prefill(model, ids)


def test_saved_and_loaded_is_the_same_bits(model: Model, tmp_path: Path) -> None:
    skill = precompile_skill(model, TEXT)
    path = skill.save(tmp_path / "deep" / "skill.safetensors")
    assert same(Skill.load(path, model), skill)
    about = json.loads(path.with_suffix(".json").read_text())
    assert about["text_sha256"] == skill.text_sha256
    assert about["model_id"] == model.model_id
    assert about["tokenizer"] == tokenizer_fingerprint(model.tokenizer)


def test_the_store_compiles_once(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, runs = SkillStore(tmp_path, model), []
    real = engine.prefill
    monkeypatch.setattr(engine, "prefill", lambda *a, **k: runs.append(1) or real(*a, **k))
    first = store.get(TEXT)
    assert same(SkillStore(tmp_path, model).get(TEXT), first)
    assert len(runs) == 1
    assert not same(store.get(OTHER), first)
    assert len(runs) == 2


def test_a_killed_write_is_compiled_again_and_a_changed_file_refused(model: Model, tmp_path: Path) -> None:
    store = SkillStore(tmp_path, model)
    skill = store.get(TEXT)
    path = store.path(TEXT)
    path.with_suffix(".json").unlink()  # killed between the two files
    with pytest.raises(InputError, match="was not written to its end"):
        Skill.load(path, model)
    assert same(store.get(TEXT), skill)
    about = json.loads(path.with_suffix(".json").read_text())
    path.with_suffix(".json").write_text(json.dumps(about | {"text": OTHER}))
    with pytest.raises(InputError, match=r"text in .* was changed"):
        store.get(TEXT)
    path.with_suffix(".json").write_text(json.dumps(about))
    precompile_skill(model, OTHER).cache.save(path)
    with pytest.raises(InputError, match="is not the cache that"):
        store.get(TEXT)
    path.with_suffix(".json").write_text("{}")
    with pytest.raises(InputError, match="no skill of format"):
        store.get(TEXT)


# --- refusals: never silently wrong --------------------------------------------------------------------------------


def refused(skill: Skill, model: Model, tmp_path: Path, match: str) -> None:
    with pytest.raises(InputError, match=match):
        skill.check(model)
    with pytest.raises(InputError, match=match):
        Skill.load(skill.save(tmp_path / "skill.safetensors"), model)
    with pytest.raises(InputError, match=match):
        splice_skills(model, PREFIX, [skill], SUFFIX)


def test_another_tokenizer_is_refused(model: Model, tmp_path: Path) -> None:
    """The same weights under a tokenizer with another merge: ids in range, and wrong."""
    other = train([TEXT, OTHER, PREFIX, SUFFIX], vocab=len(model.tokenizer), bos=True)
    assert len(other) <= len(model.tokenizer)
    refused(precompile_skill(model, TEXT), dataclasses.replace(model, tokenizer=other), tmp_path, "cut by tokenizer")


def test_other_weights_are_refused(model: Model, tmp_path: Path) -> None:
    other = tiny_with_tokenizer("llama3", model.tokenizer, seed=5)
    assert other.name == model.name
    refused(precompile_skill(model, TEXT), other, tmp_path, "was compiled by 'tiny-llama3#")


def test_another_revision_is_refused_even_with_the_same_fingerprint(model: Model, tmp_path: Path) -> None:
    first = dataclasses.replace(model, source=dataclasses.replace(model.source, revision="a" * 40))
    other = dataclasses.replace(model, source=dataclasses.replace(model.source, revision="b" * 40))
    skill = precompile_skill(first, TEXT)
    assert other.model_id == skill.cache.model_id
    refused(skill, other, tmp_path, r"by revision aaaa.*the model is at bbbb")
    assert SkillStore(tmp_path, first).path(TEXT) != SkillStore(tmp_path, other).path(TEXT)


def test_another_rope_is_refused(model: Model, tmp_path: Path) -> None:
    """Frequencies scaled in the live model: config and weights have the same fingerprint."""
    layers = tuple(
        LayerRope(None if layer.inv_freq is None else layer.inv_freq / 2, layer.interleaved)
        for layer in model.rope.layers
    )
    refused(precompile_skill(model, TEXT), dataclasses.replace(model, rope=RopeGeometry(layers)), tmp_path, "RoPE")


def test_another_precision_is_refused(model: Model, tmp_path: Path) -> None:
    hf = build("llama3", attn="sdpa", vocab=len(model.tokenizer), dtype=torch.float32)
    other = wrap(hf, model.tokenizer, ModelSource(name="tiny-llama3", kind="live"))
    skill = precompile_skill(model, TEXT)
    alike = dataclasses.replace(other, model_id=model.model_id)
    refused(skill, alike, tmp_path, r"float64.*float32")


def test_the_fingerprint_sees_the_vocabulary_and_not_the_calls(model: Model) -> None:
    before = tokenizer_fingerprint(model.tokenizer)
    model.tokenizer([TEXT, OTHER], padding=True, truncation=True, max_length=4)
    assert tokenizer_fingerprint(model.tokenizer) == before
    assert tokenizer_fingerprint(tiny_tokenizer(bos=False)) != before
    with pytest.raises(InputError, match="without a tokenizer"):
        tokenizer_fingerprint(None)
    with pytest.raises(InputError, match="has no tokens"):
        precompile_skill(model, "")


# --- splicing skills between texts ---------------------------------------------------------------------------------


def test_skills_spliced_are_the_blocks_of_the_joint_text(model: Model) -> None:
    skills = [precompile_skill(model, text) for text in (TEXT, OTHER)]
    done = splice_skills(model, PREFIX, skills, SUFFIX, seam_repair=2)
    assert done.differences == ()
    assert done.blocks == operators.cut_texts(model.tokenizer, PREFIX, [TEXT, OTHER], SUFFIX).blocks
    assert list(done.blocks.token_ids) == model.tokenizer(PREFIX + TEXT + OTHER + SUFFIX)["input_ids"]
    want = operators.find("splice@2")(model, done.blocks)
    assert done.made.cache == want.cache
    n = len(done.blocks.prefix)
    assert done.made.recomputed_tokens == want.recomputed_tokens + n
    assert done.made.layer_tokens == want.layer_tokens + n * model.shape.n_layers
    whole = splice_skills(model, PREFIX, skills, SUFFIX, seam_repair="all").made.cache
    full = operators.full_recompute(model, done.blocks).cache
    for a, b in zip(whole.keys + whole.values, full.keys + full.values, strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=0)


def test_pieces_that_do_not_agree_are_refused_or_shown(model: Model) -> None:
    """Two halves of a word are one token together."""
    head, tail = "The light is red, so we st", "op.\n"
    joint = model.tokenizer(head + tail, add_special_tokens=False)["input_ids"]
    skills = [precompile_skill(model, text) for text in (head, tail)]
    assert joint != [*skills[0].token_ids, *skills[1].token_ids]
    with pytest.raises(InputError, match=r"(?s)other tokens than its pieces.*together .*alone ") as caught:
        splice_skills(model, PREFIX, skills, SUFFIX)
    assert "skill 0" in str(caught.value) or "skill 1" in str(caught.value)
    shown = splice_skills(model, PREFIX, skills, SUFFIX, boundary="show")
    assert shown.differences
    assert shown.blocks.chunks == (skills[0].token_ids, skills[1].token_ids)
    assert len(shown.made.cache) == shown.blocks.n_context


def test_no_prefix_and_no_skill(model: Model) -> None:
    skill = precompile_skill(model, TEXT)
    alone = splice_skills(model, "", [skill], SUFFIX, add_special_tokens=False, seam_repair=3)
    assert alone.blocks.prefix == ()
    assert alone.made.cache == skill.cache, "at slot 0 nothing is stale"
    assert alone.made.layer_tokens == 0
    with pytest.raises(InputError, match="there is no chunk"):
        splice_skills(model, PREFIX, [], SUFFIX)
    with pytest.raises(InputError, match='choose "refuse" or "show"'):
        splice_skills(model, PREFIX, [skill], SUFFIX, boundary="ask")  # type: ignore[arg-type]
