"""A GGUF file, loaded so that every number it states is a number of the model that runs.

transformers reads a fixed list of keys and tensors per architecture and passes over the rest without a word: rotary
scaling, the frequency factors of Llama 3.1, soft caps, biases. Here the file is read once more by the `gguf` package.
Each key of the architecture is set on the config, verified against the model, known to decide no number, or refused
with its name and value; each tensor must be used, and each parameter must come from the file.

Rotary scaling follows llama.cpp: `factor` without a type is linear; YaRN multiplies cos and sin by
`attn_factor * (0.1 ln factor + 1)`; `rope_freqs.weight` divides the frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvnotes_interp import declared, gguf_keys
from kvnotes_interp.errors import InputError, UnsupportedError

ROPE_FREQS = "rope_freqs.weight"


@dataclass(frozen=True)
class Header:
    """What a GGUF file states: `fields` are its keys and values, `tensors` the name and shape (torch order) of each."""

    path: Path
    arch: str
    fields: Mapping[str, Any]
    tensors: Mapping[str, tuple[int, ...]]
    rope_freqs: tuple[float, ...] = ()

    def own(self) -> dict[str, Any]:
        """The keys of the architecture, without its name in front."""
        start = self.arch + "."
        return {k.removeprefix(start): v for k, v in self.fields.items() if k.startswith(start)}


def read_header(path: Path) -> Header:
    """Read keys and tensor names of a GGUF file.

    Raises:
        InputError: not a GGUF file, or one without an architecture.
        UnsupportedError: a file that is not one whole model (an adapter, or one part of a split model).
    """
    import gguf

    try:
        reader = gguf.GGUFReader(path)
        fields = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("tokenizer.")}
        factors = next((t for t in reader.tensors if t.name == ROPE_FREQS), None)
        freqs = () if factors is None else tuple(float(f) for f in factors.data.flatten())
        shapes = {t.name: tuple(int(n) for n in reversed(t.shape.tolist())) for t in reader.tensors}
    except (OSError, ValueError, KeyError, IndexError, OverflowError, UnicodeDecodeError) as error:
        raise InputError(f"Could not read {path} as a GGUF model: {error}") from error
    arch = fields.get("general.architecture")
    if not isinstance(arch, str):
        raise InputError(f"Could not read {path} as a GGUF model: it has no general.architecture.")
    header = Header(path, arch, fields, shapes, freqs)
    if (kind := fields.get("general.type", "model")) != "model":
        raise UnsupportedError(
            f"{path.name} has general.type = {kind!r}, which is no whole model: merge it into its base model, and give "
            "the file of that."
        )
    if (parts := fields.get("split.count", 0)) > 1:
        raise UnsupportedError(
            f"{path.name} is part {fields.get('split.no', 0) + 1} of split.count = {parts}, and only one file is read: "
            "join them with `llama-gguf-split --merge`, and give the joined file."
        )
    return header


def config_of(header: Header) -> Any:
    """The transformers config of this file, with what transformers drops set from the file.

    Raises:
        InputError: transformers knows no such architecture.
        UnsupportedError: a key that decides numbers and cannot be set, with its value.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    path = header.path
    gguf_keys.refuse_unknown(header.own(), header)
    try:
        config: Any = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    except (OSError, ValueError, KeyError, TypeError, NotImplementedError, StrictDataclassError) as error:
        raise InputError(f"Could not read {path} as a GGUF model: {error}") from error
    if "output.weight" in header.tensors:
        config.tie_word_embeddings = False
    gguf_keys.settle(header.own(), config, header)
    _set_biases(header, config)
    if hasattr(config, "rope_parameters"):
        config.rope_parameters = rope_parameters(header, config)
    elif header.rope_freqs:
        raise UnsupportedError(f"{path.name} holds {ROPE_FREQS}, and {type(config).__name__} has no rotary positions.")
    return config


def load(path: Path, load: dict[str, Any], *, tokenizer: bool = True) -> tuple[Any, Any]:
    """The dense model in a GGUF file, frozen, and its tokenizer (None unless asked for).

    `load` holds the keyword arguments for `from_pretrained`.

    Raises:
        InputError: no file that transformers reads as a model.
        UnsupportedError: a key or tensor of the file that the model does not honour, or a weight that it lacks.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from kvnotes_interp.sources import quiet_bars

    header = read_header(path)
    config = config_of(header)
    require_tensors(header, config)
    try:
        with quiet_bars():
            read: Any = AutoModelForCausalLM.from_pretrained(
                path.parent, gguf_file=path.name, config=config, output_loading_info=True, **load
            )
            hf, info = read
            own = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name) if tokenizer else None
    except (OSError, ValueError, KeyError, NotImplementedError, RuntimeError, AttributeError) as error:
        raise InputError(f"Could not read {path} as a GGUF model: {error}") from error
    # The weights are plain tensors now, but save_pretrained() refuses while these are set.
    hf.hf_quantizer = None
    hf.is_quantized = False
    hf.__dict__.pop("quantization_method", None)
    if hasattr(hf.config, "quantization_config"):
        del hf.config.quantization_config
    missing = sorted(info["missing_keys"])
    if missing:
        raise UnsupportedError(
            f"{path.name} holds no tensor for {_some(missing)} of {type(hf).__name__}: these weights would be random."
        )
    _set_frequencies(hf, header)
    gguf_keys.verify(header.own(), hf, header)
    _verify_angles(hf, header)
    return hf.eval().requires_grad_(False), own


def rope_parameters(header: Header, config: Any) -> dict[str, Any]:
    """The rotary parameters that a file declares, in transformers' words, nested by layer type where the config is.

    Raises UnsupportedError for a kind of scaling that is not known here, naming key and value.
    """
    keys, arch = header.own(), header.arch
    given = dict(declared.declared(config))
    theta = float(keys.get("rope.freq_base", 10_000.0))
    flat: dict[str, Any] = {"rope_type": "default", "rope_theta": theta, **_scaling(keys, arch)}
    if header.rope_freqs:
        flat[declared.FACTORS] = list(header.rope_freqs)
    width = declared.head_width(config)
    dims = keys.get("rope.dimension_count", width)
    if set(given) <= {None}:
        old = given.get(None, {})
        if dims != width or "partial_rotary_factor" in old:
            flat["partial_rotary_factor"] = dims / width
        return flat
    if header.rope_freqs:
        raise UnsupportedError(
            f"{header.path.name} holds {ROPE_FREQS}, and {type(config).__name__} turns each kind of layer by angles of "
            "its own: which layers it is meant for is not known here."
        )
    local = {"rope_type": "default", "rope_theta": float(keys.get("rope.freq_base_swa", 10_000.0))}
    return {str(kind): dict(local if "sliding" in str(kind) else flat) for kind in given}


def require_tensors(header: Header, config: Any) -> None:
    """Raise UnsupportedError, naming them, for tensors of the file that the model of this config has no place for."""
    from transformers import AutoModelForCausalLM, modeling_gguf_pytorch_utils

    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    processors: Any = modeling_gguf_pytorch_utils.TENSOR_PROCESSORS
    kind = processors.get(header.arch, modeling_gguf_pytorch_utils.TensorProcessor)
    try:
        places = modeling_gguf_pytorch_utils.get_gguf_hf_weights_map(empty, kind(config=config.to_dict()))
    except NotImplementedError as error:
        raise InputError(f"Could not read {header.path} as a GGUF model: {error}") from error
    known = set(places) | {ROPE_FREQS} | ({"output.weight"} if header.arch == "gpt2" else set())
    unused = [name for name in header.tensors if name not in known and name.removesuffix(".weight") not in known]
    if unused:
        raise UnsupportedError(
            f"{header.path.name} holds {_some(unused)}, which {type(empty).__name__} has no place for, so the model "
            "that runs would not be the one in the file. Convert it to safetensors with its own tools, and give that "
            "folder."
        )
    state = empty.state_dict()
    for name, shape in header.tensors.items():
        place = state.get(places.get(name, ""))
        if place is not None and place.numel() != math.prod(shape):
            raise UnsupportedError(
                f"{name} of {header.path.name} has shape {list(shape)}, and {places[name]} of {type(empty).__name__} "
                f"has {list(place.shape)}."
            )


# --- in parts ------------------------------------------------------------------------------------------------------


def _scaling(keys: Mapping[str, Any], arch: str) -> dict[str, Any]:
    """rope_type and its numbers, from `rope.scaling.*` and the older `rope.scale_linear`."""

    def refuse(key: str, why: str) -> UnsupportedError:
        return UnsupportedError(f"{arch}.{key} = {keys[key]!r}: {why}.")

    start = "rope.scaling."
    factor = float(keys.get(f"{start}factor") or keys.get("rope.scale_linear") or 1.0)
    kind = keys.get(f"{start}type", "linear")
    if kind not in ("none", "linear", "yarn"):
        raise refuse(f"{start}type", "this rotary scaling is not honoured when a GGUF file is loaded")
    more = float(keys.get(f"{start}attn_factor", 1.0))
    if kind != "yarn":
        if more != 1.0:
            raise refuse(f"{start}attn_factor", "an attention factor without yarn is not honoured")
        return {} if kind == "none" or factor == 1.0 else {"rope_type": "linear", "factor": factor}
    usual = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    for key, plain in {"yarn_ext_factor": (1.0, -1.0), "yarn_log_multiplier": (0.0,)}.items():
        if keys.get(start + key, plain[0]) not in plain:
            raise refuse(start + key, f"only {plain[0]} is honoured")
    own = keys.get(f"{start}yarn_attn_factor", 1.0)
    if not any(math.isclose(own, v, rel_tol=1e-5) for v in (1.0, usual)):
        raise refuse(
            f"{start}yarn_attn_factor", f"only 1.0 and {usual:.6g}, which follows from the factor, are honoured"
        )
    original = keys.get(f"{start}original_context_length") or keys.get("context_length")
    if original is None:
        raise UnsupportedError(f"{arch}.{start}type = 'yarn' without {arch}.{start}original_context_length.")
    out: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": int(original),
        "attention_factor": usual * more,
    }
    for key in ("beta_fast", "beta_slow"):
        if (value := keys.get(f"{start}yarn_{key}")) is not None:
            out[key] = float(value)
    return out


def _set_biases(header: Header, config: Any) -> None:
    """Families with a switch for biases have it set by what the file holds; the loader leaves it at its default."""
    names = header.tensors
    for key, parts in {"attention_bias": ("attn_q", "attn_output"), "mlp_bias": ("ffn_up", "ffn_down")}.items():
        if isinstance(getattr(config, key, None), bool):
            setattr(config, key, any(f"blk.0.{part}.bias" in names for part in parts))


@torch.no_grad()
def _set_frequencies(hf: Any, header: Header) -> None:
    """Divide the live frequencies by the factors of the file; transformers knows no such field."""
    if not header.rope_freqs:
        return
    from kvnotes_interp import compat

    for module in compat.rotary_modules(hf):
        factors = torch.tensor(header.rope_freqs, dtype=torch.float64)
        for name, buffer in module.named_buffers(recurse=False):
            if not name.endswith("inv_freq"):
                continue
            if buffer.numel() != len(factors):
                raise UnsupportedError(
                    f"{ROPE_FREQS} of {header.path.name} holds {len(factors)} factors, and a head of "
                    f"{type(hf).__name__} turns {buffer.numel()} pairs."
                )
            buffer.copy_((buffer.double().cpu() / factors).to(buffer))


def _verify_angles(hf: Any, header: Header) -> None:
    """The live angles must be those of the file's own numbers, whatever the config was made of."""
    from kvnotes_interp import compat

    config = compat.text_config(hf)
    if not compat.rotary_modules(hf):
        return
    want = rope_parameters(header, config)
    value, about = declared.gap(hf, declared.declared(_Holder(want)))
    if not value <= declared.LIMIT:
        raise UnsupportedError(
            f"{header.path.name}: the rotary angles of {type(hf).__name__} are not those in the file: {about}."
        )


@dataclass(frozen=True)
class _Holder:
    rope_parameters: dict[str, Any]


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
