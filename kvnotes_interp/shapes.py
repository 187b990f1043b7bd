"""The shape of a model off its config, and the configs that are refused before anything is built or downloaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvnotes_interp.errors import UnsupportedError
from kvnotes_interp.registry import ModelShape

_HEADS = ("num_attention_heads", "num_key_value_heads", "head_dim")


def shape_of_config(config: Any) -> ModelShape:
    """Read the shape off a transformers config; parameters are counted on the meta device, without memory.

    Raises:
        UnsupportedError: layers whose heads differ in number or width, no attention heads at all, an encoder-decoder,
            or no causal language model of this kind; the message names the field and its value.
    """
    text = refuse_uneven(config)
    try:
        heads, width = _one(text, "num_attention_heads"), text.hidden_size
        inner = next((v for key in ("intermediate_size", "n_inner", "ffn_dim") if (v := _get(text, key))), 4 * width)
        return ModelShape(
            n_layers=text.num_hidden_layers,
            n_heads=heads,
            n_kv_heads=_one(text, "num_key_value_heads") or heads,
            d_head=_one(text, "head_dim") or width // heads,
            d_model=width,
            d_mlp=max(inner) if isinstance(inner, list | tuple) else inner,
            vocab=text.vocab_size,
            n_params=_parameters(text),
        )
    except (AttributeError, TypeError) as error:
        raise UnsupportedError(f"{type(text).__name__} does not tell the shape of its layers: {error}.") from error


def refuse_uneven(config: Any) -> Any:
    """The text config of a model whose layers all have the same heads.

    Raises UnsupportedError for any other, naming the field and its value.
    """
    name = type(config).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(f"{name} is an encoder-decoder; a decoder-only causal language model is needed.")
    try:
        text = config.get_text_config(decoder=True)
    except ValueError as error:
        raise UnsupportedError(
            f"{name} holds several text models, and which one is meant is not known: {error}"
        ) from error
    name = type(text).__name__
    for field, values in _per_layer(text):
        if len(set(values)) > 1:
            raise _uneven(name, field, values)
    if not _one(text, "num_attention_heads"):
        raise UnsupportedError(
            f"{name} has no num_attention_heads: without attention there are no keys and values per token."
        )
    return text


def refuse_uneven_fields(raw: Mapping[str, Any], name: str) -> None:
    """The same for a config.json as it is written, which transformers need not be able to read."""
    for fields in (raw, *(v for k, v in raw.items() if isinstance(v, dict) and ("text" in k or "llm" in k))):
        for field, values in _lists(fields):
            if len(set(values)) > 1:
                raise _uneven(f'"{name}"', field, values)


def refuse_quantised(config: Any, name: str, hf: Any = None) -> None:
    """Raise UnsupportedError if a config, or the model made from it, says that it is quantised."""
    found = getattr(config, "quantization_config", None) or getattr(config, "compression_config", None)
    if not found and not getattr(hf, "is_quantized", False):
        return
    method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
    method = getattr(method, "value", method) or "unknown"
    raise UnsupportedError(
        f'"{name}" is quantised ({method}), and caches of quantised models are not supported: their rounding differs '
        "between batch shapes, which breaks the controls. Load the model without quantization_config, for instance in "
        "bfloat16."
    )


def _get(config: Any, field: str) -> Any:
    """A field, or None where there is none or where it differs between layers."""
    try:
        return getattr(config, field, None)
    except Exception:  # transformers raises an error of its own for a field that differs between layers
        return None


def _one(config: Any, field: str) -> Any:
    """A field that is one number, also when it is written once per layer."""
    value = _get(config, field)
    if value is None and (layers := _layers(config)):
        value = [_get(layer, field) for layer in layers]
    return value[0] if isinstance(value, list | tuple) and value else value


def _layers(config: Any) -> list[Any]:
    """The configs of single layers, where a family has them."""
    if not getattr(config, "is_heterogeneous", False):
        return []
    return [config.per_layer_config[i] for i in range(config.num_hidden_layers)]


def _lists(fields: Mapping[str, Any]) -> Iterator[tuple[str, list[Any]]]:
    for field, value in fields.items():
        if isinstance(value, list | tuple) and ("_heads" in field or "head_dim" in field or field == "block_configs"):
            yield field, [v if isinstance(v, int) else str(v) for v in value]  # block_configs: an architecture search's


def _uneven(name: str, field: str, values: list[Any]) -> UnsupportedError:
    shown = str(values) if len(values) <= 8 else f"{str(values[:8])[:-1]}, ...]"
    return UnsupportedError(
        f"{name} has layers of different heads ({field} = {shown[:300]}). Only layers of one shape are supported: the "
        "numbers of such layers cannot stand in one table."
    )


def _per_layer(config: Any) -> Iterator[tuple[str, list[Any]]]:
    """What is given once per layer about heads: field and values."""
    yield from _lists(vars(config))
    for field in _HEADS:
        if layers := _layers(config):
            yield field, [_get(layer, field) for layer in layers]
    kinds = set(_get(config, "layer_types") or ())
    both = "full_attention" in kinds and len(kinds) > 1
    for field, wide in (("head_dim", "global_head_dim"), ("num_key_value_heads", "num_global_key_value_heads")):
        if both and (other := _get(config, wide)) and (usual := _get(config, field)):
            yield f"{field}, {wide}", [usual, other]


def _parameters(text: Any) -> int:
    import torch
    from transformers import AutoModel, AutoModelForCausalLM

    for kind in (AutoModelForCausalLM, AutoModel):
        try:
            with torch.device("meta"):
                return sum(p.numel() for p in kind.from_config(text).parameters())
        except ValueError as error:
            if "nrecognized configuration class" not in str(error):
                raise UnsupportedError(f"{type(text).__name__} cannot be built: {error}") from error
    raise UnsupportedError(f"{type(text).__name__}: transformers has no causal language model of this kind.")
