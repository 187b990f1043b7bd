"""A fingerprint covers everything that decides the number: two models, or two runs, that can differ never share one."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

import kvnotes_interp as kv
from kvnotes_interp import engine, fingerprint
from kvnotes_interp.model import id_of as id_of_model
from kvnotes_interp.operators.made import Made
from kvnotes_interp.operators.writer import new_writer
from kvnotes_interp.registry import ModelSource
from kvnotes_interp.results import Run
from tests.architectures import CONFIGS, build
from tests.tiny import tiny_with_tokenizer
from tests.tiny_tokenizer import CHATML, tiny_tokenizer, train

IDS = [7, 31, 12, 55, 8, 60, 3, 44, 19, 71]
GAPS = {"min_gap": 0, "min_gap_noise": 0}  # a random model changes its answer by little


def id_of(hf: Any) -> str:
    return id_of_model(hf, ModelSource("m", "live"))


@pytest.mark.parametrize("name", ["llama", "llama_biased", "gemma3", "gpt_neox", "qwen3_moe", "nanochat"])
def test_one_number_of_any_weight_gives_another_id(name: str) -> None:
    hf = build(name, dtype=torch.float32, exact=False)
    before = id_of(hf)
    assert id_of(build(name, dtype=torch.float32, exact=False)) == before, "the control: the same weights, the same id"
    seen = {before}
    for parameter in hf.parameters():
        for place in {0, parameter.numel() // 2, parameter.numel() - 1}:
            flat = parameter.data.view(-1)
            kept = flat[place].item()
            flat[place] += 0.01
            seen.add(id_of(hf))
            flat[place] = kept
    places = [{0, p.numel() // 2, p.numel() - 1} for p in hf.parameters()]
    assert len(seen) == 1 + sum(map(len, places))
    assert id_of(hf) == before


SETTINGS: dict[str, Callable[[Any], None]] = {
    "scaling": lambda hf: setattr(hf.model.layers[1].self_attn, "scaling", 0.5),
    "norm epsilon": lambda hf: setattr(hf.model.layers[1].mlp, "eps", 0.5),
    "soft cap": lambda hf: setattr(hf.config, "final_logit_softcapping", 3.0),
    "window": lambda hf: setattr(hf.config, "sliding_window", 4),
    "buffer": lambda hf: hf.model.layers[0].register_buffer("extra", torch.ones(3)),
    "tensor": lambda hf: setattr(hf.model.layers[0], "steering", torch.ones(3)),
    "a layer's order": lambda hf: hf.model.layers.insert(0, hf.model.layers.pop(2)),
    "dtype": lambda hf: hf.to(torch.bfloat16),
    "activation": lambda hf: setattr(hf.model.layers[0].mlp, "act_fn", torch.nn.ReLU()),
}


@pytest.mark.parametrize("what", SETTINGS)
def test_what_a_module_was_set_to_is_part_of_the_id(what: str) -> None:
    hf = build("llama", dtype=torch.float32, exact=False)
    before = id_of(hf)
    SETTINGS[what](hf)
    after = fingerprint.of(fingerprint.model_parts(hf))
    assert not before.endswith(after)


# --- a live model is edited after it was loaded ----------------------------------------------------------------------


def lora(hf: Any, layer: int = 1) -> None:
    """An adapter in a middle layer that changes what the model says."""
    target = f"model.layers.{layer}.mlp.down_proj"
    hf.add_adapter(peft.LoraConfig(r=2, target_modules=[target], init_lora_weights=False))


def edit(hf: Any) -> None:
    hf.model.layers[1].mlp.down_proj.weight.data *= 1.1


def edit_in_place(hf: Any) -> None:
    with torch.no_grad():
        hf.model.layers[1].mlp.down_proj.weight[3, 4] += 1.0


def replace(hf: Any) -> None:
    hf.model.layers[1].mlp.down_proj.weight = torch.nn.Parameter(torch.randn(32, 48), requires_grad=False)


EDITS = (lora, edit, edit_in_place, replace)


@pytest.mark.parametrize("change", EDITS)
def test_a_cache_from_before_an_edit_is_refused_and_the_edit_is_named(change: Callable[[Any], None]) -> None:
    model = kv.load(build("llama", dtype=torch.float32, exact=False))
    before, cache = model.model_id, engine.prefill(model, IDS[:6])
    old = engine.decide(model, cache, IDS[6:], (1, 2))
    change(model.hf)
    assert model.model_id != before
    named = r"layers\.1\.mlp\.down_proj|weight"
    for call in (
        lambda: engine.decide(model, cache, IDS[6:], (1, 2)),
        lambda: engine.capture(model, cache, IDS[6:]),
        lambda: engine.recompute(model, cache, (2,)),
        lambda: engine.sweep(model, cache, cache, [kv.Site(())], IDS[6:], (1, 2)),
    ):
        with pytest.raises(kv.InputError, match=rf"was written by .*since then .*({named}).*changed"):
            call()
    fresh = engine.decide(model, engine.prefill(model, IDS[:6]), IDS[6:], (1, 2))
    with torch.no_grad():
        own = model.hf(input_ids=torch.tensor([IDS])).logits[0, -1, [1, 2]].float()
    torch.testing.assert_close(fresh[0], own, rtol=0, atol=1e-4)
    assert (fresh - old).abs().max() > 1e-3, "the control: the edit matters"


def test_an_adapter_that_is_switched_off_and_on_is_another_model_and_the_first_again() -> None:
    hf = build("llama", dtype=torch.float32, exact=False)
    plain = id_of(hf)
    lora(hf)
    model = kv.load(hf)
    on, cache = model.model_id, engine.prefill(model, IDS[:6])
    right = engine.decide(model, cache, IDS[6:])
    hf.disable_adapters()
    off = model.model_id
    with pytest.raises(kv.InputError, match="since then"):
        engine.decide(model, cache, IDS[6:])
    hf.enable_adapters()
    assert model.model_id == on
    assert len({plain, on, off}) == 3
    assert torch.equal(engine.decide(model, cache, IDS[6:]), right)
    layer = next(m for m in hf.modules() if hasattr(m, "lora_A"))
    layer.scaling["default"] = 7.0
    assert model.model_id not in (on, off)
    layer.scaling["default"] = 1.0
    layer.merge()
    assert model.model_id not in (on, off)


def test_rotary_frequencies_changed_after_load_are_refused() -> None:
    """Keys would be moved by what was read when the model was loaded."""
    model = kv.load(build("llama", dtype=torch.float32, exact=False))
    model.hf.model.rotary_emb.inv_freq *= 0.5
    with pytest.raises(kv.UnsupportedError, match=r"inv_freq.*load it again"):
        engine.prefill(model, IDS)
    with pytest.raises(kv.UnsupportedError, match=r"rounded when the live model was cast.*dtype="):
        kv.load(build("llama", dtype=torch.float32, exact=False).half())
    other = kv.load(build("llama", dtype=torch.float32, exact=False))
    other.hf.half()  # rounds the frequencies as well
    with pytest.raises(kv.UnsupportedError, match=r"inv_freq.*load it again"):
        engine.prefill(other, IDS)


def test_a_writer_is_refused_by_a_model_with_an_adapter_in_a_middle_layer() -> None:
    model = kv.load(build("llama", dtype=torch.float32, exact=False))
    writer = new_writer(model, "packet", wrapper_tokens=2)
    writer.check(model)
    lora(model.hf)
    with pytest.raises(kv.InputError, match="belongs to"):
        writer.check(model)


def test_a_cache_file_is_refused_by_edited_weights(tmp_path: Path) -> None:
    model = kv.load(build("llama", dtype=torch.float32, exact=False))
    path = engine.prefill(model, IDS[:6]).save(tmp_path / "cache.safetensors")
    again = kv.load(build("llama", dtype=torch.float32, exact=False))
    engine.decide(again, kv.KVCache.load(path), IDS[6:])
    edit(again.hf)
    with pytest.raises(kv.InputError, match="was written by"):
        engine.decide(again, kv.KVCache.load(path), IDS[6:])


# --- runs ------------------------------------------------------------------------------------------------------------


def run(model: kv.Model, pairs: Any, out: Path, **options: Any) -> kv.Result:
    options = {"views": (), "parts": ("kv",), "progress": False, **GAPS, **options}
    return kv.probes.local_patching(model, pairs, out=out, **options)


def start(model: kv.Model, pairs: Any, out: Path, **options: Any) -> None:
    """A run that is stopped behind its first pair."""
    put, seen = Run.put, []

    def stop(self: Run, stage: str, key: str, *args: Any, **kwargs: Any) -> None:
        put(self, stage, key, *args, **kwargs)
        seen.append(stage)
        if seen.count("cells.pairs") == 1:
            raise KeyboardInterrupt

    Run.put = stop  # type: ignore[method-assign]
    try:
        with pytest.raises(KeyboardInterrupt):
            run(model, pairs, out, **options)
    finally:
        Run.put = put  # type: ignore[method-assign]


def refused(model: kv.Model, pairs: Any, out: Path, what: str, **options: Any) -> None:
    with pytest.raises(kv.InputError, match=rf"asked for something else: .*{what}"):
        run(model, pairs, out, resume=True, **options)


@pytest.fixture
def model() -> kv.Model:
    texts = [text for p in kv.tasks.pronoun(n=64, seed=0) for text in (p.text_old, p.text_new + " he she")]
    return tiny_with_tokenizer("llama", train(texts, vocab=1000), seed=3)


@pytest.fixture
def pairs() -> list[kv.tasks.Pair]:
    return kv.tasks.pronoun(n=4, seed=0)


def test_an_unfinished_run_goes_on_when_nothing_changed(model: kv.Model, pairs: Any, tmp_path: Path) -> None:
    """The control of all that follows."""
    start(model, pairs, tmp_path / "run")
    resumed = run(model, pairs, tmp_path / "run", resume=True)
    whole = run(model, pairs, tmp_path / "whole")
    assert resumed.frame.equals(whole.frame)


def test_edited_weights_end_a_run(model: kv.Model, pairs: Any, tmp_path: Path) -> None:
    start(model, pairs, tmp_path / "run")
    model.hf.model.layers[1].mlp.down_proj.weight.data *= 1.1
    refused(model, pairs, tmp_path / "run", r"weights\.layers\.1")


def test_an_adapter_ends_a_run(model: kv.Model, pairs: Any, tmp_path: Path) -> None:
    lora(model.hf)
    start(model, pairs, tmp_path / "run")
    model.hf.disable_adapters()
    refused(model, pairs, tmp_path / "run", r"weights\.layers\.1")


def test_a_hook_of_the_users_ends_a_run_and_one_that_differs_by_its_vector_does(
    model: kv.Model, pairs: Any, tmp_path: Path
) -> None:
    def steer(by: float) -> Any:
        vector = torch.full((32,), by, dtype=torch.float64)
        return lambda _m, _a, output: output + vector

    handle = model.hf.model.layers[1].mlp.register_forward_hook(steer(0.5))
    start(model, pairs, tmp_path / "run")
    handle.remove()
    refused(model, pairs, tmp_path / "run", "hooks")
    handle = model.hf.model.layers[1].mlp.register_forward_hook(steer(0.25))
    refused(model, pairs, tmp_path / "run", r"hooks\.model\.layers\.1\.mlp")
    handle.remove()
    model.hf.model.layers[1].mlp.register_forward_hook(steer(0.5))
    run(model, pairs, tmp_path / "run", resume=True)


@pytest.mark.parametrize("what", ["answers", "kind", "content", "order", "field", "text"])
def test_other_pairs_end_a_run(what: str, model: kv.Model, pairs: Any, tmp_path: Path) -> None:
    first, *rest = pairs
    other = {
        "answers": lambda p: dataclasses.replace(p, answer_old=p.answer_new, answer_new=p.answer_old),
        "kind": lambda p: dataclasses.replace(p, kind="control"),
        "content": lambda p: dataclasses.replace(p, content="another"),
        "order": lambda p: p,
        "field": lambda p: dataclasses.replace(p, old=p.new, new=p.old),
        "text": lambda p: dataclasses.replace(p, old=(*p.old[:-1], end(p)), new=(*p.new[:-1], end(p))),
    }[what]

    def end(pair: Any) -> Any:
        return dataclasses.replace(pair.old[-1], text=pair.old[-1].text + ", so")

    start(model, pairs, tmp_path / "run")
    changed = [*rest, first] if what == "order" else [other(first), *rest]
    refused(model, changed, tmp_path / "run", "sources" if what in ("content", "kind") else "items")


def test_a_chat_template_that_puts_in_the_date_ends_a_run_the_next_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.utils import chat_template_utils

    class Day(datetime.datetime):
        today_is = 3

        @classmethod
        def now(cls, tz: Any = None) -> datetime.datetime:
            return datetime.datetime(2026, 11, cls.today_is)

    monkeypatch.setattr(chat_template_utils, "datetime", Day)
    tokenizer = tiny_tokenizer(640)
    monkeypatch.setattr(tokenizer, "chat_template", "{{ strftime_now('%d') }}\n" + CHATML)
    model = tiny_with_tokenizer("llama", tokenizer, seed=3)
    pairs = [chatted(p) for p in kv.tasks.pronoun(n=4, seed=0)]
    start(model, pairs, tmp_path / "run")
    Day.today_is = 4
    refused(model, pairs, tmp_path / "run", r"items\.token_ids")
    Day.today_is = 3
    run(model, pairs, tmp_path / "run", resume=True)


def chatted(pair: kv.tasks.Pair) -> kv.tasks.Pair:
    """The pair as one turn of a chat, its last piece the beginning of the answer."""
    turns = [(kv.tasks.Message("user", p[:-1]), kv.tasks.Message("assistant", p[-1:])) for p in (pair.old, pair.new)]
    return dataclasses.replace(pair, old=turns[0], new=turns[1], chat=True)


def test_another_tokenizer_dtype_attention_code_or_version_ends_a_run(
    model: kv.Model, pairs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    start(model, pairs, out)
    tokenizer = tiny_tokenizer(bos=True)
    refused(dataclasses.replace(model, tokenizer=tokenizer), pairs, out, "tokenizer")
    single = build("llama", attn="sdpa", vocab=len(model.tokenizer), seed=3, dtype=torch.float32)
    refused(kv.load(single, tokenizer=model.tokenizer), pairs, out, "dtype")
    model.hf.set_attn_implementation("eager")
    refused(model, pairs, out, "attention")
    model.hf.set_attn_implementation("sdpa")
    for name in ("code", "versions"):
        manifest = json.loads((out / "manifest.json").read_text())
        kept = json.dumps(manifest)
        manifest["request"][name] = "older" if name == "code" else {**manifest["request"][name], "torch": "2.6.0"}
        manifest["request_sha256"] = "older"
        (out / "manifest.json").write_text(json.dumps(manifest))
        refused(model, pairs, out, name)
        (out / "manifest.json").write_text(kept)
    run(model, pairs, out, resume=True)


def test_the_code_is_hashed_whole(tmp_path: Path) -> None:
    assert fingerprint.code() == fingerprint.code()
    assert len(fingerprint.code()) == 16


def test_document_questions_are_hashed_as_they_are_run(tmp_path: Path) -> None:
    """Of block probes: the token ids of every block, the answers, and what ends one."""
    model = kv.load("organism:trained")
    questions = kv.tasks.documents.load("biography", n=3, documents=2, seed=0)
    options: dict[str, Any] = {"operators": ("splice",), "documents": (2,), "timing": 0, "progress": False}

    def request(given: Any) -> dict[str, Any]:
        return kv.probes.splice_quality(model, given, **options).manifest["request"]

    before = request(questions)
    assert request(iter(questions)) == before, "the control; a generator will do"
    other = [dataclasses.replace(questions[0], stops=("!",)), *questions[1:]]
    assert request(other)["items"]["answers"] != before["items"]["answers"]
    more = [dataclasses.replace(questions[0], aliases=("x",)), *questions[1:]]
    assert request(more)["items"]["answers"] != before["items"]["answers"]


def test_architectures_share_no_id() -> None:
    names = [n for n in CONFIGS if n != "llama3"]
    assert len({id_of(build(n, dtype=torch.float32, exact=False)).partition("#")[2] for n in names}) == len(names)


def test_a_function_of_the_users_is_part_of_the_request() -> None:
    """Under one name, two functions that differ in code, closure or default are two requests."""

    def made(by: float) -> Callable[..., float]:
        return lambda x, scale=1.0: x + by * scale

    same = fingerprint.function(made(1.0))
    assert same == fingerprint.function(made(1.0))
    assert same != fingerprint.function(made(2.0))
    assert fingerprint.function(lambda x: x + 1) != fingerprint.function(lambda x: x - 1)
    assert fingerprint.function(lambda x, y=1: x + y) != fingerprint.function(lambda x, y=2: x + y)
    model = kv.load("organism:trained")
    pairs = kv.tasks.load("gate", n=2, seed=0)

    def in_two(model: kv.Model, ids: Any) -> kv.KVCache:
        return engine.extend(model, engine.prefill(model, ids[:2]), ids[2:])[0]

    requests = [
        kv.probes.attention_deviation(model, pairs, operators=[("mine", compose)], progress=False, bins=2).manifest[
            "request"
        ]["options"]["functions"]["mine"]
        for compose in (
            lambda model, blocks: Made(engine.prefill(model, blocks.context), 0, 0),
            lambda model, blocks: Made(in_two(model, blocks.context), 0, 0),
        )
    ]
    assert requests[0] != requests[1]


def test_what_ends_an_answer_and_how_matrices_are_multiplied_is_in_the_request(model: kv.Model, pairs: Any) -> None:
    from kvnotes_interp.probes.request import request_of

    before = request_of("local_patching", model, pairs, {})
    model.hf.generation_config.eos_token_id = [2, 5]
    torch.set_float32_matmul_precision("high")
    try:
        after = request_of("local_patching", model, pairs, {})
    finally:
        torch.set_float32_matmul_precision("highest")
        model.hf.generation_config.eos_token_id = 2
    assert {name for name in after if after[name] != before[name]} == {"stop_ids", "matmul_precision"}
