"""Writers: what they compile, by plain transformers; a Reader that nothing reaches; folders that are refused."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer

from kvnotes_interp import compat, engine
from kvnotes_interp.cache import KVCache
from kvnotes_interp.errors import InputError, UnsupportedError
from kvnotes_interp.model import Model, wrap
from kvnotes_interp.operators import Writer, new_writer
from kvnotes_interp.operators.writer import KINDS, PACKET_STD
from kvnotes_interp.sources import ModelSource
from tests.architectures import ARCHITECTURES, EAGER_ONLY, build
from tests.reference import full_logits
from tests.tiny import tiny
from tests.writers import merged, stirred, wrapped_cache

CHUNKS = [(11, 12, 13, 14, 15, 16, 17, 18, 19), (21, 22), (31, 32, 33, 34, 35)]  # the first is longer than a window
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])


def gap(a: KVCache, b: KVCache) -> float:
    pairs = zip(a.keys + a.values, b.keys + b.values, strict=True)
    return max(float((x - y).abs().max()) for x, y in pairs)


def fresh(name: str) -> Any:
    return build(name, attn="eager" if name in EAGER_ONLY else "sdpa")


# --- what is compiled ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_a_padded_batch_is_each_document_alone_by_plain_transformers(name: str) -> None:
    """The adapter merged into the weights of a model of its own, the wrappers put around the embeddings by hand."""
    model = tiny(name)
    writer = stirred(model, "joint", wrapper_tokens=3)
    with torch.no_grad():
        caches = writer.compile(model, CHUNKS)
    plain = merged(fresh(name), writer)
    for chunk, cache in zip(CHUNKS, caches, strict=True):
        assert cache.token_ids[0].tolist() == [-1] * 3 + list(chunk) + [-1] * 3
        assert cache.positions.tolist() == list(range(len(chunk) + 6))
        for layer, (keys, values) in enumerate(wrapped_cache(plain, writer, chunk, 0)):
            torch.testing.assert_close(cache.keys[layer], keys, atol=1e-10, rtol=1e-9)
            torch.testing.assert_close(cache.values[layer], values, atol=1e-10, rtol=1e-9)
    # The control: without the adapter, or with other wrappers, it is something else.
    bare = wrapped_cache(fresh(name), writer, CHUNKS[0], 0)
    assert float((bare[1][1] - caches[0].values[1]).abs().max()) > 1e-3
    with torch.no_grad():
        other = stirred(model, "packet", wrapper_tokens=3, seed=5).compile(model, CHUNKS[:1])[0]
    assert gap(other, caches[0]) > 1e-3


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_a_new_adapter_compiles_what_the_model_does(name: str) -> None:
    model = tiny(name)
    writer = new_writer(model, "sempic")
    with torch.no_grad():
        batch = writer.compile(model, CHUNKS)
        for chunk, cache in zip(CHUNKS, batch, strict=True):
            want = engine.prefill(model, chunk)
            assert writer.compile(model, [chunk])[0] == want, "alone: the same bits"
            assert gap(cache, want) < 1e-12


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "granite", "llama"])
def test_wrappers_stand_where_the_embedding_layer_s_output_does(name: str) -> None:
    """Scaled by the model where it scales that output (Granite), not where the layer itself scales (Gemma)."""
    model = tiny(name)
    writer, seen = new_writer(model, "packet", wrapper_tokens=2), []
    first = compat.layers(model.hf)[0]
    handle = first.register_forward_pre_hook(lambda _m, args: seen.append(args[0]))
    try:
        with torch.no_grad():
            writer.compile(model, CHUNKS[:1])
        engine.prefill(model, CHUNKS[0])
    finally:
        handle.remove()
    assert writer.header is not None
    scale = 2.0 if name == "granite" else 1.0
    torch.testing.assert_close(seen[0][0, :2], scale * writer.header.detach(), atol=1e-12, rtol=0)
    torch.testing.assert_close(seen[0][0, 2:-2], seen[1][0], atol=0, rtol=0)


def test_what_is_drawn_depends_on_the_seed_alone() -> None:
    model = tiny("llama")
    state = torch.get_rng_state()
    a, b, c = (new_writer(model, "joint", seed=seed, wrapper_tokens=64) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert a.fingerprint == b.fingerprint != c.fingerprint
    assert a.header is not None
    assert a.trailer is not None
    assert not torch.equal(a.header, a.trailer)
    for packet in (a.header, a.trailer):
        packet = packet.detach()
        assert float(packet.std()) == pytest.approx(PACKET_STD, rel=0.1)
        assert float(packet.mean()) == pytest.approx(0, abs=5 * PACKET_STD / packet.numel() ** 0.5)
    assert all(not bool(p.any()) for n, p in a.parameters().items() if "lora_B" in n)


def test_sixteen_bits_keep_the_trained_numbers_in_float32() -> None:
    model = wrap(build("llama", dtype=torch.bfloat16, attn="sdpa"), None, ModelSource(name="half", kind="live"))
    writer = new_writer(model, "joint")
    assert {p.dtype for p in writer.parameters().values()} == {torch.float32}
    assert writer.compile(model, CHUNKS)[0].dtype == torch.bfloat16
    assert {p.dtype for p in new_writer(tiny("llama"), "joint").parameters().values()} == {torch.float64}


# --- the Reader ----------------------------------------------------------------------------------------------------


def trained(model: Model, kind: Any, *, steps: int = 3) -> Writer:
    """A few steps of AdamW on what the frozen model, reading the joined caches, says."""
    writer = new_writer(model, kind)
    optimizer = torch.optim.AdamW(writer.parameters().values(), lr=1e-2)
    for _ in range(steps):
        first, second = writer.compile(model, CHUNKS[:2])
        cache = first + second.moved(len(first))
        fork = compat.new_cache(cache.keys, cache.values)
        hidden = compat.forward(model.hf, torch.tensor([[41, 42]]), fork, torch.arange(cache.end, cache.end + 2))
        loss = -compat.unembed(model.hf, hidden[:, -1]).log_softmax(-1)[0, 7]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return writer


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt_neox", "qwen3_moe", "phi3"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_reader_is_untouched(name: str, kind: Any) -> None:
    model = tiny(name)
    before = {n: t.clone() for n, t in model.hf.state_dict().items()}
    modules = {n: type(m) for n, m in model.hf.named_modules()}
    logits, hooks = full_logits(model.hf, IDS), hooks_of(model.hf)
    writer = trained(model, kind)
    with torch.no_grad():
        compiled = writer.compile(model, CHUNKS)
    assert torch.equal(full_logits(model.hf, IDS), logits)
    assert {n: type(m) for n, m in model.hf.named_modules()} == modules
    assert not any(isinstance(m, LoraLayer) for m in model.hf.modules())
    assert all(torch.equal(t, before[n]) for n, t in model.hf.state_dict().items())
    assert not any(p.requires_grad or p.grad is not None for p in model.hf.parameters())
    assert hooks_of(model.hf) == hooks
    # The control: training did something, and the Writer is not the Reader.
    assert gap(compiled[0], new_writer(model, kind).compile(model, CHUNKS)[0]) > 1e-3
    if writer.peft is not None:
        assert sum(isinstance(m, LoraLayer) for m in writer.peft.modules()) >= model.shape.n_layers


def hooks_of(hf: Any) -> list[int]:
    """Hooks that are there; transformers leaves some of its own where hidden states were once asked for."""
    return [h for m in hf.modules() for h in (*m._forward_hooks, *m._forward_pre_hooks)]


@pytest.mark.parametrize("name", ["llama", "gemma3", "llama_biased"])
def test_the_twin_shares_every_weight(name: str) -> None:
    model = tiny(name)
    writer = new_writer(model, "sempic")
    assert writer.peft is not None

    def storages(module: torch.nn.Module) -> dict[int, int]:
        tensors = (*module.parameters(), *module.buffers())
        return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}

    mine, theirs = storages(model.hf), storages(writer.peft)
    added = sum(size for where, size in theirs.items() if where not in mine)
    assert set(mine) <= set(theirs)
    assert added == sum(p.numel() * p.element_size() for p in writer.parameters().values())
    assert writer.peft.get_base_model() is not model.hf
    assert writer.peft.config is not model.hf.config


def test_gradients_are_finite_differences_through_compile_move_and_read() -> None:
    for name in ("llama3", "gpt_neox", "glm", "nanochat", "gemma3"):  # partial, interleaved, the other way round
        model = tiny(name)
        writer = stirred(model, "joint", wrapper_tokens=2)

        def loss(model: Model = model, writer: Writer = writer) -> torch.Tensor:
            first, second = writer.compile(model, CHUNKS[:2])
            cache = first.moved(3) + second.moved(3 + len(first))
            fork = compat.new_cache(cache.keys, cache.values)
            hidden = compat.forward(model.hf, torch.tensor([[41, 42]]), fork, torch.arange(cache.end, cache.end + 2))
            return compat.unembed(model.hf, hidden[:, -1])[0, 7]

        found = writer.parameters()
        grads = dict(zip(found, torch.autograd.grad(loss(), list(found.values()), allow_unused=True), strict=True))
        generator = torch.Generator().manual_seed(0)
        step = 1e-5
        names = ["header", "trailer", next(n for n in found if "lora_A" in n), next(n for n in found if "lora_B" in n)]
        for parameter in names:
            grad, way = grads[parameter], torch.randn(found[parameter].shape, generator=generator).double()
            assert grad is not None
            with torch.no_grad():
                found[parameter] += step * way
                up = float(loss())
                found[parameter] -= 2 * step * way
                down = float(loss())
                found[parameter] += step * way
            want = (up - down) / (2 * step)
            assert abs(want) > 1e-3, (name, parameter)
            assert float((grad * way).sum()) == pytest.approx(want, rel=1e-5), (name, parameter)


# --- folders -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded_compiles_the_same_bits(kind: Any, tmp_path: Path) -> None:
    model = tiny("qwen3")
    writer = stirred(model, kind)
    writer.save(tmp_path / "w", training={"steps": 3})
    again = Writer.load(tmp_path / "w", model)
    assert again.fingerprint == writer.fingerprint
    assert set(again.parameters()) == set(writer.parameters())
    with torch.no_grad():
        for a, b in zip(again.compile(model, CHUNKS), writer.compile(model, CHUNKS), strict=True):
            assert a == b
    about = json.loads((tmp_path / "w" / "writer.json").read_text())
    assert about["training"] == {"steps": 3}
    assert about["model_id"] == model.model_id
    # A training run keeps its best Writer in `best`, and a second save replaces the first.
    stirred(model, kind, seed=3).save(tmp_path / "best")
    writer.save(tmp_path / "best")
    assert Writer.load(tmp_path, model).fingerprint == writer.fingerprint
    assert not [p for p in tmp_path.rglob("*") if p.name.endswith(".tmp")]


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "phi3"])
def test_the_adapter_loads_anywhere(name: str, tmp_path: Path) -> None:
    """PEFT on a model of its own, plain transformers: nothing of this package."""
    model = tiny(name)
    writer = stirred(model, "sempic")
    writer.save(tmp_path)
    loaded = PeftModel.from_pretrained(fresh(name), str(tmp_path / "adapter"))
    want = wrapped_cache(loaded.get_base_model(), writer, CHUNKS[0], 0)
    with torch.no_grad():
        got = writer.compile(model, CHUNKS[:1])[0]
    for layer, (keys, values) in enumerate(want):
        torch.testing.assert_close(got.keys[layer], keys, atol=1e-12, rtol=0)
        torch.testing.assert_close(got.values[layer], values, atol=1e-12, rtol=0)


def test_wrong_folders_are_refused_by_name(tmp_path: Path) -> None:
    model = tiny("llama")
    stirred(model, "joint").save(tmp_path / "w")
    about, weights = tmp_path / "w" / "writer.json", tmp_path / "w" / "adapter" / "adapter_model.safetensors"
    with pytest.raises(InputError, match=r"belongs to 'tiny-llama#.*the model at hand is 'tiny-qwen2#"):
        Writer.load(tmp_path / "w", tiny("qwen2"))
    with pytest.raises(InputError, match=r"there is no writer\.json in .*nothing"):
        Writer.load(tmp_path / "nothing", model)
    whole, text = weights.read_bytes(), about.read_text()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(InputError, match=r"adapter_model\.safetensors is not the file that writer\.json describes"):
        Writer.load(tmp_path / "w", model)
    weights.unlink()
    with pytest.raises(InputError, match=r"adapter_model\.safetensors is missing"):
        Writer.load(tmp_path / "w", model)
    weights.write_bytes(whole)
    about.write_text(text.replace('"joint"', '"packet"'))
    with pytest.raises(InputError, match="of kind 'packet' with the files"):
        Writer.load(tmp_path / "w", model)
    about.write_text(text.replace("writer/1", "writer/0"))
    with pytest.raises(InputError, match=r"no Writer of format 'writer/1' \(found 'writer/0'\)"):
        Writer.load(tmp_path / "w", model)
    about.write_text(text)
    Writer.load(tmp_path / "w", model)


def test_another_revision_is_refused_even_with_the_same_fingerprint() -> None:
    model = tiny("llama")
    mine, theirs = (dataclasses.replace(model, source=dataclasses.replace(model.source, revision=r * 40)) for r in "ab")
    writer = new_writer(mine, "packet")
    writer.compile(model, CHUNKS)  # a revision that is not known is no other revision
    with pytest.raises(InputError, match=r"trained on revision aaaa.*the model is bbbb"):
        writer.compile(theirs, CHUNKS)


def test_wrong_uses_are_refused() -> None:
    model = tiny("llama")
    with pytest.raises(InputError, match=r'kind=.sempik.*Did you mean "sempic"'):
        new_writer(model, "sempik")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"targets=\('up_proj',\): choose some of q_proj"):
        new_writer(model, "sempic", targets=("up_proj",))
    with pytest.raises(InputError, match="rank=0"):
        new_writer(model, "sempic", rank=0)
    with pytest.raises(InputError, match="wrapper_tokens=0"):
        new_writer(model, "packet", wrapper_tokens=0)
    writer = new_writer(model, "packet")
    for chunks in ([], [(1, 2), ()]):
        with pytest.raises(InputError, match="chunks to compile"):
            writer.compile(model, chunks)


def test_without_peft_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UnsupportedError, match=r'pip install "kvnotes-interp\[train\]"'):
        new_writer(tiny("llama"), "sempic")
    new_writer(tiny("llama"), "packet")  # needs none
