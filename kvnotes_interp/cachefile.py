"""A KVCache on disk: one safetensors file with its geometry and the model that wrote it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvnotes_interp.errors import InputError
from kvnotes_interp.files import entry, faults_of, parse_json, replacing
from kvnotes_interp.rope import LayerRope, RopeGeometry

if TYPE_CHECKING:
    from kvnotes_interp.cache import KVCache

FORMAT = "kvcache/1"
AGAIN = "Write the cache again."


def write(cache: KVCache, path: Path) -> Path:
    """Write `cache` atomically; returns the path."""
    tensors: dict[str, Tensor] = {"token_ids": cache.token_ids, "positions": cache.positions}
    for index in range(cache.n_layers):
        tensors[f"keys.{index}"] = cache.keys[index]
        tensors[f"values.{index}"] = cache.values[index]
        if cache.bias is not None and (bias := cache.bias[index]) is not None:
            tensors[f"bias.{index}"] = bias
    return save(path, FORMAT, tensors, cache.rope, model_id=cache.model_id, end=cache.end)


def read(path: Path, *, device: torch.device | str = "cpu") -> KVCache:
    """Read what `write` wrote. Raises InputError for anything else."""
    from kvnotes_interp.cache import KVCache

    about, tensors, rope = load(path, FORMAT, device=device)
    indices = range(len(rope.layers))
    bias = tuple(tensors.get(f"bias.{i}") for i in indices)
    with faults_of(str(path), AGAIN):
        for name in ("token_ids", "positions"):
            if tensors[name].dtype.is_floating_point:
                raise TypeError(f"{name} holds {tensors[name].dtype}, not whole numbers")
        return KVCache(
            keys=tuple(tensors[f"keys.{i}"] for i in indices),
            values=tuple(tensors[f"values.{i}"] for i in indices),
            token_ids=tensors["token_ids"],
            positions=tensors["positions"].cpu(),
            rope=rope,
            model_id=about["model_id"],
            bias=bias if any(b is not None for b in bias) else None,
            end=about["end"],
        )


def save(path: Path, kind: str, tensors: dict[str, Tensor], rope: RopeGeometry, *, model_id: str, end: int) -> Path:
    """Write the tensors of a cache of format `kind` and what goes with them, atomically; returns the path."""
    freqs = {f"inv_freq.{i}": f for i, layer in enumerate(rope.layers) if (f := layer.inv_freq) is not None}
    about = {
        "format": kind,
        "n_layers": len(rope.layers),
        "interleaved": [layer.interleaved for layer in rope.layers],
        "model_id": model_id,
        "end": end,
    }
    # Each tensor owns its memory: safetensors refuses shared storage, and slices of one cache share theirs.
    own = {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in (tensors | freqs).items()}
    with replacing(path) as temporary:
        save_file(own, temporary, metadata={"kvnotes": json.dumps(about)})
    return path


def load(
    path: Path, kind: str, *, device: torch.device | str
) -> tuple[dict[str, Any], dict[str, Tensor], RopeGeometry]:
    """(what was said of it, its tensors, the rotary geometry) of a cache file. Raises InputError for another format."""
    if not path.is_file():
        raise InputError(f"no cache file at {path}.")
    try:
        with safe_open(path, "pt", device=str(device)) as file:
            about = parse_json((file.metadata() or {}).get("kvnotes", "{}"), f"the description in {path}", of=dict)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise InputError(f"{path} is not a safetensors file: {error}") from error
    if about.get("format") != kind:
        raise InputError(f"{path} holds no KV cache of format {kind!r} (found {about.get('format')!r}).")
    for name, of in (("n_layers", int), ("interleaved", list), ("model_id", str), ("end", int)):
        entry(about, name, of, f"the description in {path}", AGAIN)
    if len(about["interleaved"]) != about["n_layers"]:
        raise InputError(f"{path}: {about['n_layers']} layers, interleaved has {len(about['interleaved'])}. {AGAIN}")
    layers = tuple(
        LayerRope(None if (f := tensors.get(f"inv_freq.{i}")) is None else f.cpu(), bool(turned))
        for i, turned in enumerate(about["interleaved"])
    )
    return about, tensors, RopeGeometry(layers)
