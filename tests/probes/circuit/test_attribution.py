"""Direct logit attribution: the parts sum to the score that the model itself gives, part by part."""

from __future__ import annotations

import math

import pytest
import torch

from kvnotes_interp import compat, engine
from kvnotes_interp.errors import ControlError
from kvnotes_interp.probes.circuit import attribution
from tests.architectures import ARCHITECTURES
from tests.probes.circuit.by_hand import head_outputs, layers_of, projection_of
from tests.reference import full_logits
from tests.tiny import tiny

IDS = [7, 31, 12, 55, 8, 60, 3, 44, 19, 71, 25, 66, 13, 9]
ANSWERS = (5, 17)


def _parts(name: str) -> attribution.Parts:
    model = tiny(name)
    run = engine.capture(model, engine.prefill(model, IDS[:-1]), IDS[-1:], want=attribution.WANT)
    return attribution.parts(model, run, ANSWERS)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_heads_mlps_embedding_and_biases_sum_to_the_models_own_logits(name: str) -> None:
    model, found = tiny(name), _parts(name)
    logits = full_logits(model.hf, torch.tensor([IDS]))[0, -1, list(ANSWERS)].tolist()
    if (cap := getattr(model.hf.config, "final_logit_softcapping", None)) is not None:
        logits = [cap * math.atanh(x / cap) for x in logits]  # attribution is of the logits before the cap
    assert found.total == pytest.approx(logits[1] - logits[0], abs=1e-9)
    assert found.heads.shape == (model.shape.n_layers, model.shape.n_heads)


@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_a_heads_part_is_worked_out_by_hand(name: str) -> None:
    """RMSNorm and LayerNorm written out, for single heads, from the inputs of the output projections."""
    hf, found = tiny(name).hf, _parts(name)
    z = head_outputs(hf, IDS, hf.config.num_attention_heads)
    norm = hf.model.norm if name == "llama" else hf.gpt_neox.final_layer_norm
    seen: list[torch.Tensor] = []
    handle = norm.register_forward_pre_hook(lambda _m, args: seen.append(args[0][0, -1]))
    full_logits(hf, torch.tensor([IDS]))
    handle.remove()
    x = seen[0]
    head_of = hf.get_output_embeddings().weight
    slope = (head_of[ANSWERS[1]] - head_of[ANSWERS[0]]) * norm.weight
    d_head = z[0].shape[-1]
    for layer, head in ((0, 1), (2, 3)):
        part = z[layer][-1, head] @ projection_of(layers_of(hf)[layer]).weight[:, head * d_head : (head + 1) * d_head].T
        if name == "llama":
            by_hand = part / (x.pow(2).mean() + hf.config.rms_norm_eps).sqrt()
        else:
            by_hand = (part - part.mean()) / (x.var(unbiased=False) + hf.config.layer_norm_eps).sqrt()
        assert float(found.heads[layer, head]) == pytest.approx(float(by_hand @ slope), abs=1e-9)


def test_a_final_norm_of_unknown_form_is_refused() -> None:
    handle = compat.final_norm(tiny("llama").hf).register_forward_hook(lambda _m, _a, out: torch.tanh(out))
    try:
        with pytest.raises(ControlError, match=r"final norm of tiny-llama .* not linear .* off by"):
            _parts("llama")
    finally:
        handle.remove()


def test_heads_that_do_not_sum_to_their_attention_name_the_layer() -> None:
    projection = projection_of(layers_of(tiny("llama").hf)[1])
    handle = projection.register_forward_hook(lambda _m, _a, out: out + 0.01)
    try:
        with pytest.raises(ControlError, match=r"layer 1 of tiny-llama: its heads sum to something else"):
            _parts("llama")
    finally:
        handle.remove()
