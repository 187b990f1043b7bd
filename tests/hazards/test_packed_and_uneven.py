"""Live models with packed weights, and configs without one shape of layer, are refused by name.

Each refusal has a control: the same model without the fault, which loads.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig

import kvnotes_interp as kv
from kvnotes_interp import sources, weights
from kvnotes_interp.errors import UnsupportedError
from tests.architectures import build

IDS = [5, 17, 3, 88, 41, 9, 60, 23]


def logits(hf: Any) -> Tensor:
    with torch.no_grad():
        return hf(input_ids=torch.tensor([IDS]), use_cache=False).logits[0].double()


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


# --- packed weights --------------------------------------------------------------------------------------------------


class Wrapped(torch.Tensor):
    """What torchao does: a subclass that holds packed numbers and computes when it is used."""

    @staticmethod
    def __new__(cls, packed: Tensor, scale: float) -> Wrapped:
        out = torch.Tensor._make_wrapper_subclass(cls, packed.shape, dtype=torch.float32)
        out.packed, out.scale = packed, scale
        return out

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Wrapped(args[0].packed, args[0].scale)
        args = [a.packed.float() * a.scale if isinstance(a, Wrapped) else a for a in args]
        return func(*args, **(kwargs or {}))


class Plain(torch.Tensor):
    """A subclass that does nothing."""


class Packed(nn.Module):
    numbers: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("numbers", (weight * 50).round().to(torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.numbers.float() / 50).mT


def _subclass(hf: Any) -> None:
    layer = hf.model.layers[0].self_attn.q_proj
    layer.weight = nn.Parameter(Wrapped(layer.weight.to(torch.int8), 0.1), requires_grad=False)


def _trivial(hf: Any) -> None:
    layer = hf.model.layers[1].mlp.up_proj
    layer.weight = nn.Parameter(layer.weight.data.as_subclass(Plain), requires_grad=False)


def _float8(hf: Any) -> None:
    layer = hf.model.layers[2].mlp.down_proj
    layer.weight.data = layer.weight.data.to(torch.float8_e4m3fn)


def _custom(hf: Any) -> None:
    hf.model.layers[0].self_attn.k_proj = Packed(hf.model.layers[0].self_attn.k_proj.weight)


def _library(hf: Any) -> None:
    kind = type("Linear4bit", (nn.Linear,), {"__module__": "bitsandbytes.nn.modules"})
    hf.model.layers[0].mlp.gate_proj.__class__ = kind


def _dynamic(hf: Any) -> None:
    torch.ao.quantization.quantize_dynamic(hf, {nn.Linear}, dtype=torch.qint8, inplace=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_subclass, r"layers\.0\.self_attn\.q_proj\.weight is a .*Wrapped, not a plain tensor"),
        (_trivial, r"layers\.1\.mlp\.up_proj\.weight is a .*Plain, not a plain tensor"),
        (_float8, r"layers\.2\.mlp\.down_proj\.weight holds float8_e4m3fn"),
        (_custom, r"layers\.0\.self_attn\.k_proj is a .*Packed without a floating-point weight"),
        (_library, r"layers\.0\.mlp\.gate_proj is a bitsandbytes\.nn\.modules\.Linear4bit, of bitsandbytes"),
        (_dynamic, r"layers\.0\.self_attn\.q_proj is a torch\.ao\.nn\.quantized\.dynamic.*of torch\.ao"),
    ],
)
def test_packed_weights_of_a_live_model_are_refused_by_name(change: Callable[[Any], None], said: str) -> None:
    hf = build("llama", dtype=torch.float32)
    kv.load(hf)  # control
    change(hf)
    with pytest.raises(UnsupportedError, match=said) as error:
        kv.load(hf)
    assert weights.ADVICE in str(error.value)


def test_an_adapter_over_float_weights_is_accepted() -> None:
    peft = pytest.importorskip("peft")
    options = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    inside = build("llama", dtype=torch.float32)
    plain = logits(inside)
    inside.add_adapter(options)
    assert kv.load(inside).check().passed
    outside = peft.get_peft_model(build("llama", dtype=torch.float32), options)
    assert relative(logits(kv.load(outside).hf), logits(outside)) == 0.0
    assert relative(logits(outside), plain) > 0.05
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(UnsupportedError, match="PROMPT_TUNING"):
        kv.load(peft.get_peft_model(build("llama", dtype=torch.float32), prompt))


# --- shapes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("gemma4_text", "head_dim"),
        ("mamba", "no num_attention_heads"),
        ("rwkv", "no num_attention_heads"),
        ("t5", "encoder-decoder"),
        ("whisper", "encoder-decoder"),
        ("vit", "does not tell the shape"),
    ],
)
def test_a_config_without_one_shape_of_layer_is_refused_by_name(kind: str, said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        sources.shape_of_config(AutoConfig.for_model(kind))


@pytest.mark.parametrize(
    "fields", [{"num_query_heads": [12, 16], "num_kv_heads": [3, 4]}, {"block_configs": [{"a": 1}, {}]}]
)
def test_per_layer_heads_of_an_unknown_family_are_refused_from_config_json(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "openelm", **fields}))
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedError, match=next(iter(fields))):
        sources.shape_of(tmp_path)


def test_gemma4_with_heads_of_one_width_has_a_shape(kvprobe: Any, tmp_path: Path) -> None:
    options = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    options |= {"vocab_size": 97, "vocab_size_per_layer_input": 97, "head_dim": 8, "hidden_size_per_layer_input": 8}
    options |= {
        "intermediate_size": 48,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 0,
    }
    even = AutoConfig.for_model("gemma4_text", **options, global_head_dim=8)
    assert sources.shape_of_config(even).d_head == 8
    AutoConfig.for_model("gemma4_text", **options, global_head_dim=16).save_pretrained(tmp_path)
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    done = kvprobe("patch", "--dry-run", "--model", tmp_path)
    assert done.code == 2
    assert "layers of different heads" in done.words
