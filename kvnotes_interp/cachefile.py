"""A KVCache on disk: one safetensors file with its geometry and the model that wrote it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvnotes_interp.errors import InputError
from kvnotes_interp.files import replacing
from kvnotes_interp.rope import LayerRope, RopeGeometry

if TYPE_CHECKING:
    from kvnotes_interp.cache import KVCache

FORMAT = "kvcache/1"


def write(cache: KVCache, path: Path) -> Path:
    """Write `cache` atomically; returns the path."""
    tensors: dict[str, Tensor] = {"token_ids": cache.token_ids, "positions": cache.positions}
    for index in range(cache.n_layers):
        tensors[f"keys.{index}"] = cache.keys[index]
        tensors[f"values.{index}"] = cache.values[index]
        if (inv_freq := cache.rope.layers[index].inv_freq) is not None:
            tensors[f"inv_freq.{index}"] = inv_freq
        if cache.bias is not None and (bias := cache.bias[index]) is not None:
            tensors[f"bias.{index}"] = bias
    about = {
        "format": FORMAT,
        "n_layers": cache.n_layers,
        "interleaved": [layer.interleaved for layer in cache.rope.layers],
        "model_id": cache.model_id,
        "end": cache.end,
    }
    # Each tensor owns its memory: safetensors refuses shared storage, and slices of one cache share theirs.
    own = {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    with replacing(path) as temporary:
        save_file(own, temporary, metadata={"kvnotes": json.dumps(about)})
    return path


def read(path: Path, *, device: torch.device | str = "cpu") -> KVCache:
    """Read what `write` wrote. Raises InputError for anything else."""
    from kvnotes_interp.cache import KVCache

    if not path.is_file():
        raise InputError(f"no cache file at {path}.")
    try:
        with safe_open(path, "pt", device=str(device)) as file:
            about = json.loads((file.metadata() or {}).get("kvnotes", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise InputError(f"{path} is not a safetensors file: {error}") from error
    if about.get("format") != FORMAT:
        raise InputError(f"{path} holds no KV cache of format {FORMAT!r} (found {about.get('format')!r}).")
    indices = range(about["n_layers"])
    freqs = [tensors.get(f"inv_freq.{i}") for i in indices]
    bias = tuple(tensors.get(f"bias.{i}") for i in indices)
    layers = tuple(
        LayerRope(None if f is None else f.cpu(), turned) for f, turned in zip(freqs, about["interleaved"], strict=True)
    )
    return KVCache(
        keys=tuple(tensors[f"keys.{i}"] for i in indices),
        values=tuple(tensors[f"values.{i}"] for i in indices),
        token_ids=tensors["token_ids"],
        positions=tensors["positions"].cpu(),
        rope=RopeGeometry(layers),
        model_id=about["model_id"],
        bias=bias if any(b is not None for b in bias) else None,
        end=about["end"],
    )
