"""The keys of a GGUF file's architecture: which config field each stands for, and which decide no number.

`settle` sets what a config can be told and transformers leaves at its default; `verify` compares every key with the
model that was built. A key that is in no list here is refused with its value, for what it does is not known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kvnotes_interp.errors import UnsupportedError

if TYPE_CHECKING:
    from kvnotes_interp.gguf_file import Header

# Decide no number of a forward pass: sizes of a trained context, layouts of the writer, names, token ids.
_FREE = (
    *("context_length", "tensor_data_layout", "pooling_type", "decoder_start_token_id", "rope.scaling.finetuned"),
    *("vocab_size", "classifier.output_labels", "embedding_length_out"),
)
# Worked into the rotary parameters, whose angles are then compared with the live ones.
_ROTARY = (
    *("rope.dimension_count", "rope.freq_base", "rope.freq_base_swa", "rope.scale_linear", "rope.scaling.type"),
    *("rope.scaling.factor", "rope.scaling.attn_factor", "rope.scaling.original_context_length"),
    *("rope.scaling.yarn_log_multiplier", "rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor"),
    *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
)
# key -> the names of the config field, of which the first that exists must hold the value
_FIELDS: dict[str, tuple[str, ...]] = {
    "embedding_length": ("hidden_size",),
    "block_count": ("num_hidden_layers",),
    "feed_forward_length": ("intermediate_size", "n_inner", "ffn_dim"),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "use_parallel_residual": ("use_parallel_residual",),
    "expert_count": ("num_experts", "num_local_experts", "n_routed_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_weights_norm": ("norm_topk_prob",),
    "expert_weights_scale": ("routed_scaling_factor",),
    "logit_scale": ("logit_scale",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "attention.sliding_window": ("sliding_window",),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
}
_EPSILONS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
_EPSILON_FIELDS = ("rms_norm_eps", "layer_norm_eps", "norm_eps", "layer_norm_epsilon", "norm_epsilon")
_WIDTHS = tuple(f"attention.{w}_length{s}" for w in ("key", "value") for s in ("", "_swa"))
# What a key may say without saying anything: the feature is off.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.shared_kv_layers": (0,),
    "attention.sliding_window": (0,),
    "attention.temperature_scale": (0.0,),
    "attention.output_scale": (0.0, 1.0),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "router_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "logit_scale": (0.0, 1.0),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_shared_count": (0,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_feed_forward_length": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_weights_scale": (0.0, 1.0),
    "expert_weights_norm": (),
    "leading_dense_block_count": (0,),
    "interleave_moe_layer_step": (0, 1),
    "moe_every_n_layers": (0,),
    "nextn_predict_layers": (0,),
    "n_deepstack_layers": (0,),
    "rescale_every_n_layers": (0,),
    "rope.scaling.alpha": (0.0, 1.0),
    "embedding_length_per_layer_input": (0,),
    "use_parallel_residual": (),
}
# Families whose query scale llama.cpp knows by the number of layers (the 27B ones); else it follows from the head.
_WIDE_QUERIES = {("gemma2", 46), ("gemma3", 62)}


def refuse_unknown(keys: Mapping[str, Any], header: Header) -> None:
    """Raise UnsupportedError, for a key that is missing, is not known here, or has one value per layer."""
    lacks = [k for k in ("block_count", "embedding_length", "attention.head_count") if k not in keys]
    if lacks or not any(k in keys for k in _EPSILONS):
        raise UnsupportedError(
            f"{header.path.name} does not state {header.arch}.{(lacks or _EPSILONS)[0]}, and the family's default may "
            "not be what this model was trained with."
        )
    for key, value in keys.items():
        if isinstance(value, Sequence) and not isinstance(value, str) and key in _FIELDS:
            raise UnsupportedError(
                f"{header.path.name}: {header.arch}.{key} = {_shown(value)}, one value per layer; layers of different "
                "sizes are not supported."
            )
        if not _known(key) and value not in _NEUTRAL.get(key, ()):
            raise _refused(header, key, value, "what it decides is not known here, and the model may not honour it")


def settle(keys: Mapping[str, Any], config: Any, header: Header) -> None:
    """Set on the config what the file states and transformers leaves at the family's default."""
    arch = header.arch
    width = keys.get("attention.key_length")
    if width is None and "attention.head_count" in keys and getattr(config, "head_dim", None) is not None:
        heads = config.num_attention_heads
        width = config.hidden_size // heads if arch not in ("gemma", "gemma2", "gemma3") else config.head_dim
    if width is not None and hasattr(config, "head_dim"):
        _set(config, "head_dim", width)
    for key in ("expert_feed_forward_length", "expert_shared_feed_forward_length"):
        field = next((f for f in _FIELDS[key] if hasattr(config, f)), None)
        if field and keys.get(key):
            setattr(config, field, keys[key])
    field = next((f for f in _EPSILON_FIELDS if hasattr(config, f)), None)
    if (epsilon := _first(keys, _EPSILONS)) is not None and field:
        setattr(config, field, epsilon)
    if "attention.sliding_window" not in keys and arch not in ("gemma2", "gemma3", "gemma4"):
        if getattr(config, "sliding_window", None) is not None:
            config.sliding_window = None  # a default of the family, which the file does not state
    elif keys.get("attention.sliding_window") and hasattr(config, "sliding_window"):
        config.sliding_window = keys["attention.sliding_window"]
    if hasattr(config, "query_pre_attn_scalar"):
        wide = (arch, config.num_hidden_layers) in _WIDE_QUERIES
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads if wide else config.head_dim
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if key in keys and hasattr(config, key):
            setattr(config, key, keys[key] or None)


def verify(keys: Mapping[str, Any], hf: Any, header: Header) -> None:
    """Raise UnsupportedError, with key, value and what the model has, for every key that the model does not honour."""
    from kvnotes_interp import compat, declared

    config = compat.text_config(hf)
    if hf.get_input_embeddings().weight.shape[0] != header.tensors.get("token_embd.weight", (0,))[0]:
        raise _refused(header, "vocab_size", keys.get("vocab_size"), "token_embd.weight has another number of rows")
    key: str
    value: Any
    for key, value in keys.items():
        if key in _FREE or key in _ROTARY or (isinstance(value, Sequence) and key in _FIELDS):
            continue
        has: Any
        if key in _EPSILONS:
            wrong = [e for e in _epsilons(hf) if not _near(e, value)]
            if wrong or not _epsilons(hf):
                raise _refused(header, key, value, f"the norms of the model have {wrong[0] if wrong else 'none'}")
            continue
        if key in _WIDTHS:
            has = declared.head_width(config)
        elif key == "attention.scale":
            has = next((s for s in _scales(hf) if not _near(s, value)), value)
        elif key == "attention.sliding_window_pattern":
            has = _pattern(config, value)
        elif key in _FIELDS:
            has = next((getattr(config, f) for f in _FIELDS[key] if getattr(config, f, None) is not None), None)
        else:
            has = None
        if has is None and value in _NEUTRAL.get(key, ()):
            continue
        if not _equal(has, value):
            raise _refused(header, key, value, f"the model has {_shown(has)}")


def _known(key: str) -> bool:
    others = (*_EPSILONS, *_WIDTHS, "attention.scale", "attention.sliding_window_pattern")
    return key in _FREE or key in _ROTARY or key in _FIELDS or key in others


def _set(config: Any, field: str, value: Any) -> None:
    with suppress(AttributeError):  # worked out by the config itself; `verify` compares it
        setattr(config, field, value)


def _refused(header: Header, key: str, value: Any, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"{header.path.name}: {header.arch}.{key} = {_shown(value)}: {why}. It is refused, since the numbers would be "
        "those of another model."
    )


def _epsilons(hf: Any) -> list[float]:
    found: list[float] = []
    for module in hf.modules():
        if "norm" in type(module).__name__.lower():
            value = next((v for n in ("variance_epsilon", "eps", "epsilon") if (v := getattr(module, n, None))), None)
            found += [float(value)] if value is not None else []
    return found


def _scales(hf: Any) -> list[float]:
    from kvnotes_interp import compat

    found = []
    for layer in compat.layers(hf):
        scale = getattr(compat.attention_module(layer), "scaling", None)
        if scale is None:
            raise UnsupportedError(f"{type(layer).__name__}: its attention does not tell its scale.")
        found.append(float(scale))
    return found


def _pattern(config: Any, value: Any) -> Any:
    """The value itself if the layers slide as the file says (True: slides; n: all but each n-th), else what they do."""
    kinds = getattr(config, "layer_types", None)
    slides = [k.startswith("sliding") for k in kinds or ()]
    if isinstance(value, Sequence):
        want = [bool(v) for v in value][: config.num_hidden_layers]
    else:
        want = [bool((i + 1) % value) if value else False for i in range(config.num_hidden_layers)]
    if not kinds and not any(want):
        return value
    return value if slides == want else kinds


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, int | float) and isinstance(b, int | float):
        return math.isclose(a, b, rel_tol=1e-6)
    return bool(a == b)


def _near(a: float, b: Any) -> bool:
    return isinstance(b, int | float) and math.isclose(a, b, rel_tol=1e-5)


def _first(keys: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((keys[n] for n in names if n in keys), None)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
