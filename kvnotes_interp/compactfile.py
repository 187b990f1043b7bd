"""A CompactCache on disk: one safetensors file with its geometry and the model that wrote it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from kvnotes_interp import cachefile
from kvnotes_interp.compact import CompactCache
from kvnotes_interp.files import faults_of

FORMAT = "compactcache/1"


def write(cache: CompactCache, path: Path) -> Path:
    """Write `cache` atomically; returns the path."""
    tensors: dict[str, Tensor] = {}
    for index in range(cache.n_layers):
        tensors[f"keys.{index}"] = cache.keys[index]
        tensors[f"values.{index}"] = cache.values[index]
        tensors[f"positions.{index}"] = cache.positions[index]
        tensors[f"sources.{index}"] = cache.sources[index]
        if cache.bias is not None and (bias := cache.bias[index]) is not None:
            tensors[f"bias.{index}"] = bias
    return cachefile.save(path, FORMAT, tensors, cache.rope, model_id=cache.model_id, end=cache.end)


def read(path: Path, *, device: torch.device | str = "cpu") -> CompactCache:
    """Read what `write` wrote. Raises InputError for anything else."""
    about, tensors, rope = cachefile.load(path, FORMAT, device=device)
    indices = range(len(rope.layers))
    bias = tuple(tensors.get(f"bias.{i}") for i in indices)
    with faults_of(str(path), cachefile.AGAIN):
        return CompactCache(
            keys=tuple(tensors[f"keys.{i}"] for i in indices),
            values=tuple(tensors[f"values.{i}"] for i in indices),
            positions=tuple(tensors[f"positions.{i}"].cpu() for i in indices),
            sources=tuple(tensors[f"sources.{i}"].cpu() for i in indices),
            rope=rope,
            model_id=about["model_id"],
            end=about["end"],
            bias=bias if any(b is not None for b in bias) else None,
        )
