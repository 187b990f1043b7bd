"""KV gradient checkpointing: the same values, the same gradients, less kept; and everything put back."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor

from kvnotes_interp import compat, engine
from kvnotes_interp.cache import KVCache
from kvnotes_interp.errors import InputError
from kvnotes_interp.model import Model
from kvnotes_interp.operators import Writer
from kvnotes_interp.training.checkpointing import kv_checkpointing, saved_bytes
from tests.architectures import ARCHITECTURES
from tests.tiny import tiny
from tests.writers import stirred

CHUNKS = [(11, 12, 13, 14, 15, 16, 17, 18, 19), (21, 22), (31, 32, 33, 34, 35)]
LONG = [tuple(3 + i % 90 for i in range(120))]


def tensors(caches: tuple[KVCache, ...]) -> list[Tensor]:
    return [t for cache in caches for t in cache.keys + cache.values]


def loss_of(caches: tuple[KVCache, ...]) -> Tensor:
    """Any function in which every key and value counts, and not linearly."""
    generator = torch.Generator().manual_seed(0)
    parts = [(t.tanh() * torch.randn(t.shape, generator=generator, dtype=t.dtype)).sum() for t in tensors(caches)]
    return torch.stack(parts).sum()


def both(model: Model, writer: Writer) -> tuple[tuple[KVCache, ...], tuple[KVCache, ...]]:
    plain = writer.compile(model, CHUNKS)
    with kv_checkpointing(writer.network(model)):
        return plain, writer.compile(model, CHUNKS)


@pytest.mark.parametrize("name", list(ARCHITECTURES))
@pytest.mark.parametrize("kind", ["packet", "joint"])
def test_values_and_gradients_are_those_of_the_plain_path(name: str, kind: Any) -> None:
    model = tiny(name)
    writer = stirred(model, kind, wrapper_tokens=3)
    plain, saved = both(model, writer)
    assert all(a == b for a, b in zip(plain, saved, strict=True)), "the same bits"
    found = writer.parameters()
    want, got = (torch.autograd.grad(loss_of(c), list(found.values()), allow_unused=True) for c in (plain, saved))
    reached = 0
    for parameter, a, b in zip(found, want, got, strict=True):
        assert (a is None) == (b is None), parameter
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)
            reached += float(a.abs().max()) > 1e-6
    # What the last layer asks and puts out is in no key and no value.
    last = f"layers.{model.shape.n_layers - 1}."
    assert {n for n, g in zip(found, want, strict=True) if g is None} <= {n for n in found if last in n}
    assert reached >= 2


def test_a_recompute_without_the_adapter_would_be_seen() -> None:
    """The control: what runs in backward decides the gradients."""
    model = tiny("llama")
    writer = stirred(model, "joint", wrapper_tokens=3)
    assert writer.peft is not None
    plain, saved = both(model, writer)
    want = torch.autograd.grad(loss_of(plain), [writer.parameters()["header"]])[0]
    for module in writer.peft.modules():
        if isinstance(module, LoraLayer):
            module.scaling["default"] = 0.0
    got = torch.autograd.grad(loss_of(saved), [writer.parameters()["header"]])[0]
    assert float((got - want).abs().max()) > 1e-3 * float(want.abs().max())


@pytest.mark.parametrize("kind", ["sempic", "packet"])
def test_less_is_kept_and_it_is_freed(kind: Any) -> None:
    model = tiny("llama")
    writer = stirred(model, kind)
    network = writer.network(model)
    weights = [*network.parameters(), *network.buffers(), *writer.parameters().values()]

    def plain() -> list[Tensor]:
        return tensors(writer.compile(model, LONG))

    def checkpointed() -> list[Tensor]:
        with kv_checkpointing(network):
            return plain()

    naive, kept = (saved_bytes(fn, apart_from=weights) for fn in (plain, checkpointed))
    n = len(LONG[0]) + (0 if kind == "sempic" else 16)
    shape = model.shape
    inputs = shape.n_layers * n * shape.d_model * 8
    entries = shape.kv_bytes(n, bytes_per_number=8)
    assert inputs + entries <= kept < 1.3 * (inputs + entries), "the layers' inputs, keys and values, and little else"
    assert naive > 2.5 * kept
    gc.disable()  # nothing may wait for it: the caller's cache is in no ring with what it holds
    try:
        out = checkpointed()
        alive = weakref.ref(out[0])
        del out
        assert alive() is None
    finally:
        gc.enable()


def test_saved_bytes_are_what_autograd_keeps() -> None:
    a, b = (torch.randn(5, 7, dtype=torch.float64, requires_grad=True) for _ in "ab")
    size = 5 * 7 * 8
    assert saved_bytes(lambda: [(a * b).sum()]) == 2 * size + 8
    assert saved_bytes(lambda: [(a * b).sum()], apart_from=[a]) == size + 8
    assert saved_bytes(lambda: [a.exp().exp()]) == 2 * size, "the second result is saved and returned: once"
    assert saved_bytes(lambda: [a[:2] * a[2:4]]) == size + 2 * 7 * 8, "two views of one storage"
    with torch.no_grad():
        assert saved_bytes(lambda: [a * b]) == size


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_neox"])
def test_everything_is_put_back(name: str) -> None:
    model = tiny(name)
    layers = compat.layers(model.hf)
    before = [dict(layer.__dict__) for layer in layers]
    hooks = [[dict(m._forward_hooks) for m in layer.modules()] for layer in layers]

    def interrupted() -> None:
        with kv_checkpointing(model.hf):
            assert all("forward" in layer.__dict__ for layer in layers)
            raise RuntimeError("on the way")

    with pytest.raises(RuntimeError, match="on the way"):
        interrupted()
    assert [dict(layer.__dict__) for layer in layers] == before
    assert [[dict(m._forward_hooks) for m in layer.modules()] for layer in layers] == hooks
    mine = layers[0].forward
    layers[0].forward = mine
    try:
        with kv_checkpointing(model.hf):
            assert layers[0].forward is not mine
        assert layers[0].__dict__["forward"] is mine, "what someone else had put there"
    finally:
        del layers[0].forward


def test_a_pass_on_top_of_a_cache_is_refused_and_one_without_gradients_runs_as_ever() -> None:
    model = tiny("llama")
    cache = engine.prefill(model, CHUNKS[0])
    want, _ = engine.extend(model, cache, CHUNKS[1])
    with kv_checkpointing(model.hf):
        assert engine.extend(model, cache, CHUNKS[1])[0] == want
        fork = compat.new_cache(cache.keys, cache.values)
        with pytest.raises(InputError, match="layer 0 already holds 9 keys"):
            compat.forward(model.hf, torch.tensor([CHUNKS[1]]), fork, torch.arange(9, 11))
