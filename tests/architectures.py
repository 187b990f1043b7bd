"""Tiny random models of many architectures: offline, seeded, built in a fraction of a second.

The weights are drawn here and not by transformers: its default spread of 0.02 makes attention nearly uniform and logits
tiny, so that a patched key would change nothing that a test could see. Norm weights and biases are random too, so that
a step left out (a key norm, a bias) shows as a difference. Inverse frequencies stay float32, as `from_pretrained`
leaves them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tests.exact import make_exact

VOCAB = 97  # odd, and no other size here equals it
WINDOW = 6  # shorter than every prompt of the tests, so that sliding layers do drop keys
Builder = Callable[[], PreTrainedModel]


def _config(model_type: str, **options: Any) -> PreTrainedConfig:
    """The config of a family with small sizes. `None` leaves the family's own default."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    chosen = {name: value for name, value in (sizes | options).items() if value is not None}
    return AutoConfig.for_model(model_type, **chosen)


def _rope(kind: str = "default", *, theta: float = 10_000.0, **more: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": theta, **more}


_SLIDING, _FULL = "sliding_attention", "full_attention"

# name -> the config of an architecture that the library must handle
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: _config("llama"),
    "llama_biased": lambda: _config("llama", attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "llama3": lambda: _config(
        "llama",
        rope_parameters=_rope(
            "llama3",
            theta=500.0,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "yarn": lambda: _config(
        "llama", rope_parameters=_rope("yarn", theta=500.0, factor=4.0, original_max_position_embeddings=128)
    ),
    "linear": lambda: _config("llama", rope_parameters=_rope("linear", factor=4.0)),
    "qwen2": lambda: _config("qwen2"),
    "qwen3": lambda: _config("qwen3", head_dim=16),  # 4 heads of 16 on a width of 32
    "qwen3_moe": lambda: _config(
        "qwen3_moe", head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, num_hidden_layers=2
    ),
    "mistral": lambda: _config("mistral", sliding_window=WINDOW),  # every layer slides
    "gemma2": lambda: _config(
        "gemma2",
        head_dim=16,
        num_hidden_layers=4,
        sliding_window=WINDOW,
        layer_types=[_SLIDING, _FULL] * 2,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=4.0,
        tie_word_embeddings=True,
    ),
    "gemma3": lambda: _config(
        "gemma3_text",
        head_dim=16,
        num_hidden_layers=4,
        sliding_window=WINDOW,
        layer_types=[_SLIDING, _SLIDING, _FULL, _SLIDING],
        query_pre_attn_scalar=24,
        rope_parameters={_FULL: _rope("linear", theta=1000.0, factor=2.0), _SLIDING: _rope(theta=100.0)},
        tie_word_embeddings=True,
    ),
    "phi": lambda: _config("phi", head_dim=None, rope_parameters=_rope(partial_rotary_factor=0.5)),
    "phi3": lambda: _config("phi3", head_dim=None, rope_parameters=_rope(partial_rotary_factor=0.5)),
    "gpt_neox": lambda: _config(
        "gpt_neox",
        hidden_size=48,  # d_head 12, of which 6 turn
        num_key_value_heads=None,
        rope_parameters=_rope(partial_rotary_factor=0.5),
    ),
    "gpt_neox_serial": lambda: _config(
        "gpt_neox",
        hidden_size=64,
        num_hidden_layers=2,
        num_key_value_heads=None,
        use_parallel_residual=False,
        rope_parameters=_rope(partial_rotary_factor=0.25),
    ),
    "cohere": lambda: _config("cohere", logit_scale=0.25, use_qk_norm=True, tie_word_embeddings=True),
    "cohere2": lambda: _config(
        "cohere2",
        num_hidden_layers=4,
        logit_scale=0.25,
        sliding_window=WINDOW,
        layer_types=[_SLIDING, _SLIDING, _FULL, _SLIDING],  # the full layer has no rotary positions
        tie_word_embeddings=True,
    ),
    "glm": lambda: _config("glm", head_dim=12, rope_parameters=_rope(partial_rotary_factor=0.5)),
    "glm4": lambda: _config("glm4", head_dim=16, rope_parameters=_rope(partial_rotary_factor=0.5)),
    "ernie4_5": lambda: _config("ernie4_5", head_dim=8),
    "helium": lambda: _config("helium", head_dim=8),
    "smollm3": lambda: _config("smollm3", num_hidden_layers=4, no_rope_layers=[1, 0, 1, 0]),
    "olmo2": lambda: _config("olmo2"),
    "olmo3": lambda: _config(
        "olmo3",
        num_hidden_layers=4,
        sliding_window=WINDOW,
        layer_types=[_SLIDING, _FULL] * 2,
        rope_parameters={  # one set per kind of layer
            _FULL: _rope("yarn", theta=500.0, factor=4.0, original_max_position_embeddings=128),
            _SLIDING: _rope(theta=500.0),
        },
    ),
    "granite": lambda: _config(
        "granite",
        embedding_multiplier=2.0,
        logits_scaling=3.0,
        residual_multiplier=0.7,
        attention_multiplier=0.5,
    ),
    "starcoder2": lambda: _config("starcoder2", sliding_window=WINDOW),
    "stablelm": lambda: _config(
        "stablelm", use_qkv_bias=True, qk_layernorm=True, rope_parameters=_rope(partial_rotary_factor=0.25)
    ),
    "exaone4": lambda: _config(
        "exaone4",
        head_dim=8,
        num_hidden_layers=4,
        sliding_window=WINDOW,
        sliding_window_pattern=None,
        layer_types=[_SLIDING, _SLIDING, _FULL, _SLIDING],  # the full layer has no rotary positions
    ),
    "nanochat": lambda: _config("nanochat", head_dim=8, final_logit_softcapping=4.0),  # turns the other way round
    "nemotron": lambda: _config("nemotron", head_dim=8, rope_parameters=_rope(partial_rotary_factor=0.5)),
    # Its full layers go without rotary positions, and only `is_local_attention` tells.
    "afmoe": lambda: _config(
        "afmoe",
        head_dim=8,
        num_dense_layers=2,
        num_hidden_layers=2,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        sliding_window=WINDOW,
        layer_types=[_SLIDING, _FULL],
    ),
}

# name -> the config of a model that the library must refuse, naming the cause
REFUSED_CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "dynamic_ntk": lambda: _config("llama", rope_parameters=_rope("dynamic", factor=2.0)),
    "longrope": lambda: _config(
        "phi3",
        original_max_position_embeddings=64,
        rope_parameters=_rope(
            "longrope", short_factor=[1.0] * 4, long_factor=[2.0] * 4, original_max_position_embeddings=64
        ),
    ),
    "qwen3_next": lambda: _config(
        "qwen3_next",
        head_dim=8,
        layer_types=["linear_attention", _FULL],
        num_hidden_layers=2,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
    ),
    "mamba": lambda: _config(
        "mamba", state_size=4, num_hidden_layers=2, num_attention_heads=None, num_key_value_heads=None
    ),
    "jamba": lambda: _config(
        "jamba",
        num_hidden_layers=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=2,
        num_experts_per_tok=1,
        mamba_d_state=4,
    ),
    "recurrent_gemma": lambda: _config(
        "recurrent_gemma",
        num_hidden_layers=3,
        lru_width=32,
        attention_window_size=WINDOW,
        head_dim=None,
        tie_word_embeddings=True,
    ),
    "lfm2": lambda: _config("lfm2", num_hidden_layers=2, layer_types=["conv", _FULL]),
    "gemma3n": lambda: _config(
        "gemma3n_text",
        head_dim=8,
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        sliding_window=WINDOW,
        layer_types=[_SLIDING, _FULL] * 2,
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=8,
        laurel_rank=4,
        activation_sparsity_pattern=[0.0] * 4,
        tie_word_embeddings=True,
    ),
    "gemma4": lambda: _config(
        "gemma4_text",
        head_dim=8,
        global_head_dim=8,
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        sliding_window=WINDOW,
        layer_types=[_SLIDING, _FULL] * 2,
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=8,
        tie_word_embeddings=True,
    ),
    "deepseek_v3": lambda: _config(
        "deepseek_v3",
        num_key_value_heads=4,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        num_hidden_layers=2,
    ),
    "llama4": lambda: _config(
        "llama4_text",
        head_dim=8,
        num_hidden_layers=2,
        num_local_experts=2,
        intermediate_size_mlp=48,
        attention_chunk_size=WINDOW,
        no_rope_layers=[1, 0],
    ),
    # Its key norm comes after the rotation, with a weight per dimension: a cached key is no rotation of anything.
    "hunyuan": lambda: _config("hunyuan_v1_dense", head_dim=8),
    # Attention sinks: an extra column of the softmax.
    "gpt_oss": lambda: _config(
        "gpt_oss",
        head_dim=8,
        num_hidden_layers=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        layer_types=[_SLIDING, _FULL],
        rope_parameters=_rope("yarn", theta=500.0, factor=4.0, original_max_position_embeddings=128),
    ),
    "gpt2": lambda: _config("gpt2", num_key_value_heads=None, n_positions=512),  # learned positions
    "bloom": lambda: _config("bloom", num_key_value_heads=None),  # ALiBi
}

# What transformers refuses to run under sdpa; build these with attn="eager".
EAGER_ONLY = frozenset({"gemma2", "gpt_oss", "mamba", "bloom"})


def initialise(model: PreTrainedModel, seed: int) -> None:
    """Draw every weight anew, in place: matrices keep the size of what they multiply, queries meet keys at about 2."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        leaf = name.rsplit(".", 1)[-1]
        with torch.no_grad():
            if "norm" in name or "ln_" in name:
                # Around what the family starts from: one, or zero where it adds the one itself.
                parameter.add_(0.25 * noise)
            elif leaf == "bias" or parameter.ndim == 1:
                parameter.copy_(0.3 * noise)
            elif "embed" in name or "wte" in name:
                parameter.copy_(0.6 * noise)
            else:
                parameter.copy_(noise * 1.4 / math.sqrt(parameter.shape[-1]))


def build(
    name: str,
    *,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    attn: str = "eager",
    vocab: int | None = None,
    exact: bool = True,
) -> PreTrainedModel:
    """A tiny model of this architecture (one of ARCHITECTURES or REFUSED), in eval mode and without gradients.

    `attn` is "eager" or "sdpa"; `vocab` the number of tokens (default 97), for use with `tiny_tokenizer`; `exact` lifts
    the float32 steps of a float64 model, and changes nothing for other dtypes. Inverse frequencies stay float32 there,
    as `from_pretrained` leaves them.
    """
    config = (CONFIGS.get(name) or REFUSED_CONFIGS[name])()
    if vocab is not None:
        config.vocab_size = vocab
        if hasattr(config, "vocab_size_per_layer_input"):
            config.vocab_size_per_layer_input = vocab
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config,
            attn_implementation=attn,
            experts_implementation="eager",  # the grouped kernel knows no float64
            dtype=torch.float32,
        )
    initialise(model, seed)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
        parameter.requires_grad_(False)
    if exact and dtype == torch.float64:
        make_exact(model)
    return model.eval()


def _builder(name: str) -> Builder:
    return lambda: build(name)


ARCHITECTURES: dict[str, Builder] = {name: _builder(name) for name in CONFIGS}
REFUSED: dict[str, Builder] = {name: _builder(name) for name in REFUSED_CONFIGS}
