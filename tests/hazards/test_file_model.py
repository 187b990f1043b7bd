"""The model in a file is the model that runs: GGUF keys and tensors, folders, declared angles, packed weights, shapes.

Every right value comes from a forward pass in plain torch, or from the weights as they were drawn; every refusal has a
control, the same file without the fault, which loads.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import kvnotes_interp as kv
from kvnotes_interp import declared, gguf_file, sources
from kvnotes_interp.errors import InputError, UnsupportedError
from tests.architectures import ARCHITECTURES, build
from tests.hazards import llama_file as file

WEIGHTS = file.weights()
FACTORS = file.llama3_factors()
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128}
Angles = list[float]


def logits(hf: Any) -> Tensor:
    with torch.no_grad():
        return hf(input_ids=torch.tensor([file.IDS]), use_cache=False).logits[0].double()


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


# --- GGUF: rotary scaling --------------------------------------------------------------------------------------------

SCALED: dict[str, tuple[dict[str, Any], dict[str, Tensor], Angles, float]] = {
    "llama3": (
        {},
        {"rope_freqs.weight": torch.tensor(FACTORS)},
        [a / f for a, f in zip(file.plain(), FACTORS, strict=True)],
        1.0,
    ),
    "linear": (
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        {},
        [a / 4 for a in file.plain()],
        1.0,
    ),
    "a factor without a type is linear": ({"rope.scaling.factor": 2.5}, {}, [a / 2.5 for a in file.plain()], 1.0),
    "scale_linear": ({"rope.scale_linear": 4.0}, {}, [a / 4 for a in file.plain()], 1.0),
    "yarn": (YARN, {}, file.yarn_angles(4, 128), 1 + 0.1 * math.log(4)),
    "yarn, every number": (
        YARN
        | {
            "rope.scaling.original_context_length": 64,
            "rope.scaling.attn_factor": 0.7,
            "rope.scaling.yarn_beta_fast": 8.0,
            "rope.scaling.yarn_beta_slow": 2.0,
        },
        {},
        file.yarn_angles(4, 64, 8, 2),
        0.7 * (1 + 0.1 * math.log(4)),
    ),
    "linear and llama3": (
        {"rope.scaling.factor": 2.0},
        {"rope_freqs.weight": torch.tensor(FACTORS)},
        [a / f / 2 for a, f in zip(file.plain(), FACTORS, strict=True)],
        1.0,
    ),
    "another base": ({"rope.freq_base": 500.0}, {}, file.plain(500.0), 1.0),
}


@pytest.mark.parametrize("name", SCALED)
def test_a_gguf_file_runs_with_the_angles_that_it_states(name: str, tmp_path: Path) -> None:
    keys, more, angles, scale = SCALED[name]
    model = kv.load(file.write(tmp_path / "m.gguf", WEIGHTS | more, keys))
    want = file.forward(WEIGHTS, file.IDS, angles, scale)
    assert relative(logits(model.hf), want) < 1e-5
    assert relative(file.forward(WEIGHTS, file.IDS), want) > 0.05  # control: what was run before
    assert model.check().passed
    buffers = dict(model.hf.named_buffers())
    assert torch.equal(buffers["model.rotary_emb.inv_freq"], buffers["model.rotary_emb.original_inv_freq"])


@pytest.mark.parametrize("keys", [{}, {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {"expert_count": 0}])
def test_a_gguf_file_without_scaling_runs_plainly(keys: dict[str, Any], tmp_path: Path) -> None:
    hf = kv.load(file.write(tmp_path / "m.gguf", WEIGHTS, keys)).hf
    assert relative(logits(hf), file.forward(WEIGHTS, file.IDS)) < 1e-5


def test_a_tied_gguf_file_is_tied(tmp_path: Path) -> None:
    tied = {k: v for k, v in WEIGHTS.items() if k != "output.weight"}
    hf = kv.load(file.write(tmp_path / "m.gguf", tied)).hf
    assert relative(logits(hf), file.forward(tied, file.IDS)) < 1e-5


def test_factors_of_a_gguf_file_are_not_lost_when_it_is_saved(tmp_path: Path) -> None:
    path = file.write(tmp_path / "m.gguf", WEIGHTS | {"rope_freqs.weight": torch.tensor(FACTORS)})
    hf, tokenizer, _ = sources.fetch(path)
    hf.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    with pytest.raises(UnsupportedError, match="frequency_factors"):
        sources.fetch(tmp_path / "saved")


# --- GGUF: every other key and tensor --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope.scaling.type", "longrope"),
        ("rope.scaling.type", "dynamic"),
        ("rope.scaling.attn_factor", 1.5),  # without yarn
        ("rope.scaling.alpha", 1000.0),
        ("rope.dimension_count", 4),
        ("rope.dimension_sections", [1, 1, 1, 1]),
        ("attention.value_length", 16),
        ("attention.scale", 0.1),
        ("attention.sliding_window", 4),
        ("attention.causal", False),
        ("attention.clamp_kqv", 8.0),
        ("attention.max_alibi_bias", 8.0),
        ("attention.head_count_kv", [2, 1, 2]),
        ("logit_scale", 0.5),
        ("final_logit_softcapping", 30.0),
        ("attn_logit_softcapping", 50.0),
        ("embedding_scale", 12.0),
        ("residual_scale", 0.2),
        ("expert_count", 4),
        ("expert_weights_scale", 2.5),
        ("expert_weights_norm", True),
        ("nextn_predict_layers", 1),
        ("a_key_of_tomorrow", 3),
    ],
)
def test_a_key_that_the_model_does_not_honour_is_refused_by_name(key: str, value: Any, tmp_path: Path) -> None:
    path = file.write(tmp_path / "m.gguf", WEIGHTS, {key: value})
    with pytest.raises(UnsupportedError) as error:
        kv.load(path)
    said = str(error.value)
    assert key in said or "declared" in said
    assert str(value) in said or f"{value:.4g}" in said or "4 are declared" in said


@pytest.mark.parametrize("key", ["yarn_ext_factor", "yarn_log_multiplier", "yarn_attn_factor"])
def test_a_number_of_yarn_that_is_not_honoured_is_refused(key: str, tmp_path: Path) -> None:
    path = file.write(tmp_path / "m.gguf", WEIGHTS, YARN | {f"rope.scaling.{key}": 0.3})
    with pytest.raises(UnsupportedError, match=rf"llama\.rope\.scaling\.{key} = 0\.3"):
        kv.load(path)


@pytest.mark.parametrize("key", ["attention.layer_norm_rms_epsilon", "attention.head_count", "block_count"])
def test_a_key_that_is_missing_does_not_fall_to_a_default(key: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=rf"does not state llama\.{key}"):
        kv.load(file.write(tmp_path / "m.gguf", WEIGHTS, without=[key]))


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"rope_factors_long.weight": torch.ones(4)}, "rope_factors_long.weight"),
        ({"blk.1.attn_q_norm.weight": torch.ones(8)}, "blk.1.attn_q_norm.weight"),
        ({"blk.3.attn_v.weight": torch.ones(16, 32)}, "blk.3.attn_v.weight"),
        ({"blk.0.attn_q.bias": torch.ones(32)}, "bias"),
        ({"blk.0.attn_v.weight": torch.ones(8, 32)}, "blk.0.attn_v.weight"),
        ({"rope_freqs.weight": torch.ones(3)}, "rope_freqs.weight|angles"),
    ],
)
def test_a_tensor_without_a_place_is_refused_by_name(more: dict[str, Tensor], named: str, tmp_path: Path) -> None:
    with pytest.raises((UnsupportedError, InputError), match=named):
        kv.load(file.write(tmp_path / "m.gguf", WEIGHTS | more))


@pytest.mark.parametrize("lacks", ["blk.1.attn_v.weight", "output_norm.weight", "blk.2.ffn_norm.weight"])
def test_a_tensor_that_is_missing_is_not_drawn_at_random(lacks: str, tmp_path: Path) -> None:
    part = {k: v for k, v in WEIGHTS.items() if k != lacks}
    with pytest.raises(UnsupportedError, match=r"holds no tensor for model.*would be random"):
        kv.load(file.write(tmp_path / "m.gguf", part))


@pytest.mark.parametrize(("key", "value"), [("general.type", "adapter"), ("split.count", 2)])
def test_a_gguf_file_that_is_no_whole_model_is_refused(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=key):
        kv.load(file.write(tmp_path / "m.gguf", WEIGHTS, general={key: value}))


def test_the_shape_of_a_gguf_file_is_refused_as_the_file_is(tmp_path: Path) -> None:
    assert sources.shape_of(file.write(tmp_path / "m.gguf", WEIGHTS)).n_kv_heads == file.KV
    with pytest.raises(UnsupportedError, match="head_count_kv"):
        sources.shape_of(file.write(tmp_path / "u.gguf", WEIGHTS, {"attention.head_count_kv": [2, 1, 2]}))


# --- folders ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    target = tmp_path / "model"
    build("llama", dtype=torch.float32).save_pretrained(target)
    return target


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder: Path, **changes: Any) -> None:
    raw = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(raw))


def load(folder: Path) -> Any:
    from kvnotes_interp import folder_file

    options = {"dtype": torch.float32, "device_map": None, "trust_remote_code": False}
    return folder_file.load(folder, "m", options, tokenizer=False)[0]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_was_saved_is_what_loads(name: str, tmp_path: Path) -> None:
    hf = build(name, dtype=torch.float32)
    hf.save_pretrained(tmp_path)
    again = dict(load(tmp_path).named_parameters())
    assert all(torch.equal(p, again[n]) for n, p in hf.named_parameters())


Q0 = "model.layers.0.self_attn.q_proj.weight"
FAULTS: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "missing": (lambda w: w.pop(Q0), f"hold no {Q0}.*random"),
    "a missing norm": (lambda w: w.pop("model.norm.weight"), "hold no model.norm.weight"),
    "a missing head": (lambda w: w.pop("lm_head.weight"), "hold no lm_head.weight"),
    "stray": (lambda w: w.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}), "q_proj.bias.*no place"),
    "a stray layer": (
        lambda w: w.update({"model.layers.9.mlp.up_proj.weight": torch.ones(48, 32)}),
        "layers.9.*no place",
    ),
    "another shape": (lambda w: w.update({"model.norm.weight": torch.ones(16)}), "model.norm.weight has another shape"),
    "float8": (lambda w: w.update({Q0: w[Q0].to(torch.float8_e4m3fn)}), f"quantised: {Q0}.*F8_E4M3"),
    "int8": (lambda w: w.update({Q0: w[Q0].to(torch.int8)}), f"quantised: {Q0}.*I8"),
    "other frequencies": (
        lambda w: w.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}),
        "rotary_emb.inv_freq.*other frequencies",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_weights_that_are_not_those_of_the_model_are_refused_by_name(name: str, folder: Path) -> None:
    load(folder)  # control
    change, said = FAULTS[name]
    edit_weights(folder, change)
    with pytest.raises(UnsupportedError, match=said):
        load(folder)


def test_stored_frequencies_that_agree_are_allowed(folder: Path) -> None:
    live = torch.tensor([10_000.0 ** (-i / 4) for i in range(4)])
    edit_weights(folder, lambda w: w.update({"model.layers.0.self_attn.rotary_emb.inv_freq": live}))
    torch.testing.assert_close(load(folder).model.rotary_emb.inv_freq, live)


def test_tied_in_the_config_and_not_in_the_files(tmp_path: Path) -> None:
    build("llama_biased", dtype=torch.float32).save_pretrained(tmp_path)
    load(tmp_path)
    edit_weights(tmp_path, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"] + 1}))
    with pytest.raises(UnsupportedError, match=r"tie_word_embeddings = true"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope_scaling": {"type": "weird", "factor": 2.0}}, "rope_type = 'weird'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "foo": 3}}, "foo = 3"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "attn_factor": 2.0}}, "attn_factor = 2.0"),
        ({"partial_rotary_factor": 0.5}, "8 dimensions of a head are turned, and 4 are declared"),
        ({"rope_ratio": 4}, "rope_ratio = 4"),
        ({"logit_scale": 0.5}, "logit_scale = 0.5"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ({"sliding_window": 4}, "sliding_window = 4"),
        ({"auto_map": {"AutoModelForCausalLM": "m.X"}, "architectures": ["X"]}, "code of its own"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised .fp8"),
        ({"num_key_value_heads": [2, 1, 2]}, r"num_key_value_heads = \[2, 1, 2\]"),
    ],
)
def test_a_config_that_is_not_honoured_is_refused_by_name(changes: dict[str, Any], said: str, folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    del raw["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(raw | {"rope_theta": 10_000.0}))
    load(folder)  # control
    edit_config(folder, **changes)
    with pytest.raises(UnsupportedError, match=said):
        load(folder)


def test_the_older_spelling_of_scaling_is_honoured(folder: Path) -> None:
    plain = logits(load(folder))
    raw = json.loads((folder / "config.json").read_text())
    del raw["rope_parameters"]
    raw |= {"rope_theta": 10_000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
    (folder / "config.json").write_text(json.dumps(raw))
    hf = load(folder)
    want = build("linear", dtype=torch.float32)
    want.load_state_dict(hf.state_dict())
    assert relative(logits(hf), logits(want)) < 1e-6
    assert relative(plain, logits(hf)) > 0.05


def test_an_adapter_beside_the_weights_is_not_loaded_along(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(UnsupportedError, match="holds an adapter"):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(InputError, match="holds an adapter and no model"):
        sources.fetch(folder)


def test_an_index_and_the_files_must_agree(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    with pytest.raises(UnsupportedError, match=r"both model\.safetensors and"):
        load(folder)
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    with pytest.raises(InputError, match=r"lacks model-1\.safetensors"):
        load(folder)
    index.write_text('{"weight_map": {"a": "other.safetensors"}}')
    with pytest.raises(InputError, match="names a, and no file holds it"):
        load(folder)


# --- the declared angles ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "llama3", "yarn", "linear", "gemma3", "olmo3", "cohere", "glm", "gpt_neox"])
def test_a_live_model_that_left_its_config_fails_with_both_named(name: str) -> None:
    hf = build(name, exact=False)
    model = kv.load(hf)
    assert [c.passed for c in model.check(full=False).checks if c.name == declared.NAME] == [True]
    module = next(m for m in hf.modules() if any(n.endswith("inv_freq") for n, _ in m.named_buffers(recurse=False)))
    buffer = next(b for n, b in module.named_buffers(recurse=False) if n.endswith("inv_freq") and "orig" not in n)
    buffer[-1] *= 1.01
    (row,) = declared.checks(model)
    assert not row.passed
    assert row.value == pytest.approx(0.01, rel=0.1)
    assert "inv_freq of the live model" in row.detail
    assert "rope_parameters" in row.detail
    with pytest.raises(UnsupportedError, match=declared.NAME):
        kv.load(hf)


def test_an_attention_factor_that_was_changed_fails() -> None:
    hf = build("yarn", exact=False)
    hf.model.rotary_emb.attention_scaling = 1.0
    with pytest.raises(UnsupportedError, match=r"cos and sin are multiplied by 1, and 1\.13863 is declared"):
        kv.load(hf)


def test_a_kind_that_is_not_known_is_said() -> None:
    hf = build("llama")
    model = kv.load(hf)
    hf.config.rope_parameters = {"rope_type": "of_tomorrow", "rope_theta": 1e4}
    (row,) = declared.checks(model)
    assert row.detail.startswith("not compared: rope_type 'of_tomorrow'")


@pytest.mark.slow
def test_the_default_model_as_a_gguf_file_is_what_its_folder_is() -> None:
    """Uses the user's cache, which the default model fills."""
    from kvnotes_interp import downloads
    from kvnotes_interp.registry import ALIASES, DEFAULT

    wheel = ALIASES[DEFAULT].wheel
    assert wheel is not None
    path = downloads.gguf_of(DEFAULT, wheel)
    assert gguf_file.config_of(gguf_file.read_header(path)).rope_parameters["rope_theta"] == 100_000.0
    hf, _, _ = sources.fetch(path)
    want = AutoModelForCausalLM.from_pretrained(downloads.from_wheel(DEFAULT, wheel))
    ids = torch.arange(5, 25)[None]
    assert torch.equal(hf(input_ids=ids).logits, want(input_ids=ids).logits)
