"""Many caches in one padded pass: the numbers of each alone, on every architecture; gradients; biases; refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvnotes_interp import compat, engine
from kvnotes_interp.cache import KVCache
from kvnotes_interp.compact import Cache, CompactCache
from kvnotes_interp.errors import InputError
from kvnotes_interp.model import Model
from kvnotes_interp.training import answer_logits
from tests.architectures import ARCHITECTURES, WINDOW
from tests.tiny import tiny

CONTEXTS = ([5, 6, 7, 8, 9, 10, 11, 12, 13, 14], [21, 22, 23], [31, 32, 33, 34, 35, 36, 37])
TAILS = ([41, 42], [43, 44, 45, 46], [47])
ROWS = (2, 3, 1)
EXACT = {"atol": 1e-10, "rtol": 0}
assert len(CONTEXTS[0]) > WINDOW


def caches_of(model: Model) -> list[KVCache]:
    """The last one ends later than it is long, as behind a compaction."""
    first, second, third = (engine.prefill(model, ids) for ids in CONTEXTS)
    return [first, second, replace(third, end=12)]


def alone(model: Model, cache: Cache, tail: list[int], rows: int) -> torch.Tensor:
    _, hidden = engine.extend(model, cache, tail)
    return compat.unembed(model.hf, hidden[0, -rows:])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_padded_batch_gives_each_cache_its_own_logits(name: str) -> None:
    model = tiny(name)
    caches = caches_of(model)
    got = answer_logits(model, caches, TAILS, rows=ROWS)
    for logits, cache, tail, rows in zip(got, caches, TAILS, ROWS, strict=True):
        torch.testing.assert_close(logits, alone(model, cache, tail, rows), **EXACT)
    # Its control: what stands in front is seen where it is no padding, and the cache's end matters.
    longer = engine.prefill(model, [*CONTEXTS[0][:7], *CONTEXTS[1]])
    other = answer_logits(model, [caches[0], longer, replace(caches[2], end=20)], TAILS, rows=ROWS)
    assert float((other[1] - got[1]).abs().max()) > 1e-3
    assert float((other[2] - got[2]).abs().max()) > 1e-6 or not any(r.rotary_dim for r in model.rope.layers)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "olmo2"])
def test_key_biases_and_ragged_layers(name: str) -> None:
    """As the engine runs them; and a slot that is left out of a layer is one whose bias is minus infinity."""
    model = tiny(name)
    heads, n_layers = model.shape.n_kv_heads, model.shape.n_layers
    plain, biased, _ = caches_of(model)
    generator = torch.Generator().manual_seed(0)
    bias = tuple(torch.randn(1, heads, 3, generator=generator, dtype=torch.float64) for _ in range(n_layers))
    biased = replace(biased, bias=(*bias[:-1], None))
    got = answer_logits(model, [plain, biased], TAILS[:2], rows=ROWS[:2])
    for logits, cache, tail, rows in zip(got, (plain, biased), TAILS, ROWS, strict=False):
        torch.testing.assert_close(logits, alone(model, cache, tail, rows), **EXACT)
    assert float((got[1] - alone(model, replace(biased, bias=None), TAILS[1], 3)).abs().max()) > 1e-3
    kept = [
        torch.stack([torch.randperm(10, generator=generator)[: 4 + layer % 3].sort().values for _ in range(heads)])
        for layer in range(n_layers)
    ]
    compact = CompactCache.of(plain).kept(kept)
    logits, other = answer_logits(model, [compact, biased], TAILS[:2], rows=ROWS[:2])
    torch.testing.assert_close(logits, alone(model, compact, TAILS[0], 2), **EXACT)
    torch.testing.assert_close(other, got[1], **EXACT)
    assert float((logits - got[0]).abs().max()) > 1e-3
    if name != "gemma2":  # its windows count slots in the full cache and positions in the compact one
        gone = [torch.full((1, heads, 10), float("-inf")).double().scatter(2, slots[None], 0.0) for slots in kept]
        torch.testing.assert_close(logits, alone(model, replace(plain, bias=tuple(gone)), TAILS[0], 2), **EXACT)


def test_gradients_reach_every_slot_and_are_right() -> None:
    """Against a central difference along a random direction, in float64."""
    model = tiny("llama")
    caches = [replace(c, keys=tuple(k.clone().requires_grad_() for k in c.keys)) for c in caches_of(model)]
    weight = [
        torch.randn(rows, 97, generator=torch.Generator().manual_seed(rows), dtype=torch.float64) for rows in ROWS
    ]

    def score(caches: list[KVCache]) -> torch.Tensor:
        return sum((w * x).sum() for w, x in zip(weight, answer_logits(model, caches, TAILS, rows=ROWS), strict=True))

    score(caches).backward()
    step, slope = 1e-5, 0.0
    moved: list[list[KVCache]] = [[], []]
    for cache in caches:
        directions = [torch.randn_like(k) for k in cache.keys]
        slope += sum(float((k.grad * d).sum()) for k, d in zip(cache.keys, directions, strict=True))
        assert all(bool((k.grad.abs().sum((0, 1, 3)) > 0).all()) for k in cache.keys)
        for sign, side in zip((1, -1), moved, strict=True):
            side.append(
                replace(cache, keys=tuple(k.detach() + sign * step * d for k, d in zip(cache.keys, directions)))
            )
    with torch.no_grad():
        want = float(score(moved[0]) - score(moved[1])) / (2 * step)
    assert slope == pytest.approx(want, rel=1e-6)
    assert abs(want) > 1e-3


def test_refusals() -> None:
    model, other = tiny("llama"), tiny("qwen3")
    caches = caches_of(model)
    with pytest.raises(InputError, match="3 caches, 2 tails and 3 numbers of rows"):
        answer_logits(model, caches, TAILS[:2], rows=ROWS)
    with pytest.raises(InputError, match=r"rows\[1\] is 5, but its tail has 4 tokens"):
        answer_logits(model, caches, TAILS, rows=(2, 5, 1))
    with pytest.raises(InputError, match=r"cache 0 was written by .*tiny-llama.*tiny-qwen3"):
        answer_logits(other, caches, TAILS, rows=ROWS)
    with pytest.raises(InputError, match="batch=2"):
        answer_logits(model, [caches[0].repeat(batch=2)], TAILS[:1], rows=ROWS[:1])
