"""Still against a slow Perceiver written with loops, exact identities in float64, and its refusals."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvnotes_interp import engine
from kvnotes_interp.cache import KVCache
from kvnotes_interp.compact import SYNTHETIC, CompactCache
from kvnotes_interp.errors import InputError
from kvnotes_interp.operators.still import Still, StillSettings, attribution, new_still
from kvnotes_interp.operators.still.operator import still as by_folder
from kvnotes_interp.operators.still.perceiver import Frame, Perceiver
from tests.architectures import ARCHITECTURES, WINDOW
from tests.tiny import tiny

IDS = torch.randint(3, 97, (17,), generator=torch.Generator().manual_seed(0)).tolist()
HEAD, TAIL = IDS[:12], IDS[12:]
ROUNDED = ["llama", "qwen3", "yarn", "gpt_neox", "smollm3", "gemma3", "nanochat"]


def shaken(model: Any, **settings: Any) -> Still:
    """A compactor of which every number is drawn, so that a part left out shows."""
    still = new_still(model, settings=StillSettings(**settings))
    generator = torch.Generator().manual_seed(7)
    for parameter in still.parameters().values():
        noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.data += 0.3 * noise / math.sqrt(parameter.shape[-1])
    return still


def gap(a: CompactCache, b: CompactCache) -> float:
    return max(float((x - y).detach().abs().max()) for x, y in zip(a.keys + a.values, b.keys + b.values, strict=True))


# --- exactness -------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_at_ratio_one_an_identity_initialisation_gives_the_full_caches_logits(name: str) -> None:
    """Frame change, places and heads are exact: what is left is 2^-32 of each neighbour."""
    model = tiny(name)
    cache = engine.prefill(model, HEAD)
    want = engine.decide(model, cache, TAIL)
    for settings in (StillSettings(), StillSettings(bias=True, feed_forward=True, shared=False, queries=3)):
        still = new_still(model, settings=settings)
        (again,) = still.compact_all(model, [cache], budget=len(cache), sliding="compact", anew=True)
        torch.testing.assert_close(engine.decide(model, again, TAIL), want, rtol=0, atol=1e-7)
        assert gap(again, CompactCache.of(cache)) < 1e-7
        assert all(torch.equal(p, cache.positions.expand_as(p)) for p in again.positions)
        assert all(bool((s == SYNTHETIC).all()) for s in again.sources)
        assert again.end == cache.end
    # Controls: a norm behind the last block, and matrices drawn at random.
    for broken in (StillSettings(final_norm=True), StillSettings(init="plain")):
        (other,) = new_still(model, settings=broken).compact_all(
            model, [cache], budget=len(cache), sliding="compact", anew=True
        )
        assert float((engine.decide(model, other, TAIL) - want).abs().max()) > 1e-3


@torch.no_grad()
def test_a_budget_of_all_slots_changes_nothing() -> None:
    model = tiny("llama")
    cache = engine.prefill(model, HEAD)
    for budget in (len(cache), 99):
        same = shaken(model).compact(model, cache, budget=budget)
        assert gap(same, CompactCache.of(cache)) == 0.0
        assert torch.equal(same.sources[0], CompactCache.of(cache).sources[0])


@torch.no_grad()
@pytest.mark.parametrize("name", ROUNDED)
def test_a_moved_cache_is_compacted_as_the_one_in_place(name: str) -> None:
    """The Perceiver sees keys without their position: only the positions of the result move."""
    model = tiny(name)
    cache = engine.prefill(model, HEAD)
    still = shaken(model)
    here = still.compact(model, cache, budget=5, sliding="compact")
    there = still.compact(model, cache.moved(100), budget=5, sliding="compact")
    moved = here.placed([p + 100 for p in here.positions])
    assert gap(there, moved) < 1e-9
    assert [p.tolist() for p in there.positions] == [p.tolist() for p in moved.positions]
    assert (there.end, here.end) == (112, 12)
    if model.rope.layers[0].rotary_dim:
        assert gap(there, here) > 1e-3


# --- the slow reference ----------------------------------------------------------------------------------------------


def slow_norm(x: Tensor, weight: Tensor) -> Tensor:
    half = len(x) // 2
    parts = [part / math.sqrt(float((part * part).sum()) / half + 1e-6) for part in (x[:half], x[half:])]
    return torch.cat(parts) * weight


def slow_turn(x: Tensor, place: float) -> Tensor:
    half, out = len(x) // 2, x.clone()
    for i in range(half):
        angle = place * 10_000.0 ** (-i / half)
        a, b = float(x[i]), float(x[i + half])
        out[i], out[i + half] = (
            a * math.cos(angle) - b * math.sin(angle),
            b * math.cos(angle) + a * math.sin(angle),
        )
    return out


def slow_attention(
    p: dict[str, Tensor], name: str, queries: list, q_at: list, x: list, x_at: list, extra: Any
) -> list[tuple[list[float], Tensor]]:
    out = []
    keys = [slow_turn(slow_norm(one, p[f"{name}.key_norm"]) @ p[f"{name}.k"], at) for one, at in zip(x, x_at)]
    for i, query in enumerate(queries):
        if f"{name}.q" in p:
            query = slow_norm(query, p[f"{name}.query_norm"]) @ p[f"{name}.q"]
        query = slow_turn(query, q_at[i])
        scores = [float(query @ key) / math.sqrt(len(query)) + extra(i, j) for j, key in enumerate(keys)]
        weights = [math.exp(s - max(scores)) for s in scores]
        weights = [w / sum(weights) for w in weights]
        mixed = sum(w * one for w, one in zip(weights, x))
        out.append((weights, mixed @ p[f"{name}.v"] @ p[f"{name}.o"]))
    return out


def slow_perceiver(module: Perceiver, head: int, x: Tensor, slots: Tensor, latents: Tensor, bias: Tensor) -> Any:
    """Keys, values and biases of one head, one number at a time where it matters."""
    p = {n.removesuffix(".weight"): t[min(head, len(t) - 1)].detach() for n, t in module.named_parameters()}
    p = {n: t[0] if n.endswith("norm") else t for n, t in p.items()}
    spacing = float(latents[1] - latents[0])
    x_at = [float(s - latents[0]) / spacing for s in slots]
    t = len(latents)
    learned = p["query"]
    queries = []
    for i in range(t):
        place = i * (len(learned) - 1) / (t - 1)
        low = min(int(place), len(learned) - 2)
        queries.append(learned[low] * (1 - place + low) + learned[low + 1] * (place - low))
    z: list = [0.0] * t
    carried: list[float] = []
    for number in range(len(module.blocks)):
        name = f"blocks.{number}"

        def extra(i: int, j: int, first: bool = number == 0) -> float:
            away = 32 * math.log(1 + (i - x_at[j]) ** 2) * float(p["fall"])
            return float(bias[j]) - (away if first else 0.0)

        start = queries if number == 0 else z
        crossed = slow_attention(p, f"{name}.cross", start, list(range(t)), list(x), x_at, extra)
        if number == 0:
            carried = [sum(w * float(b) for w, b in zip(weights, bias)) for weights, _ in crossed]
        z = [old + write for old, (_, write) in zip(z, crossed)]
        own = slow_attention(p, f"{name}.own", z, list(range(t)), z, list(range(t)), lambda i, j: 0.0)
        z = [old + write for old, (_, write) in zip(z, own)]
        if f"{name}.feed.up" in p:
            inner = [slow_norm(one, p[f"{name}.feed.norm"]) @ p[f"{name}.feed.up"] for one in z]
            inner = [
                torch.tensor([v * (1 + math.erf(v / 2**0.5)) / 2 for v in i.tolist()], dtype=i.dtype) for i in inner
            ]
            z = [old + i @ p[f"{name}.feed.down"] for old, i in zip(z, inner)]
    if "final_norm" in p:
        z = [slow_norm(one, p["final_norm"]) for one in z]
    biases = [float(one @ p["bias_head"]) + c for one, c in zip(z, carried)]
    return torch.stack([o @ p["key_head"] for o in z]), torch.stack([o @ p["value_head"] for o in z]), biases


@torch.no_grad()
@pytest.mark.parametrize(
    "settings",
    [
        StillSettings(feed_forward=True, bias=True, queries=3),
        StillSettings(feed_forward=True, bias=True, queries=2, shared=False, final_norm=True, blocks=3, init="plain"),
    ],
)
def test_the_perceiver_is_what_the_loops_say(settings: StillSettings) -> None:
    heads, d_head, n = 2, 4, 9
    generator = torch.Generator().manual_seed(1)
    with torch.random.fork_rng():
        torch.manual_seed(2)
        module = Perceiver(d_head, 1 if settings.shared else heads, settings, generator).double()
        for parameter in module.parameters():
            parameter += 0.5 * torch.randn(parameter.shape, dtype=torch.float64)
    x = torch.randn(1, heads, n, 2 * d_head, generator=generator, dtype=torch.float64)
    bias = torch.randn(1, heads, n, generator=generator, dtype=torch.float64)
    slots = torch.tensor([[0, 1, 2, 3, 5, 8, 9, 10, 11], [1, 2, 4, 5, 6, 7, 8, 10, 12]])
    latents = torch.tensor([[0.0, 11 / 3, 22 / 3, 11], [1, 14 / 3, 25 / 3, 12]], dtype=torch.float64)
    frame = Frame.of(slots[None], latents[None], None, d_head=d_head, like=x)
    keys, values, biases = module(x, frame, bias)
    assert biases is not None
    for head in range(heads):
        slow = slow_perceiver(module, head, x[0, head], slots[head], latents[head], bias[0, head])
        for got, want in zip((keys, values, biases), slow, strict=True):
            torch.testing.assert_close(got[0, head], torch.as_tensor(want, dtype=torch.float64), rtol=1e-9, atol=1e-9)


# --- batches, budgets, windows, biases -------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gemma3", "smollm3"])
def test_a_padded_batch_is_each_cache_alone(name: str) -> None:
    model = tiny(name)
    caches = [engine.prefill(model, ids) for ids in (HEAD, IDS[:7], IDS[3:], IDS[:3])]
    still = shaken(model, bias=True)
    together = still.compact_all(model, caches, budget=4, sliding="compact")
    for cache, got in zip(caches, together, strict=True):
        want = still.compact(model, cache, budget=4, sliding="compact")
        assert gap(got, want) < 1e-12
        assert (got.end, got.slots) == (want.end, want.slots)
        assert [p.tolist() for p in got.positions] == [p.tolist() for p in want.positions]
    two = engine.prefill(model, [HEAD, IDS[5:]])  # one cache of two rows
    rows = still.compact(model, two, budget=4, sliding="compact")
    alone = still.compact(model, engine.prefill(model, IDS[5:]), budget=4, sliding="compact")
    assert max(float((a[1:] - b).abs().max()) for a, b in zip(rows.keys, alone.keys, strict=True)) < 1e-9


@torch.no_grad()
def test_layers_have_budgets_of_their_own_and_positions_are_spread_or_last() -> None:
    model = tiny("llama")
    cache = engine.prefill(model, HEAD)
    compact = shaken(model).compact(model, cache, budget=(1, 4, 12))
    assert compact.slots == (1, 4, 12)
    assert [p[0].tolist() for p in compact.positions[:2]] == [[6], [0, 4, 7, 11]]
    assert compact.sources[0].tolist() == [[SYNTHETIC]] * 2
    assert compact.sources[2][0].tolist() == list(range(12))
    last = new_still(model, settings=StillSettings(outputs="last")).compact(model, cache, budget=4)
    spread = new_still(model).compact(model, cache, budget=4)
    assert last.positions[0][0].tolist() == [8, 9, 10, 11]
    assert gap(last, spread.placed(last.positions)) < 1e-12
    grown, _ = engine.extend(model, compact, TAIL)
    assert grown.end == len(IDS)


@torch.no_grad()
def test_sliding_layers_stay_whole_or_are_compacted_within_their_window() -> None:
    model = tiny("gemma2")  # layers 0 and 2 slide
    cache = engine.prefill(model, HEAD)
    still = shaken(model)
    assert still.compact(model, cache, budget=3).slots == (12, 3, 12, 3)
    assert still.compact(model, cache, budget=3, sliding="compact").slots == (3, 3, 3, 3)
    within = still.compact(model, cache, budget=WINDOW, sliding="compact")
    # The next token sees WINDOW positions, itself among them: these slots are kept, the others dropped.
    assert within.sources[0][0].tolist() == list(range(12 - WINDOW + 1, 12))
    with pytest.raises(InputError, match="every layer of tiny-mistral"):
        shaken(tiny("mistral")).compact(tiny("mistral"), engine.prefill(tiny("mistral"), HEAD), budget=3)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_a_bias_of_the_source_is_the_weight_of_its_slot(name: str) -> None:
    """A slot with a bias of log 2 counts as the same slot held twice."""
    model = tiny(name)
    cache = CompactCache.of(engine.prefill(model, HEAD))
    still = shaken(model, bias=True)
    bias = torch.zeros(1, cache.n_kv_heads, 12, dtype=cache.dtype)
    bias[..., 4] = math.log(2)
    weighted = dataclasses.replace(cache, bias=(bias,) * cache.n_layers)
    twice = cache.kept([torch.tensor([[*range(12), 4]]).expand(cache.n_kv_heads, -1)] * cache.n_layers)
    got, want = (still.compact(model, c, budget=5) for c in (weighted, twice))
    assert gap(got, want) < 1e-12
    assert gap(got, still.compact(model, cache, budget=5)) > 1e-4  # the control
    # What the latents carry on is the mean bias of what they were made of.
    assert got.bias is not None
    assert want.bias is not None
    shares, (mine, theirs) = attribution_of_first(still, model, weighted, 5), (got.bias[0], want.bias[0])
    assert mine is not None
    assert theirs is not None
    torch.testing.assert_close(mine - theirs, (shares[0] @ bias[0, :, :, None])[None, ..., 0])
    with pytest.raises(InputError, match="no bias head"):
        shaken(model).compact(model, weighted, budget=5)


def attribution_of_first(still: Still, model: Any, cache: CompactCache, budget: int) -> list[Tensor]:
    traces: dict[int, Any] = {}
    still.compact_all(model, [cache], budget=budget, traces=traces)
    return [traces[layer][0][0][0] for layer in range(cache.n_layers)]


# --- gradients and attribution ---------------------------------------------------------------------------------------


def test_gradients_reach_every_parameter_and_nothing_of_the_model() -> None:
    model = tiny("qwen3")
    cache = engine.prefill(model, HEAD)
    still = shaken(model, feed_forward=True, bias=True, queries=2, final_norm=True)
    compact = still.compact(model, cache, budget=5)
    assert compact.bias is not None
    parts = [t for t in (*compact.keys, *compact.values, *compact.bias) if t is not None]
    sum((part**2).sum() for part in parts).backward()  # type: ignore[union-attr]
    without = [name for name, p in still.parameters().items() if p.grad is None or not bool(p.grad.any())]
    assert without == []
    assert all(p.grad is None for p in model.hf.parameters())
    assert not any(t.requires_grad for t in still(model, cache, budget=3).cache.keys)


@torch.no_grad()
def test_attribution_names_the_slots_that_a_latent_is_made_of() -> None:
    model = tiny("llama")
    cache = engine.prefill(model, HEAD)
    at_first = attribution(new_still(model), model, cache, budget=(4, 12, 4))
    assert at_first[1] is None
    assert at_first[0] is not None
    weights = attribution_of_first(new_still(model), model, CompactCache.of(cache), 4)
    torch.testing.assert_close(at_first[0], weights[0].float())  # nothing else writes yet
    assert at_first[0].argmax(-1).tolist() == [[0, 4, 7, 11]] * 2
    still = shaken(model)
    shares = attribution(still, model, cache, budget=4)
    assert shares[0] is not None
    assert shares[0].shape == (2, 4, 12)
    torch.testing.assert_close(shares[0].sum(-1), torch.ones(2, 4))
    assert float((shares[0] - attribution_of_first(still, model, CompactCache.of(cache), 4)[0]).abs().max()) > 1e-3
    # Where attribution is all on one slot, that slot is what matters: the slow check changes each in turn.
    moved = []
    for slot in range(12):
        values = [v.clone() for v in cache.values]
        values[0][:, :, slot] += 1.0
        other = KVCache(cache.keys, tuple(values), cache.token_ids, cache.positions, cache.rope, cache.model_id)
        a, b = (new_still(model).compact(model, c, budget=4).values[0] for c in (cache, other))
        moved.append((a - b).norm(dim=-1)[0])
    assert torch.stack(moved, -1).argmax(-1).tolist() == at_first[0].argmax(-1).tolist()


# --- size, files, refusals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [True, False])
def test_parameters_are_as_many_as_the_formula_says(shared: bool) -> None:
    model = tiny("llama")  # 3 layers, 2 KV heads, d_head 8
    width, sets = 16, 1 if shared else 2
    plain = new_still(model, settings=StillSettings(shared=shared))
    # Two blocks of two attentions of four matrices; the first cross-attention has no query matrix and no query norm.
    # The two heads are half a matrix each.
    matrices = (2 * 2 * 4 - 1 + 1) * width**2
    norms, query_and_fall = (2 * 2 * 2 - 1) * width, width + 1
    assert plain.n_parameters == 3 * sets * (matrices + norms + query_and_fall)
    more = StillSettings(shared=shared, feed_forward=True, bias=True, queries=4, final_norm=True)
    extra = 2 * (8 * width**2 + width) + width + 3 * width + width
    assert new_still(model, settings=more).n_parameters == plain.n_parameters + 3 * sets * extra


def test_saved_and_loaded_it_compacts_the_same(tmp_path: Path) -> None:
    model = tiny("llama")
    cache = engine.prefill(model, HEAD)
    still = shaken(model, bias=True)
    folder = still.save(tmp_path / "still", training={"steps": 3})
    again = Still.load(folder, model)
    assert again.settings == still.settings
    assert again.fingerprint == still.fingerprint != new_still(model).fingerprint
    made = by_folder(model, cache, budget=4, adapter=folder)
    assert gap(made.cache, still.compact(model, cache, budget=4)) == 0.0
    assert made.layer_tokens == 0
    new_still(model, settings=StillSettings(seed=5)).save(folder)  # written anew, it is read anew
    assert gap(by_folder(model, cache, budget=4, adapter=folder).cache, made.cache) > 1e-4


def test_other_models_and_altered_files_are_refused(tmp_path: Path) -> None:
    model, other = tiny("llama"), tiny("qwen2")
    folder = shaken(model).save(tmp_path / "still")
    with pytest.raises(InputError, match="belongs to 'tiny-llama"):
        Still.load(folder, other)
    with pytest.raises(InputError, match="belongs to 'tiny-llama"):
        shaken(model).compact(other, engine.prefill(other, HEAD), budget=4)
    with pytest.raises(InputError, match="was written by 'tiny-qwen2"):
        shaken(model).compact(model, engine.prefill(other, HEAD), budget=4)
    file = folder / "still.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    with pytest.raises(InputError, match=r"is not the file that still\.json describes"):
        Still.load(folder, model)
    file.unlink()
    with pytest.raises(InputError, match="is missing"):
        Still.load(folder, model)
    with pytest.raises(InputError, match=r"no still\.json in"):
        Still.load(tmp_path, model)
    with pytest.raises(InputError, match="still@FOLDER"):
        by_folder(model, engine.prefill(model, HEAD), budget=4)


def test_wrong_settings_and_budgets_are_refused() -> None:
    with pytest.raises(InputError, match=r'no setting "block".*blocks'):
        StillSettings(block=3)
    with pytest.raises(InputError, match="blocks=0"):
        StillSettings(blocks=0)
    model = tiny("llama")
    cache = engine.prefill(model, HEAD)
    for budget in (0, (3, 3)):
        with pytest.raises(InputError, match="budget="):
            new_still(model).compact(model, cache, budget=budget)
    with pytest.raises(InputError, match="these are not the"):
        new_still(model).set(new_still(model, settings=StillSettings(bias=True)).parameters())
