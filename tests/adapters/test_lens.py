"""TransformerLens: activations against this package's, heads against plain hooks, and refusals that refuse."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import kvnotes_interp as kv
from kvnotes_interp import compat, engine
from kvnotes_interp.adapters import lens
from kvnotes_interp.errors import InputError, UnsupportedError
from kvnotes_interp.model import Model
from kvnotes_interp.sites import Site
from tests.adapters.conftest import Maker

pytest.importorskip("transformer_lens", reason="TransformerLens is not installed: pip install -e '.[lens]'")

IDS = [7, 31, 12, 55, 8, 60, 3, 44, 19, 71, 25, 66]
ANSWERS = (5, 17)
# Key norms, sliding windows, soft-capping, post-norms, scaled residuals, fused projections, parallel blocks.
NAMES = (
    *("llama", "llama_biased", "llama3", "yarn", "qwen2", "qwen3", "qwen3_moe", "mistral", "gemma2", "gemma3", "phi3"),
    *("gpt_neox", "gpt_neox_serial", "phi", "cohere", "olmo2", "granite", "starcoder2"),
)


@pytest.mark.parametrize("name", NAMES)
def test_activations_agree(name: str, make: Maker) -> None:
    model = make(name)
    report = lens.parity(lens.to_bridge(model), model).require()
    assert set(report.kinds) == {"keys", "values", "patterns", "heads", "residual", "logits"}
    n = model.shape.n_layers
    assert [len([g for g in report.gaps if g.kind == k]) for k in report.kinds] == [n, n, n, n, n + 1, 1]
    # Both sides go through float32 in places; the limit is far above what is measured.
    assert max(g.value for g in report.gaps) < 3e-6


def test_activations_have_our_shapes_and_only_what_was_asked_for(make: Maker) -> None:
    model = make("qwen3")
    found = lens.activations(lens.to_bridge(model), IDS)
    shape = model.shape
    for layer in range(shape.n_layers):
        assert found.keys is not None
        assert found.keys[layer].shape == (1, shape.n_kv_heads, len(IDS), shape.d_head)
        assert found.heads is not None
        assert found.heads[layer].shape == (1, len(IDS), shape.n_heads, shape.d_head)
    few = lens.activations(lens.to_bridge(model), IDS, want=("values",))
    assert few.values is not None
    assert few.keys is few.patterns is few.heads is few.residual is None


def test_the_bridge_leaves_the_model_it_was_made_from_alone(make: Maker) -> None:
    model = make("llama")
    before = [type(m) for m in model.hf.modules()]
    bridge = lens.to_bridge(model)
    assert [type(m) for m in model.hf.modules()] == before
    mine = {id(p) for p in model.hf.parameters()}
    assert {id(p) for p in bridge.original_model.parameters()} == mine, "the weights are shared"


@pytest.mark.parametrize("name", ["llama_biased", "qwen3", "gemma3", "gpt_neox", "phi3"])
def test_a_bridge_is_a_model(name: str, make: Maker) -> None:
    """Through the bridge's own modules a shared sweep would be silently wrong; the unwrapped model sweeps."""
    model = make(name)
    bridge = lens.to_bridge(model)
    got = lens.from_bridge(bridge)
    assert got.source.kind == "live"
    assert "transformer-lens" in got.source.note
    assert got.tokenizer is bridge.tokenizer
    assert {id(p) for p in got.hf.parameters()} == {id(p) for p in model.hf.parameters()}, "the weights are shared"
    sites = [Site((2,)), Site((3, 4), layers=(1,)), Site(tuple(range(len(IDS) - 1)))]

    def sweep(m: Model) -> Tensor:
        base, donor = engine.prefill(m, IDS[:-1]), engine.prefill(m, [9, *IDS[1:-1]])
        result = engine.sweep(m, base, donor, sites, IDS[-1:], ANSWERS)
        assert result.path == "shared"
        return result.scores

    torch.testing.assert_close(sweep(got), sweep(model), rtol=0, atol=1e-9)


def test_what_the_bridge_adds_to_the_weights_is_in_the_model(make: Maker) -> None:
    """Compatibility mode folds norms into weights; the model underneath is then that model, and computes the same."""
    model = make("llama", dtype=torch.float32)
    model = dataclasses.replace(model, hf=_unshared(model.hf))
    want = engine.decide(model, engine.prefill(model, IDS[:-1]), IDS[-1:], ANSWERS)[0]
    bridge = lens.to_bridge(model)
    bridge.enable_compatibility_mode(disable_warnings=True)
    folded = lens.from_bridge(bridge)
    got = engine.decide(folded, engine.prefill(folded, IDS[:-1]), IDS[-1:], ANSWERS)[0]
    assert float(got[1] - got[0]) == pytest.approx(float(want[1] - want[0]), abs=1e-4)
    norm: Any = compat.final_norm(folded.hf).weight
    assert torch.equal(norm, torch.ones_like(norm)), "else nothing was folded, and this test proves nothing"


def test_what_is_unwrapped_loads_as_any_live_model(make: Maker) -> None:
    bridge = lens.to_bridge(make("qwen3"))
    hf, tokenizer = lens.unwrapped(bridge)
    model = kv.load(hf, tokenizer=tokenizer)
    assert model.name == "tiny-qwen3"
    bridge.add_hook("blocks.0.hook_out", lambda value, hook: value * 1.1)
    with pytest.raises(UnsupportedError, match="residual in layer 1 off by"):
        lens.unwrapped(bridge)


def _unshared(hf: Any) -> Any:
    import copy

    return copy.deepcopy(hf)


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_rotation_left_out_is_refused_with_layer_and_gap(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    bridge = lens.to_bridge(make("qwen3"))  # its bridge rotates by Llama's function, the model itself by its own
    lens.from_bridge(bridge)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, *_: (q, k))
    with pytest.raises(UnsupportedError, match=r"transformer-lens 4\..* and transformers 5\..*keys in layer 0 off by"):
        lens.from_bridge(bridge)


def test_a_bridge_that_computes_something_else_is_refused(make: Maker) -> None:
    bridge = lens.to_bridge(make("llama"))
    lens.from_bridge(bridge)
    bridge.add_hook("blocks.1.attn.hook_pattern", lambda pattern, hook: pattern.roll(1, dims=1))
    with pytest.raises(UnsupportedError, match=r"patterns in layer 1 off by .*heads in layer 1 off by"):
        lens.from_bridge(bridge)
    bridge.reset_hooks()
    lens.from_bridge(bridge)


def test_a_cache_that_the_library_ignores_is_refused(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with transformers 5.24, whose cache argument TransformerLens 4.3 does not know: no error, no cache."""
    model = make("phi3")  # its keys are read from the cache that the bridge fills
    bridge = lens.to_bridge(model)
    attention = type(bridge.blocks[0].attn)
    monkeypatch.setattr(attention, "_update_kv_cache", lambda self, k, v, **_: (k, v))
    with pytest.raises(UnsupportedError, match="filled 0 of 3 layers"):
        lens.from_bridge(bridge)


def test_wrong_input_is_named(make: Maker) -> None:
    model = make("llama")
    with pytest.raises(InputError, match="is not a TransformerBridge"):
        lens.from_bridge(model.hf)
    with pytest.raises(InputError, match="without a tokenizer"):
        lens.to_bridge(dataclasses.replace(model, tokenizer=None))
    with pytest.raises(UnsupportedError, match="TransformerLens cannot take HeliumForCausalLM: Could not"):
        lens.to_bridge(make("helium"))
    bridge = lens.to_bridge(model)
    with pytest.raises(InputError, match='Did you mean "heads"'):
        lens.activations(bridge, IDS, want=("head",))
    with pytest.raises(InputError, match="2 prompts"):
        lens.head_attribution(bridge, [IDS, IDS], ANSWERS)
    with pytest.raises(InputError, match="at least one token"):
        lens.activations(bridge, [])


# --- attribution ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def by_hand(model: Model, ids: list[int], answers: tuple[int, int]) -> tuple[Tensor, Tensor, float, float]:
    """Heads `[layer head]`, MLPs `[layer]`, embedding and total, from hooks on the plain transformers model.

    For families that add attention's and the MLP's output to the residual stream as they are, with an RMS norm at the
    end and no biases on the way.
    """
    hf: Any = model.hf
    seen: dict[Any, Tensor] = {}

    def keep(key: Any, *, of_input: bool) -> Any:
        def hook(_m: Any, args: Any, output: Any = None) -> None:
            seen[key] = (args[0] if of_input else output)[0, -1]

        return hook

    handles = [hf.model.norm.register_forward_pre_hook(keep("final", of_input=True))]
    handles.append(hf.model.embed_tokens.register_forward_hook(keep("embed", of_input=False)))
    for i, layer in enumerate(hf.model.layers):
        handles.append(layer.self_attn.o_proj.register_forward_pre_hook(keep(("z", i), of_input=True)))
        handles.append(layer.mlp.register_forward_hook(keep(("mlp", i), of_input=False)))
    logits = hf(torch.tensor([ids]), use_cache=False).logits[0, -1]
    for handle in handles:
        handle.remove()
    final = seen["final"]
    # Not from the norm's formula: what it does to this run's residual, as a factor per dimension.
    factor = hf.model.norm(final[None, None])[0, 0] / final
    direction = (hf.lm_head.weight[answers[1]] - hf.lm_head.weight[answers[0]]) * factor
    d = model.shape.d_head
    heads = torch.stack(
        [
            torch.stack(
                [
                    (layer.self_attn.o_proj.weight[:, h * d : (h + 1) * d] @ seen["z", i][h * d : (h + 1) * d])
                    @ direction
                    for h in range(model.shape.n_heads)
                ]
            )
            for i, layer in enumerate(hf.model.layers)
        ]
    )
    mlps = torch.stack([seen["mlp", i] @ direction for i in range(len(hf.model.layers))])
    return heads, mlps, float(seen["embed"] @ direction), float(logits[answers[1]] - logits[answers[0]])


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
def test_attribution_is_the_one_made_by_hand(name: str, make: Maker) -> None:
    model = make(name)
    heads, mlps, embed, total = by_hand(model, IDS, ANSWERS)
    bridge = lens.to_bridge(model)
    parts = lens.logit_parts(bridge, IDS, ANSWERS)
    torch.testing.assert_close(parts.heads, heads, rtol=0, atol=5e-6)
    torch.testing.assert_close(parts.mlp, mlps, rtol=0, atol=5e-6)
    assert parts.embed == pytest.approx(embed, abs=5e-6)
    assert parts.total == pytest.approx(total, abs=5e-6)
    assert float(heads.sum() + mlps.sum()) + embed == pytest.approx(total, abs=5e-6)
    assert torch.equal(lens.head_attribution(bridge, IDS, ANSWERS), parts.heads)
    assert float(parts.heads.abs().max()) > 0.01, "else there is nothing to compare"


@pytest.mark.parametrize("name", NAMES)
def test_the_parts_add_up_to_the_models_own_logits(name: str, make: Maker) -> None:
    model = make(name)
    parts = lens.logit_parts(lens.to_bridge(model), IDS, ANSWERS)
    whole = float(parts.heads.sum() + parts.attention.sum() + parts.mlp.sum()) + parts.embed + parts.bias
    assert whole == pytest.approx(parts.total, abs=1e-5)
    logits = engine.decide(model, engine.prefill(model, IDS[:-1]), IDS[-1:], ANSWERS)[0]
    cap = getattr(compat.text_config(model.hf), "final_logit_softcapping", None)
    if cap is not None:
        logits = cap * torch.atanh(logits / cap)
    assert parts.total == pytest.approx(float(logits[1] - logits[0]), abs=1e-5)


def test_attribution_with_a_module_that_is_not_accounted_for_is_refused(make: Maker) -> None:
    bridge = lens.to_bridge(make("llama"))
    bridge.add_hook("blocks.2.mlp.hook_out", lambda value, hook: value)
    lens.head_attribution(bridge, IDS, ANSWERS)
    bridge.reset_hooks()
    bridge.add_hook("blocks.2.hook_out", lambda value, hook: value * 1.5)
    with pytest.raises(UnsupportedError, match="all writes and what the final norm reads differ by"):
        lens.head_attribution(bridge, IDS, ANSWERS)


@pytest.mark.slow
def test_smollm2_through_a_bridge(smollm2: Model) -> None:
    ids = smollm2.tokenizer("Mary went to the market to buy some bread. On the way home,").input_ids
    bridge = lens.to_bridge(smollm2)
    report = lens.parity(bridge, smollm2, ids).require()
    assert max(g.value for g in report.gaps) < 1e-4
    answers = (smollm2.tokenizer(" he").input_ids[0], smollm2.tokenizer(" she").input_ids[0])
    heads, mlps, embed, total = by_hand(smollm2, ids, answers)
    parts = lens.logit_parts(bridge, ids, answers)
    torch.testing.assert_close(parts.heads, heads, rtol=0, atol=1e-3)
    assert float(heads.sum() + mlps.sum()) + embed == pytest.approx(total, abs=1e-2)
