"""Writers with something in them, and what they must compile, by plain transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvnotes_interp.model import Model
from kvnotes_interp.operators import Writer, new_writer
from tests.reference import KV


def stirred(model: Model, kind: Any, *, seed: int = 0, size: float = 0.1, **options: Any) -> Writer:
    """A Writer whose every trained number was moved: as far from new as training would take it."""
    writer = new_writer(model, kind, seed=seed, **options)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in writer.parameters().values():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))
    return writer


@torch.no_grad()
def merged(hf: PreTrainedModel, writer: Writer) -> PreTrainedModel:
    """`hf` with the adapter added to its own weights, by hand: W + alpha/rank B A. Changes `hf`."""
    scale = writer.settings.get("alpha", 0) / writer.settings.get("rank", 1)
    found, modules = writer.parameters(), dict(hf.named_modules())
    for name, b in found.items():
        if ".lora_B." in name:
            path = name.removeprefix("base_model.model.").partition(".lora_B.")[0]
            modules[path].weight += scale * b @ found[name.replace(".lora_B.", ".lora_A.")]
    return hf


@torch.no_grad()
def wrapped_cache(hf: PreTrainedModel, writer: Writer, tokens: list[int] | tuple[int, ...], start: int) -> list[KV]:
    """Keys and values of one document between header and trailer, in one plain forward at `start`, ..."""
    rows: list[Tensor] = [hf.get_input_embeddings()(torch.tensor(tokens))]
    if writer.header is not None and writer.trailer is not None:
        rows = [writer.header.to(rows[0].dtype), *rows, writer.trailer.to(rows[0].dtype)]
    embedded, cache = torch.cat(rows)[None], DynamicCache()
    at = torch.arange(start, start + embedded.shape[1])[None]
    hf(inputs_embeds=embedded, position_ids=at, past_key_values=cache, use_cache=True)
    return [(layer.keys, layer.values) for layer in cache.layers]
