"""The one file that knows how transformers spells things: cache classes, argument names, module names.

transformers renamed the `past_key_values` argument to `cache` in 5.24, GPT-NeoX layers still call it `layer_past`,
and every family names its final norm differently. All of that is answered here, by reading the live model, so that a
new spelling is one line away. Nothing here changes a model.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvnotes_interp import live, weights
from kvnotes_interp.errors import UnsupportedError

# Spellings of the cache argument of a causal LM's forward, newest first.
_CACHE_ARGUMENTS = ("cache", "past_key_values")
_FINAL_NORMS = ("norm", "final_layer_norm", "final_layernorm", "ln_f")
_LAYER_LISTS = ("layers", "h", "blocks")
_FUSED_PROJECTIONS = ("qkv_proj", "query_key_value")  # queries, keys and values in one matrix
# Kinds of layer whose state is not one key and one value per token.
_UNSUPPORTED_LAYERS = {
    "linear_attention": "a linear-attention layer keeps a running state, not keys and values per token",
    "conv": "a convolution layer keeps a running window, not keys and values per token",
    "mamba": "a state-space layer keeps a running state, not keys and values per token",
    "recurrent": "a recurrent layer keeps a running state, not keys and values per token",
    "hybrid": "a hybrid layer keeps a running state beside its keys and values",
    "indexed": "an indexed-attention layer stores a compressed index beside its keys and values",
    "chunked_attention": "chunked attention is not modelled: a key is visible inside its chunk only",
}
_UNSUPPORTED_ROPE = {
    "dynamic": "dynamic NTK changes its frequencies with the longest sequence seen",
    "longrope": "longrope switches its frequencies at original_max_position_embeddings",
}


def text_config(hf: PreTrainedModel) -> Any:
    """The config of the language model itself (multimodal models nest it)."""
    return hf.config.get_text_config(decoder=True)


def decoder(hf: PreTrainedModel) -> nn.Module:
    """The module that embeds, runs the layers and applies the final norm (no unembedding)."""
    found = hf.get_decoder()
    if found is None or found is hf:
        found = hf.base_model
    inner = getattr(found, "language_model", None)
    return inner if isinstance(inner, nn.Module) else found


def layers(hf: PreTrainedModel) -> Sequence[nn.Module]:
    """The decoder layers in order."""
    body = decoder(hf)
    for name in _LAYER_LISTS:
        found = getattr(body, name, None)
        if isinstance(found, nn.ModuleList):
            return list(found)[: text_config(hf).num_hidden_layers]
    raise UnsupportedError(f"{type(hf).__name__}: no list of decoder layers found under any of {_LAYER_LISTS}.")


def final_norm(hf: PreTrainedModel) -> nn.Module:
    """The norm between the last layer and the unembedding."""
    body = decoder(hf)
    for name in _FINAL_NORMS:
        found = getattr(body, name, None)
        if isinstance(found, nn.Module):
            return found
    raise UnsupportedError(f"{type(hf).__name__}: no final norm found under any of {_FINAL_NORMS}.")


def attention_module(layer: nn.Module) -> nn.Module:
    """The attention module of one decoder layer: the child that knows its `layer_idx`."""
    for name in ("self_attn", "attention", "attn", "self_attention"):
        found = getattr(layer, name, None)
        if isinstance(found, nn.Module):
            return found
    raise UnsupportedError(f"{type(layer).__name__}: no attention module found.")


def output_projection(layer: nn.Module) -> nn.Linear:
    """The projection of a layer's head outputs, joined, into the residual stream."""
    attention = attention_module(layer)
    for name in ("o_proj", "dense", "out_proj", "c_proj"):
        found = getattr(attention, name, None)
        if isinstance(found, nn.Linear) or isinstance(getattr(found, "base_layer", None), nn.Linear):
            return found  # type: ignore[return-value]
    raise UnsupportedError(
        f"{type(attention).__name__}: no output projection (a Linear) found, so head outputs are refused on this model."
    )


def attention_projections(layer: nn.Module) -> dict[str, nn.Linear]:
    """The projections of a layer's attention as q_proj, k_proj, v_proj and o_proj, whatever the family calls them.

    A fused projection stands under all three names.
    """
    attention = attention_module(layer)
    fused = next((m for n in _FUSED_PROJECTIONS if isinstance(m := getattr(attention, n, None), nn.Linear)), None)
    found = {name: getattr(attention, name, None) or fused for name in ("q_proj", "k_proj", "v_proj")}
    wrong = [name for name, module in found.items() if not isinstance(module, nn.Linear)]
    if wrong:
        raise UnsupportedError(
            f"{type(attention).__name__}: no Linear {', '.join(wrong)}, nor one of {', '.join(_FUSED_PROJECTIONS)}."
        )
    return {**found, "o_proj": output_projection(layer)}  # type: ignore[dict-item]


def attention_write(layer: nn.Module) -> nn.Module:
    """The module whose output, times `residual_scale`, a layer adds to the residual stream on behalf of attention.

    The attention module itself, or the norm behind it in families that norm what a block writes (Gemma 2 and 3, OLMo 2
    and 3, GLM 4): there the norm before the MLP goes by another name than `post_attention_layernorm`.
    """
    for name in ("post_self_attn_layernorm", "post_norm1", "post_attention_layernorm"):
        found = getattr(layer, name, None)
        mlp_norms = ("pre_feedforward_layernorm", "pre_mlp_layernorm", "post_feedforward_layernorm")
        sandwiched = name != "post_attention_layernorm" or any(hasattr(layer, n) for n in mlp_norms)
        if isinstance(found, nn.Module) and sandwiched:
            return found
    return attention_module(layer)


def mlp_write(layer: nn.Module) -> nn.Module:
    """The module whose output, times `residual_scale`, a layer adds to the residual stream on behalf of its MLP."""
    norms = ("post_feedforward_layernorm", "post_mlp_layernorm", "post_norm2")
    for name in (*norms, "mlp", "feed_forward", "block_sparse_moe", "moe"):
        found = getattr(layer, name, None)
        if isinstance(found, nn.Module):
            return found
    raise UnsupportedError(f"{type(layer).__name__}: no MLP found, so what it writes cannot be told apart.")


def residual_scale(layer: nn.Module) -> float:
    """What a layer multiplies its writes to the residual stream with (Granite), else 1."""
    return float(getattr(layer, "residual_multiplier", 1.0))


def device_of(layer: nn.Module) -> torch.device | None:
    """Where a layer's weights lie; None where they are offloaded and come when the layer runs."""
    weight = next(layer.parameters(), None)
    return None if weight is None or weight.is_meta else weight.device


def rotary_modules(hf: PreTrainedModel) -> list[nn.Module]:
    """Modules that hold rotary inverse frequencies (`inv_freq`, or `<layer_type>_inv_freq`)."""
    return [m for m in decoder(hf).modules() if any(n.endswith("inv_freq") for n, _ in m.named_buffers(recurse=False))]


def modeling_function(hf: PreTrainedModel, name: str) -> Any:
    """A module-level function of the file that defines this model (`rotate_half`), or None."""
    return getattr(sys.modules[type(decoder(hf)).__module__], name, None)


# --- caches ----------------------------------------------------------------------------------------------------------


def cache_argument(module: nn.Module) -> str:
    """The name under which this module's forward takes a cache."""
    names = inspect.signature(module.forward).parameters
    for name in _CACHE_ARGUMENTS:
        if name in names:
            return name
    raise UnsupportedError(
        f"{type(module).__name__}.forward takes none of {_CACHE_ARGUMENTS}; its cache cannot be supplied."
    )


def new_cache(keys: Sequence[Tensor] = (), values: Sequence[Tensor] = ()) -> Cache:
    """A fresh transformers cache over the given tensors, which are shared and never written to.

    A *plain* DynamicCache is used on purpose, also for sliding-window models: every layer then keeps every position
    and the mask alone applies the window, so that a slot means the same token in every layer. `DynamicLayer.update`
    concatenates into new tensors, so the parent's tensors stay as they were.
    """
    cache = DynamicCache()
    for key, value in zip(keys, values, strict=True):
        layer = DynamicLayer()
        layer.lazy_initialization(key, value)
        layer.keys, layer.values = key, value
        cache.layers.append(layer)
    return cache


def read_cache(cache: Cache) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Keys and values per layer `[batch kv_head pos d_head]` of a transformers cache, refusing other kinds by name."""
    keys, values = [], []
    for index, layer in enumerate(cache.layers):
        if type(layer) is not DynamicLayer or layer.keys is None or layer.values is None:
            raise UnsupportedError(
                f"layer {index} of the cache is a {type(layer).__name__}; only plain per-token keys and values "
                "(DynamicLayer) can be read. Quantised, static and sliding caches are refused: run the prompt "
                "through engine.prefill instead."
            )
        keys.append(layer.keys)
        values.append(layer.values)
    return tuple(keys), tuple(values)


class PassThroughCache(DynamicCache):
    """A cache that keeps nothing: attention sees only the new tokens' keys and values.

    The base's keys and values are supplied by the attention function itself (see `attention.py`), once for all rows.
    """

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states


class OneLayerCache(PassThroughCache):
    """The cache of one layer in a pass that starts from nothing: `written` is what the layer put into it."""

    written: tuple[Tensor, Tensor]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.written = (key_states, value_states)
        return self.written


class SlotCache(DynamicCache):
    """A cache of fixed length whose slots are overwritten: new keys and values go where `slots` says.

    The tensors handed in are never written to. The attention function must be told the slots too (`Plan.slots`), since
    transformers would take the new tokens to stand behind the cache.
    """

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor], slots: Int[Tensor, " slot"]) -> None:
        super().__init__()
        self.layers.extend(new_cache(keys, values).layers)
        self.slots, self.written = slots, set[int]()

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        layer = self.layers[layer_idx]
        at = self.slots.to(key_states.device)
        self.written.add(layer_idx)
        layer.keys = layer.keys.index_copy(2, at, key_states.to(layer.keys.dtype))  # type: ignore[union-attr]
        layer.values = layer.values.index_copy(2, at, value_states.to(layer.values.dtype))  # type: ignore[union-attr]
        return layer.keys, layer.values


# --- running -----------------------------------------------------------------------------------------------------


def forward(
    hf: PreTrainedModel,
    token_ids: Int[Tensor, "batch pos"] | None,
    cache: Cache,
    positions: Int[Tensor, " pos"] | Int[Tensor, "batch pos"],
    *,
    mask: Bool[Tensor, "batch key"] | None = None,
    embeddings: Float[Tensor, "batch pos d_model"] | None = None,
) -> Float[Tensor, "batch pos d_model"]:
    """One pass over `token_ids` on top of `cache`, which grows; returns the hidden states after the final norm.

    Args:
        positions: rotary positions of the new tokens, one row for all or one per row of the batch.
        mask: True for each key, the cached ones first and then the new ones, that may be seen at all (padding is not).
            Causality and windows come on top; they count slots, so pad a cache in front and new tokens behind.
        embeddings: what the embedding layer would give for the tokens; `token_ids` is then not looked at.

    A cache object is always handed in: without one, transformers takes a gap in `positions` for packed sequences and
    cuts the attention there.

    Raises UnsupportedError for a model that was put into training mode or compiled, and for one that did not write the
    new tokens into the cache.
    """
    live.require(hf)
    body = decoder(hf)
    tokens = {"input_ids": token_ids} if embeddings is None else {"inputs_embeds": embeddings}
    batch, device = next((t.shape[0], t.device) for t in tokens.values() if t is not None)
    positions = positions.to(device)
    before = [layer.get_seq_length() for layer in cache.layers] if type(cache) is DynamicCache else None
    out = body(
        **tokens,
        position_ids=positions if positions.ndim == 2 else positions[None].expand(batch, -1),
        attention_mask=mask,
        use_cache=True,
        **{cache_argument(body): cache},
    )
    if before is not None:
        _require_written(hf, cache, before, new=positions.shape[-1])
    return out.last_hidden_state


def _require_written(hf: PreTrainedModel, cache: Cache, before: Sequence[int], *, new: int) -> None:
    wanted = [n + new for n in before] or [new] * text_config(hf).num_hidden_layers
    found = [layer.get_seq_length() for layer in cache.layers]
    wrong = [i for i in range(max(len(wanted), len(found))) if wanted[i : i + 1] != found[i : i + 1]]
    if wrong:
        held = found[wrong[0]] if wrong[0] < len(found) else "nothing"
        raise UnsupportedError(
            f"{type(hf).__name__}: layer {wrong[0]} holds {held} in the cache after {new} new tokens on top of "
            f"{before[wrong[0]] if before else 0}; its cache is not written as this package reads it."
        )


def replay_arguments(kwargs: dict[str, Any], cache: Cache) -> dict[str, Any]:
    """The recorded keyword arguments of a decoder layer, with whatever cache they held replaced by `cache`."""
    return {name: cache if isinstance(value, Cache) else value for name, value in kwargs.items()}


def unembed(
    hf: PreTrainedModel, hidden: Float[Tensor, "*rows d_model"], token_ids: Tensor | None = None
) -> Float[Tensor, "*rows token"]:
    """Logits of the named tokens (all when None) from final, normed hidden states, in at least float32.

    A bf16 logit row is quantised in steps of 0.06 to 0.13 where logits live, so only the rows asked for are multiplied
    and they are multiplied in float32. Output scaling and soft-capping follow the model's own head.
    """
    head = hf.get_output_embeddings()
    if head is None:
        raise UnsupportedError(f"{type(hf).__name__} has no output embeddings: it is not a causal language model.")
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    if _is_plain_head(head):
        weight, bias = head.weight, getattr(head, "bias", None)
        if token_ids is not None:
            index = token_ids.to(weight.device)
            weight, bias = weight[index], None if bias is None else bias[index]
        logits = hidden.to(weight.device, dtype) @ weight.to(dtype).mT
        if bias is not None:
            logits = logits + bias.to(dtype)
    else:  # an adapter, a hook or a forward of its own: the head itself is asked
        logits = _asked(hf, head, hidden).to(dtype)
        logits = logits if token_ids is None else logits[..., token_ids.to(logits.device)]
    config = text_config(hf)
    if (scale := getattr(config, "logit_scale", None)) is not None:  # Cohere
        logits = logits * scale
    if (scale := getattr(config, "logits_scaling", None)) is not None:  # Granite
        logits = logits / scale
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:  # Gemma-2
        logits = cap * torch.tanh(logits / cap)
    return logits


def _is_plain_head(head: Any) -> bool:
    """Whether a head is its weight (and bias) and no more; an adapter's stand-in for remote models is, too."""
    if not isinstance(head, nn.Module):
        return True
    return type(head) is nn.Linear and not (head._forward_hooks or head._forward_pre_hooks or "forward" in vars(head))


def _asked(hf: PreTrainedModel, head: nn.Module, hidden: Tensor) -> Tensor:
    weight = next(head.parameters())
    if weight.dtype in (torch.float16, torch.bfloat16):
        raise UnsupportedError(
            f"{type(hf).__name__}: its unembedding ({type(head).__name__}) has an adapter, a hook or a forward of its "
            f"own, and would give logits in {weight.dtype}, too coarse to compare. Merge it, or load it in float32."
        )
    return head(hidden.to(weight.device, weight.dtype))


# --- refusals ----------------------------------------------------------------------------------------------------


def rope_types(hf: PreTrainedModel) -> set[str]:
    """The rotary types that this model's config names (`default`, `llama3`, `yarn`, ...)."""
    parameters = getattr(text_config(hf), "rope_parameters", None) or {}
    nested = [p for p in parameters.values() if isinstance(p, dict)] or [parameters]
    return {p.get("rope_type", "default") for p in nested}


def refuse_unsupported(hf: PreTrainedModel) -> None:
    """Raise UnsupportedError, naming the cause, unless the cache is one key and value per token and layer."""
    name, config = type(hf).__name__, text_config(hf)
    weights.refuse_quantised(hf, name)
    for kind in getattr(config, "layer_types", None) or ():
        for bad, why in _UNSUPPORTED_LAYERS.items():
            if kind.startswith(bad):
                raise UnsupportedError(f"{name} has a {kind!r} layer: {why}. It cannot be patched by position.")
    if getattr(config, "num_kv_shared_layers", 0):
        raise UnsupportedError(
            f"{name} shares keys and values between layers (num_kv_shared_layers={config.num_kv_shared_layers}): a "
            "patch in one layer would change another."
        )
    if getattr(config, "kv_lora_rank", None):
        raise UnsupportedError(f"{name} caches a latent (kv_lora_rank={config.kv_lora_rank}), not keys per head.")
    if getattr(hf.config, "quantization_config", None) is not None:
        raise UnsupportedError(
            f"{name} is quantised ({hf.config.quantization_config}); load it in float32, bfloat16 or float16."
        )
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(f"{name} is an encoder-decoder; a decoder-only causal language model is needed.")
    for kind in rope_types(hf) & set(_UNSUPPORTED_ROPE):
        raise UnsupportedError(
            f"{name} uses rope_type={kind!r}: {_UNSUPPORTED_ROPE[kind]}, so keys cached on either side are not "
            "related by a rotation. It is refused rather than rotated wrongly."
        )
    for index, layer in enumerate(layers(hf)):
        if (own := getattr(attention_module(layer), "layer_idx", index)) != index:
            raise UnsupportedError(
                f"{name}: the layer in place {index} calls itself layer {own}, so a cache, a cut and a hook would name "
                "different layers. Give every layer a module of its own, numbered in order (layer_idx)."
            )
    if any(getattr(attention_module(layer), "sinks", None) is not None for layer in layers(hf)):
        raise UnsupportedError(f"{name} has attention sinks (an extra softmax column), which no probe here models.")
    heads = [m for m in hf.modules() if type(m).__name__ in ("MambaMixer", "RecurrentGemmaRecurrentBlock")]
    if heads:
        raise UnsupportedError(f"{name} has recurrent layers ({type(heads[0]).__name__}): no keys per token.")
