"""The two ends of composing: full recompute and the bare join, on every architecture, with exact cost counts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from kvnotes_interp import compat, engine, operators
from kvnotes_interp.errors import InputError
from kvnotes_interp.model import Model
from kvnotes_interp.operators import Blocks
from tests.architectures import ARCHITECTURES
from tests.reference import full_cache
from tests.tiny import tiny

BLOCKS = Blocks((5, 6, 7), ((11, 12, 13, 14, 15, 16, 17, 18), (21, 22), (31, 32, 33, 34, 35)), (41, 42))


@contextmanager
def counted(model: Model) -> Iterator[list[int]]:
    """Tokens seen by each decoder layer, counted by hooks."""
    layers = compat.layers(model.hf)
    seen = [0] * len(layers)

    def hook(index: int):
        def count(_module: object, args: tuple, kwargs: dict) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            seen[index] += hidden.shape[0] * hidden.shape[1]

        return count

    handles = [layer.register_forward_pre_hook(hook(i), with_kwargs=True) for i, layer in enumerate(layers)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_the_join_is_each_chunk_run_alone_where_it_stands(name: str) -> None:
    """Independent: plain transformers, no cache of ours, each chunk prefilled at its target positions."""
    model = tiny(name)
    made = operators.no_recompute(model, BLOCKS)
    assert made.cache.token_ids[0].tolist() == list(BLOCKS.context)
    assert made.cache.positions.tolist() == list(range(BLOCKS.n_context))
    assert made.cache.end == BLOCKS.n_context
    for (start, stop), tokens in zip(((0, 3), *BLOCKS.spans), (BLOCKS.prefix, *BLOCKS.chunks), strict=True):
        want = full_cache(model.hf, torch.tensor([tokens]), torch.arange(start, stop))
        for layer, (keys, values) in enumerate(want):
            torch.testing.assert_close(made.cache.keys[layer][:, :, start:stop], keys, atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(made.cache.values[layer][:, :, start:stop], values, atol=1e-9, rtol=1e-7)
    # The control of this test: keys that were not moved are elsewhere.
    still = operators.no_recompute(model, BLOCKS, move_keys=False)
    start, stop = BLOCKS.spans[-1]
    turned = [i for i, layer in enumerate(model.rope.layers) if layer.inv_freq is not None]
    for layer in turned:
        gap = still.cache.keys[layer][:, :, start:stop] - made.cache.keys[layer][:, :, start:stop]
        assert float(gap.abs().max()) > 1e-2
    assert still.cache.positions.tolist() == [0, 1, 2, *range(8), *range(2), *range(5)]
    assert still.cache.end == BLOCKS.n_context


@pytest.mark.parametrize("name", ["llama3", "qwen3", "gemma3"])
def test_full_recompute_is_one_prefill_and_one_block_alone_is_full(name: str) -> None:
    model = tiny(name)
    full = operators.full_recompute(model, BLOCKS)
    assert full.cache == engine.prefill(model, list(BLOCKS.context))
    alone = Blocks((), (BLOCKS.context,), BLOCKS.suffix)
    assert operators.no_recompute(model, alone).cache == full.cache
    # With a second block behind it, that block's keys and values are of other hidden states.
    joined = operators.no_recompute(model, BLOCKS).cache
    assert float((joined.values[1][:, :, 3:] - full.cache.values[1][:, :, 3:]).abs().max()) > 1e-2
    torch.testing.assert_close(joined.values[1][:, :, :3], full.cache.values[1][:, :, :3], atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_costs_are_what_the_layers_saw(name: str) -> None:
    model = tiny(name)
    for operator in map(operators.find, ("full_recompute", "no_recompute", "no_recompute_unmoved")):
        with counted(model) as seen:
            made = operator(model, BLOCKS)
        assert sum(seen) == made.layer_tokens + made.compiled_layer_tokens, operator.name
        assert made.recomputed_tokens == (BLOCKS.n_context if operator.name == "full_recompute" else 0)
    with counted(model) as seen:
        ready = operators.precompile(model, BLOCKS)
    assert sum(seen) == ready.layer_tokens == BLOCKS.n_context * model.shape.n_layers
    with counted(model) as seen:
        made = operators.no_recompute(model, BLOCKS, compiled=ready)
    assert (sum(seen), made.layer_tokens, made.compiled_layer_tokens) == (0, 0, 0)
    assert made.cache == operators.no_recompute(model, BLOCKS).cache


def test_compiled_parts_of_other_blocks_are_refused() -> None:
    model = tiny("llama")
    ready = operators.precompile(model, BLOCKS)
    other = Blocks(BLOCKS.prefix, (BLOCKS.chunks[0], (21, 23), BLOCKS.chunks[2]), BLOCKS.suffix)
    with pytest.raises(InputError, match="compiled part 2 holds other tokens"):
        operators.no_recompute(model, other, compiled=ready)
    with pytest.raises(InputError, match="4 parts for 3"):
        operators.no_recompute(model, Blocks((), BLOCKS.chunks, (1,)), compiled=ready)


def test_an_empty_prefix_and_parents_left_alone() -> None:
    model = tiny("qwen3")
    blocks = Blocks((), BLOCKS.chunks, BLOCKS.suffix)
    ready = operators.precompile(model, blocks)
    before = [part.keys[0].clone() for part in ready.chunks]
    made = operators.no_recompute(model, blocks, compiled=ready)
    assert made.cache[: len(blocks.chunks[0])] == ready.chunks[0]
    assert all(torch.equal(a, b.keys[0]) for a, b in zip(before, ready.chunks, strict=True))
