"""The grid in bf16 on a Llama-3.1-8B shape with random weights: speed depends on shapes, not on what was learnt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks import patch_sweep
from benchmarks.problem import random_ids
from benchmarks.report import Table
from kvnotes_interp.model import Model, wrap
from kvnotes_interp.registry import ALIASES, ModelShape, ModelSource

ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def missing(device: str) -> str:
    """Why this section cannot run here, or an empty string."""
    if not device.startswith("cuda"):
        return "it is for a CUDA device; run `python -m benchmarks --device cuda --sections cuda`."
    if not torch.cuda.is_available():
        return f"no CUDA device found by torch {torch.__version__}."
    return ""


def random_llama(shape: ModelShape, *, device: str, dtype: torch.dtype, name: str = "llama-3.1-8b, random") -> Model:
    """A Llama of this shape with random weights, made on the device itself."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.d_model,
        intermediate_size=shape.d_mlp,
        num_hidden_layers=shape.n_layers,
        num_attention_heads=shape.n_heads,
        num_key_value_heads=shape.n_kv_heads,
        head_dim=shape.d_head,
        max_position_embeddings=131072,
        rope_parameters=ROPE,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        with torch.device(device):
            hf = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return wrap(hf, None, ModelSource(name=name, kind="live"))


def run(
    *,
    device: str,
    tokens: Sequence[int] = (1024, 4096, 16384),
    keys: Sequence[str] = ("a", "d", "d2", "e"),
    effort: patch_sweep.Effort | None = None,
    shape: ModelShape | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[tuple[Table, ...], list[dict[str, Any]]]:
    """One table per prompt length."""
    model = random_llama(shape or ALIASES["llama-3.1-8b"].shape, device=device, dtype=dtype)
    effort = effort or patch_sweep.Effort(ours=16384, batched=256, slow=16)
    found = [patch_sweep.run(random_ids(model, n), keys=keys, effort=effort) for n in tokens]
    return tuple(table for table, _ in found), [raw for _, raw in found]
