"""Splicing and its baselines: identities on every architecture, a block-masked reference, exact costs, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from kvnotes_interp import compat, engine, operators
from kvnotes_interp.cache import KVCache
from kvnotes_interp.errors import InputError
from kvnotes_interp.model import Model
from kvnotes_interp.operators import Blocks, attach, find
from kvnotes_interp.operators.epic import _spread
from kvnotes_interp.operators.seams import count_of, stale_slots
from kvnotes_interp.operators.splice import splice
from tests.architectures import ARCHITECTURES, WINDOW
from tests.reference import full_cache, full_logits
from tests.tiny import tiny

# The first chunk is longer than the sliding window of the tiny models.
BLOCKS = Blocks((5, 6, 7), ((11, 12, 13, 14, 15, 16, 17, 18), (21, 22), (31, 32, 33, 34, 35)), (41, 42))
STALE = list(range(3, 18))
EXACT = {"atol": 1e-9, "rtol": 0}
assert len(BLOCKS.chunks[0]) > WINDOW


def last_logits(model: Model, cache: KVCache, suffix: tuple[int, ...] = BLOCKS.suffix) -> torch.Tensor:
    _, hidden = engine.extend(model, cache, suffix)
    return compat.unembed(model.hf, hidden[:, -1])[0]


def same(a: KVCache, b: KVCache) -> None:
    assert torch.equal(a.token_ids, b.token_ids)
    assert torch.equal(a.positions, b.positions)
    assert a.end == b.end
    for x, y in zip(a.keys + a.values, b.keys + b.values, strict=True):
        torch.testing.assert_close(x, y, **EXACT)


def apart(a: KVCache, b: KVCache) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(a.keys + a.values, b.keys + b.values, strict=True))


# --- identities on every architecture ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_repairing_all_is_full_recompute(name: str) -> None:
    """Against plain transformers: logits of one forward, keys and values of one prefill."""
    model = tiny(name)
    want = full_logits(model.hf, torch.tensor([BLOCKS.token_ids]))[0, -1]
    plain = full_cache(model.hf, torch.tensor([BLOCKS.context]))
    for operator in ("splice@all", "epic@1", "cacheblend@1", "random_recompute@1"):
        made = find(operator)(model, BLOCKS)
        for layer, (keys, values) in enumerate(plain):
            torch.testing.assert_close(made.cache.keys[layer], keys, **EXACT)
            torch.testing.assert_close(made.cache.values[layer], values, **EXACT)
        torch.testing.assert_close(last_logits(model, made.cache), want, **EXACT)
    # The controls of this test: a bare join, and a join repaired in part, give something else.
    for operator in ("splice@0", "splice@1"):
        assert float((last_logits(model, find(operator)(model, BLOCKS).cache) - want).abs().max()) > 1e-3, operator


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_chunk_spliced_where_it_stood_is_the_identity(name: str) -> None:
    """Cut out of its own context, turned to 0, 1, ... and spliced behind its own prefix again."""
    model = tiny(name)
    full = operators.full_recompute(model, BLOCKS).cache
    for start, stop in BLOCKS.spans:
        chunk = full[start:stop].placed(torch.arange(stop - start))
        made = attach(model, full[:start], chunk)
        assert (made.recomputed_tokens, made.layer_tokens) == (0, 0)
        same(made.cache, full[:stop])
        whole = made.cache + full[stop:]
        torch.testing.assert_close(last_logits(model, whole), last_logits(model, full), **EXACT)
    # Its control: at another position it is not the identity.
    start, stop = BLOCKS.spans[1]
    chunk = full[start:stop].placed(torch.arange(1, 1 + stop - start))
    assert apart(attach(model, full[: start - 1], chunk).cache, full[: stop - 1]) > 1e-3


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_keys_moved_are_keys_prefilled_at_the_offset(name: str) -> None:
    model = tiny(name)
    chunk = BLOCKS.chunks[0]
    made = attach(model, engine.prefill(model, list(range(50, 90))), engine.prefill(model, chunk))
    assert made.cache.positions.tolist() == list(range(48))
    for layer, (keys, values) in enumerate(full_cache(model.hf, torch.tensor([chunk]), torch.arange(40, 48))):
        torch.testing.assert_close(made.cache.keys[layer][:, :, 40:], keys, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(made.cache.values[layer][:, :, 40:], values, **EXACT)


def masked_logits(model: Model, blocks: Blocks) -> torch.Tensor:
    """One plain forward of the whole prompt in which a chunk sees only itself and the suffix sees all."""
    n, owner = len(blocks), torch.zeros(len(blocks), dtype=torch.long)
    for index, (start, stop) in enumerate(blocks.spans):
        owner[start:stop] = index + 1
    slots = torch.arange(n)
    seen = (slots <= slots[:, None]) & ((owner == owner[:, None]) | (slots[:, None] >= blocks.n_context))
    masks = {"full_attention": seen, "sliding_attention": seen & (slots > slots[:, None] - WINDOW)}
    added = {
        kind: torch.zeros(1, 1, n, n, dtype=torch.float64).masked_fill(~mask, torch.finfo(torch.float64).min)
        for kind, mask in masks.items()
    }
    kinds = set(getattr(model.hf.config, "layer_types", None) or ()) & set(added)
    slides = getattr(model.hf.config, "sliding_window", None) is not None
    mask: Any = added if len(kinds) > 1 else added["sliding_attention" if slides else "full_attention"]
    ids = torch.tensor([blocks.token_ids])
    return model.hf(input_ids=ids, position_ids=slots[None], attention_mask=mask, use_cache=False).logits[0, -1]


@pytest.mark.parametrize(
    "name", ["llama", "llama3", "yarn", "qwen3", "mistral", "gemma2", "gemma3", "cohere2", "olmo3"]
)
def test_the_bare_join_is_one_forward_under_a_block_mask(name: str) -> None:
    """Served right although the first chunk is longer than the window of the sliding layers."""
    model = tiny(name)
    got = last_logits(model, splice(model, BLOCKS).cache)
    want = masked_logits(model, BLOCKS)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)  # keys are turned in float32 angles' precision
    # Its control: keys left where they were compiled do not give it, the positions of this prompt being what they are.
    still = last_logits(model, find("no_recompute_unmoved")(model, BLOCKS).cache)
    assert float((still - want).abs().max()) > 1e-2


# --- seams and baselines -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama3", "qwen3", "gemma3", "gpt_neox"])
@pytest.mark.parametrize("n", [1, 3])
def test_repair_is_the_tokens_run_anew_one_after_the_other(name: str, n: int) -> None:
    """Slow reference: token by token, each repaired token is the next token of the cache before it."""
    model = tiny(name)
    made = splice(model, BLOCKS, seam_repair=n)
    ready = operators.precompile(model, BLOCKS)
    assert ready.prefix is not None
    cache = ready.prefix
    for chunk, tokens in zip(ready.chunks, BLOCKS.chunks, strict=True):
        start = len(cache)
        moved = chunk.moved(start)
        for token in tokens[:n]:
            cache, _ = engine.extend(model, cache, [token])
        cache = cache + moved[n:]
    same(made.cache, cache)
    assert made.recomputed_tokens == sum(min(n, len(chunk)) for chunk in BLOCKS.chunks)
    assert made.layer_tokens == made.recomputed_tokens * model.shape.n_layers


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_attaching_chunk_after_chunk_is_the_splice(name: str) -> None:
    model = tiny(name)
    ready = operators.precompile(model, BLOCKS)
    assert ready.prefix is not None
    for repair in (0, 2, "all"):
        cache, cost = ready.prefix, 0
        for chunk in ready.chunks:
            made = attach(model, cache, chunk, seam_repair=repair)  # type: ignore[arg-type]
            cache, cost = made.cache, cost + made.layer_tokens
        whole = splice(model, BLOCKS, seam_repair=repair, compiled=ready)  # type: ignore[arg-type]
        same(whole.cache, cache)
        assert whole.layer_tokens == cost


def test_a_chunk_at_slot_zero_has_no_seam() -> None:
    model = tiny("llama")
    blocks = Blocks((), BLOCKS.chunks, BLOCKS.suffix)
    made = splice(model, blocks, seam_repair=1)
    assert made.recomputed_tokens == 2
    assert stale_slots(blocks) == tuple(range(8, 15))
    same(splice(model, blocks, seam_repair="all").cache, operators.full_recompute(model, blocks).cache)
    empty = engine.prefill(model, [1])[:0]
    assert attach(model, empty, engine.prefill(model, BLOCKS.chunks[0]), seam_repair=4).recomputed_tokens == 0


@contextmanager
def recomputed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[int]]]:
    """The slots that were recomputed."""
    seen: list[list[int]] = []
    real = engine.recompute

    def watch(model: Model, cache: KVCache, slots: Any, **options: Any) -> Any:
        seen.append(sorted(slots))
        return real(model, cache, slots, **options)

    monkeypatch.setattr(engine, "recompute", watch)
    yield seen
    monkeypatch.undo()


def test_baselines_choose_the_tokens_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("qwen3")
    with recomputed(monkeypatch) as seen:
        find("epic@0.4")(model, BLOCKS)  # 6 of 15
        find("epic@0.8")(model, BLOCKS)  # 12: the chunk of 2 is exhausted
        find("random_recompute@0.2")(model, BLOCKS)
        find("random_recompute@0.6")(model, BLOCKS)
        find("random_recompute@0.6")(model, BLOCKS, seed=1)
    assert seen[0] == [3, 4, 11, 12, 13, 14]
    assert seen[1] == [*range(3, 8), 11, 12, *range(13, 18)]
    assert (len(seen[2]), len(seen[3])) == (3, 9)
    assert set(seen[2]) < set(seen[3]) < set(STALE)
    assert seen[3] != seen[4]


def test_cacheblend_keeps_what_its_early_layer_changed_most() -> None:
    """Independent: the change of K and V in layer 1 between the join and a run of all chunk tokens on it."""
    model = tiny("llama3")
    joined = operators.no_recompute(model, BLOCKS).cache
    whole = operators.full_recompute(model, BLOCKS).cache  # all candidates run: layer 1 is that of a full prefill
    change = {
        slot: float(
            (whole.keys[1][0, :, slot] - joined.keys[1][0, :, slot]).square().sum()
            + (whole.values[1][0, :, slot] - joined.values[1][0, :, slot]).square().sum()
        )
        for slot in STALE
    }
    top = set(sorted(change, key=lambda slot: -change[slot])[:5])
    made = find("cacheblend@0.33")(model, BLOCKS)
    fresh = {s for s in STALE if not torch.equal(made.cache.values[2][:, :, s], joined.values[2][:, :, s])}
    assert fresh == top


@pytest.mark.parametrize("sizes", [[8, 2, 5], [1, 1, 1], [4], [3, 9]])
def test_spread_is_even_and_exact(sizes: list[int]) -> None:
    for total in range(sum(sizes) + 1):
        counts = _spread(total, sizes)
        assert sum(counts) == total
        assert all(count <= size for count, size in zip(counts, sizes, strict=True))
        room = [count for count, size in zip(counts, sizes, strict=True) if count < size]
        assert not room or max(counts) - min(room) <= 1, "even until a chunk is exhausted"
    assert [count_of(s, 15) for s in (0, 0.01, 0.05, 0.5, 0.9, 1)] == [0, 1, 1, 8, 14, 15]


@contextmanager
def counted(model: Model) -> Iterator[list[int]]:
    """Tokens that went through each layer's attention, counted by hooks."""
    layers = compat.layers(model.hf)
    seen = [0] * len(layers)

    def hook(index: int) -> Any:
        def count(_module: object, args: tuple, kwargs: dict) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            seen[index] += hidden.shape[0] * hidden.shape[1]

        return count

    handles = [
        compat.attention_module(layer).register_forward_pre_hook(hook(i), with_kwargs=True)
        for i, layer in enumerate(layers)
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_neox"])
def test_costs_are_what_the_layers_saw(name: str) -> None:
    model = tiny(name)
    ready = operators.precompile(model, BLOCKS)
    wants = (
        "splice@0",
        "splice@2",
        "splice@all",
        "epic@0.3",
        "random_recompute@0.3",
        "cacheblend@0.3",
        "cacheblend@0.05",
    )
    for operator in wants:
        with counted(model) as seen:
            made = find(operator)(model, BLOCKS, compiled=ready)
        assert (sum(seen), 0) == (made.layer_tokens, made.compiled_layer_tokens), operator
        assert max(seen, default=0) == made.recomputed_tokens, operator
        with counted(model) as seen:
            made = find(operator)(model, BLOCKS)
        assert sum(seen) == made.layer_tokens + made.compiled_layer_tokens, operator
    layers = model.shape.n_layers
    assert find("cacheblend@0.2")(model, BLOCKS).layer_tokens == 15 * 2 + 3 * (layers - 2)


@pytest.mark.parametrize(
    ("operator", "match"),
    [
        ("splice@-1", "seam_repair=-1"),
        ("splice@0.5", "seam_repair=0.5"),
        ("epic@1.5", "share=1.5"),
        ("epic@all", "share='all'"),
        ("cacheblend@-0.1", "share=-0.1"),
        ("random_recompute@x", "'x' is no number"),
        ("no_recompute@3", "no option to set"),
        ("splize@3", 'Did you mean "splice"'),
    ],
)
def test_wrong_settings_are_refused_by_name(operator: str, match: str) -> None:
    with pytest.raises(InputError, match=match):
        find(operator)(tiny("llama"), BLOCKS)


def test_parents_are_left_alone() -> None:
    model = tiny("qwen3")
    ready = operators.precompile(model, BLOCKS)
    before = [key.clone() for part in ready.parts for key in part.keys]
    for operator in ("splice@2", "epic@0.5", "cacheblend@0.5", "random_recompute@0.5"):
        find(operator)(model, BLOCKS, compiled=ready)
    assert all(torch.equal(a, b) for a, b in zip(before, [k for p in ready.parts for k in p.keys], strict=True))
