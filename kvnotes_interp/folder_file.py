"""A folder of safetensors with its config.json, loaded so that the model in it is the model that runs.

transformers draws a weight that the files lack at random, passes over one that it has no place for, loads an adapter
that happens to lie beside the weights, and ignores rotary fields that it does not know. Each of these is refused here
by name. What is stored is also compared with what was loaded, by a few numbers of each tensor.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from kvnotes_interp import declared, files, shapes, weights
from kvnotes_interp.errors import InputError, UnsupportedError

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16")  # as safetensors spells them
# Fields of a config.json that decide numbers; a class that has no such field would leave them out.
_DECISIVE = (
    *("logit_scale", "logits_scaling", "final_logit_softcapping", "attn_logit_softcapping", "embedding_multiplier"),
    *("residual_multiplier", "attention_multiplier", "query_pre_attn_scalar", "sliding_window", "scale_emb"),
    *("scale_depth", "dim_model_base", "attention_scale", "clip_qkv", "alibi", "use_alibi", "attn_scale"),
    *("softmax_scale", "embedding_scale", "emb_scale", "logits_scale", "mup_scale", "rms_eps", "layer_norm_eps"),
    *("activation_function", "qk_norm", "use_qk_norm", "qk_layernorm", "use_parallel_residual", "parallel_attn"),
    "use_sliding_window",
)
# Rotary fields that transformers moves into rope_parameters; the live angles are compared with them.
_THETAS, _PARTS = ("rope_theta", "rotary_emb_base"), ("partial_rotary_factor", "rotary_pct", "rope_pct")
_ROTARY_ELSEWHERE = (*_THETAS, *_PARTS, "rope_scaling", "rope_parameters", "rope_local_base_freq")
_MASKS = ("attention.bias", "attn.bias", "masked_bias", "position_ids")


def load(folder: Path, name: str, load: dict[str, Any], *, tokenizer: bool) -> tuple[Any, Any]:
    """The model in a folder, frozen, and its tokenizer (None unless asked for).

    `load` holds the keyword arguments for `from_pretrained`.

    Raises:
        InputError: no folder that transformers reads as a causal language model.
        UnsupportedError: quantised weights, an adapter, or anything in the files that the loaded model does not honour.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from kvnotes_interp.sources import quiet_bars

    refuse_adapter(folder, name)
    raw = read_config(folder)
    stored = _stored(folder, name, raw)
    _refuse_packed(stored, name)
    trust = {"trust_remote_code": load["trust_remote_code"]}
    config = config_of(folder, name, **trust)
    shapes.refuse_quantised(config, name)
    _refuse_fields(raw, config, name)
    try:
        own = AutoTokenizer.from_pretrained(folder, **trust) if tokenizer else None
        with quiet_bars():
            read: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **load,
            )
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise InputError(f'Could not load "{name}" from {folder}: {error}') from error
    hf, info = read
    _refuse_loose(hf, info, name, folder)
    _refuse_other_code(raw, hf, name)
    _compare(hf, stored, name)
    _compare_rotary(hf, raw, name)
    return hf.eval().requires_grad_(False), own


def config_of(folder: Path, name: str, **trust: Any) -> Any:
    """The config of a folder whose layers all have the same heads.

    Raises:
        InputError: config.json is not one that transformers reads.
        UnsupportedError: layers with heads of their own, naming field and values.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    shapes.refuse_uneven_fields(read_config(folder), name)
    try:
        config = AutoConfig.from_pretrained(folder, **trust)
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
        raise InputError(f'Could not load "{name}" from {folder}: {error}') from error
    shapes.refuse_uneven(config)
    return config


def refuse_adapter(folder: Path, name: str) -> None:
    """Raise UnsupportedError if the folder holds an adapter, which transformers loads along without being asked."""
    if (folder / "adapter_config.json").is_file():
        raise UnsupportedError(
            f'"{name}" holds an adapter (adapter_config.json in {folder}). It is not loaded by the way: merge it into '
            "its base model (`merge_and_unload()`) and save that, or load both yourself and pass the live model."
        )


def read_config(folder: Path) -> dict[str, Any]:
    """config.json as it is written. Raises InputError if it is not a mapping in JSON."""
    return files.read_json(folder / "config.json", "model config", of=dict)


# --- before loading ------------------------------------------------------------------------------------------------


def _stored(folder: Path, name: str, raw: Mapping[str, Any]) -> dict[str, tuple[Path, str, tuple[int, ...]]]:
    """Name -> file, dtype and shape of each stored tensor, of the files that transformers reads."""
    from safetensors import SafetensorError, safe_open

    single, index = folder / _SINGLE, folder / _INDEX
    mapped: dict[str, str] = {}
    if isinstance(other := raw.get("transformers_weights"), str):
        shards = [folder / other]
    elif index.is_file():
        about = files.read_json(index, "weight index", of=dict)
        mapped = files.entry(about, "weight_map", dict, f"weight index {index}", "Save or download the model again.")
        shards = [folder / file for file in sorted(set(mapped.values()))]
        if single.is_file() and single not in shards:
            raise UnsupportedError(
                f'"{name}" holds both {_SINGLE} and {_INDEX}, which names other files: which of them is the model '
                "cannot be told. Remove one of the two."
            )
        absent = [file.name for file in shards if not file.is_file()]
        if absent:
            raise InputError(f'"{name}" lacks {", ".join(absent)}, which {_INDEX} names: copy or download it again.')
    else:
        shards = [single] if single.is_file() else []
    found: dict[str, tuple[Path, str, tuple[int, ...]]] = {}
    for file in shards:
        try:
            with safe_open(file, "pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118 - no mapping
                    part = tensors.get_slice(key)
                    found[key] = (file, part.get_dtype(), tuple(part.get_shape()))
        except (SafetensorError, OSError) as error:
            raise InputError(f'Could not load "{name}": {file} is no whole safetensors file ({error}).') from error
    if lost := [key for key in mapped if key not in found]:
        raise InputError(f'"{name}": {_INDEX} names {_some(lost)}, and no file holds it.')
    return found


def _refuse_packed(stored: Mapping[str, tuple[Path, str, tuple[int, ...]]], name: str) -> None:
    for key, (file, dtype, shape) in stored.items():
        if dtype not in (*_FLOATS, "BOOL", "I64") and len(shape) >= 2 and not key.endswith(_MASKS):
            raise UnsupportedError(
                f'"{name}" is quantised: {key} in {file.name} holds {dtype} numbers, no weights by themselves. '
                + weights.ADVICE
            )


def _fields(config: Any) -> set[str]:
    """What a config class has a field for."""
    known = set(getattr(type(config), "__dataclass_fields__", {})) | set(getattr(type(config), "attribute_map", {}))
    known |= set(inspect.signature(type(config).__init__).parameters)  # classes that come with a model
    return known | {n for n in dir(type(config)) if not n.startswith("_")}


def _refuse_fields(raw: Mapping[str, Any], config: Any, name: str) -> None:
    """Fields of config.json that the config class does not know and that decide numbers."""
    text = config.get_text_config(decoder=True)
    nested = next((v for k, v in raw.items() if k in ("text_config", "llm_config") and isinstance(v, dict)), None)
    known = _fields(text) | _fields(config)
    for key, value in (raw if nested is None else nested).items():
        rotary = ("rope" in key or "rotary" in key) and key not in _ROTARY_ELSEWHERE
        if (rotary or key in _DECISIVE) and key not in known and value not in (None, False, 1.0):
            raise UnsupportedError(
                f'"{name}": config.json says {key} = {value!r}, and {type(text).__name__} has no such field, so the '
                "model that runs would not be the one described. Remove the field if it means nothing."
            )
    for parameters in declared.declared(text).values():
        kind = parameters.get("rope_type", "default")
        given = {k for k, v in parameters.items() if v is not None}
        extra = sorted(given - declared.KNOWN.get(kind, given))
        if kind not in declared.KNOWN or extra:
            what = f"rope_type = {kind!r}" if kind not in declared.KNOWN else f"{extra[0]} = {parameters[extra[0]]!r}"
            raise UnsupportedError(
                f'"{name}": config.json says {what} about its rotary positions, which is not honoured at load.'
            )


# --- after loading -------------------------------------------------------------------------------------------------


def _refuse_loose(hf: Any, info: Mapping[str, Any], name: str, folder: Path) -> None:
    kind = type(hf).__name__
    if odd := sorted(str(m[0] if isinstance(m, tuple) else m) for m in info["mismatched_keys"]):
        raise UnsupportedError(f'"{name}": {_some(odd)} has another shape in the files than in {kind}.')
    if missing := sorted(info["missing_keys"]):
        raise UnsupportedError(
            f'"{name}": the files in {folder} hold no {_some(missing)}, which {kind} needs: they would be random.'
        )
    if extra := sorted(info["unexpected_keys"]):
        raise UnsupportedError(
            f'"{name}": the files in {folder} hold {_some(extra)}, which {kind} has no place for, so the model that '
            "runs would not be the one in the files."
        )


def _refuse_other_code(raw: Mapping[str, Any], hf: Any, name: str) -> None:
    wanted = (raw.get("architectures") or [None])[0]
    if "auto_map" in raw and wanted is not None and wanted != type(hf).__name__:
        raise UnsupportedError(
            f'"{name}" comes with code of its own (auto_map) for {wanted}, and transformers\' {type(hf).__name__} was '
            "loaded in its place. Give trust_remote_code=True to run that code, if you trust it."
        )


def _compare(hf: Any, stored: Mapping[str, tuple[Path, str, tuple[int, ...]]], name: str) -> None:
    """Each stored tensor against the live one of its name: the first and last row, cast to the live dtype."""
    from kvnotes_interp import compat

    head, embedding = hf.get_output_embeddings(), hf.get_input_embeddings()
    state = dict(hf.named_parameters(remove_duplicate=False)) | dict(hf.named_buffers(remove_duplicate=False))
    tied = bool(getattr(compat.text_config(hf), "tie_word_embeddings", False))
    if tied and head is not None and not _same(head.weight, embedding.weight):
        raise UnsupportedError(
            f'"{name}": config.json says tie_word_embeddings = true, and the files hold an output matrix that differs '
            "from the embedding. Set tie_word_embeddings to false if that matrix is meant."
        )
    for key, rows in _rows(stored):
        if key.endswith("inv_freq"):
            _same_frequencies(hf, key, rows, name)
            continue
        live = state.get(key)
        if live is None or live.device.type == "meta":
            continue  # stored under an older name, or not in memory
        for at, row in rows:
            here = (live.detach() if live.ndim == 0 else live.detach()[at]).cpu()
            if here.shape != row.shape or not torch.equal(here, row.to(here.dtype)):
                raise UnsupportedError(
                    f'"{name}": {key} of the loaded {type(hf).__name__} is not what the files hold (row {at} differs).'
                )


def _same(a: Any, b: Any) -> bool:
    if a is b or "meta" in (a.device.type, b.device.type):
        return True
    return a.shape == b.shape and bool(torch.equal(a.detach().cpu(), b.detach().cpu()))


def _rows(stored: Mapping[str, tuple[Path, str, tuple[int, ...]]]) -> Iterator[tuple[str, list[tuple[int, Any]]]]:
    from safetensors import safe_open

    for file in sorted({file for file, _, _ in stored.values()}):
        with safe_open(file, "pt") as tensors:
            for key, (where, _, shape) in stored.items():
                if where != file:
                    continue
                if key.endswith("inv_freq") or not shape:
                    yield key, [(0, tensors.get_tensor(key))]
                    continue
                part = tensors.get_slice(key)
                yield key, [(at % shape[0], part[at % shape[0]]) for at in (0, -1) if shape[0]]


def _same_frequencies(hf: Any, key: str, rows: list[tuple[int, Any]], name: str) -> None:
    from kvnotes_interp import compat

    stored = rows[0][1].double()
    live = [b.double().cpu() for m in compat.rotary_modules(hf) for n, b in m.named_buffers() if n.endswith("inv_freq")]
    # Older files hold them in half precision, which is no other model.
    if not any(b.shape == stored.shape and torch.allclose(b, stored, rtol=5e-3, atol=1e-6) for b in live):
        raise UnsupportedError(
            f'"{name}": the files hold {key} = {stored.tolist()[:4]} ..., and {type(hf).__name__} turns its keys by '
            "other frequencies."
        )


def _compare_rotary(hf: Any, raw: Mapping[str, Any], name: str) -> None:
    """The live angles against those that config.json declares, read here and not by transformers."""
    from kvnotes_interp import compat

    text = compat.text_config(hf)
    live = declared.declared(text)
    if not compat.rotary_modules(hf) or not live:
        return
    own = next((v for k, v in raw.items() if k in ("text_config", "llm_config") and isinstance(v, dict)), raw)
    sets: dict[str | None, Mapping[str, Any]] = dict(live)
    given = own.get("rope_parameters") or own.get("rope_scaling") or {}
    if set(live) == {None} and not any(isinstance(v, dict) for v in given.values()):
        usual = ("rope_theta", "partial_rotary_factor")
        flat = dict(live[None])
        for name_here, names in zip(usual, (_THETAS, _PARTS), strict=True):
            flat[name_here] = next((own[k] for k in names if own.get(k) is not None), flat.get(name_here))
        for name_here, names in zip(usual, (_THETAS, _PARTS), strict=True):
            beside = {k: own[k] for k in names if own.get(k) is not None}
            clash = [k for k, v in beside.items() if given.get(name_here) not in (None, v)]
            if clash:
                raise UnsupportedError(
                    f'"{name}": config.json says {clash[0]} = {beside[clash[0]]} and, of its rotary parameters, '
                    f"{name_here} = {given[name_here]}. Remove the one that is not meant."
                )
        if given:
            flat = {k: v for k, v in flat.items() if k in usual} | given
            flat.setdefault("original_max_position_embeddings", own.get("original_max_position_embeddings"))
        sets = {None: flat}
    try:
        value, about = declared.gap(hf, sets)
    except UnsupportedError:
        return  # a kind that is not worked out here; `Model.check()` says so
    if not (math.isfinite(value) and value <= declared.LIMIT):
        raise UnsupportedError(
            f'"{name}": the rotary angles of the loaded model are not those of config.json: {about}.'
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
