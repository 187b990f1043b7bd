"""A tiny random model that reads biographies, a few questions, and a small method of its own for the loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from kvnotes_interp import operators
from kvnotes_interp.cache import KVCache
from kvnotes_interp.model import Model
from kvnotes_interp.tasks.documents.question import Question
from kvnotes_interp.training import Example, draw
from tests.tiny import tiny_with_tokenizer
from tests.tiny_tokenizer import train as train_tokenizer


class Offsets:
    """A number per layer, head and dimension is added to all keys and values of the bare join, with noise if asked."""

    name = "offsets"

    def __init__(self, model: Model, *, noise: float = 0.0) -> None:
        self.model, self.noise, self.calls = model, noise, 0
        layers, heads, d_head = model.shape.n_layers, model.shape.n_kv_heads, model.shape.d_head
        self.keys = nn.Parameter(torch.zeros(layers, heads, 1, d_head, dtype=model.dtype))
        self.values = nn.Parameter(torch.zeros(layers, heads, 1, d_head, dtype=model.dtype))
        self.idle = nn.Parameter(torch.ones(2))  # never gets a gradient
        self.joined: dict[str, KVCache] = {}

    def describe(self) -> dict[str, Any]:
        return {"noise": self.noise}

    def parameters(self) -> dict[str, nn.Parameter]:
        return {"keys": self.keys, "values": self.values, "idle": self.idle}

    def caches(self, examples: Sequence[Example]) -> list[KVCache]:
        self.calls += 1
        for example in examples:
            if example.key not in self.joined:
                self.joined[example.key] = operators.no_recompute(self.model, example.blocks).cache
        return [self._moved(self.joined[example.key]) for example in examples]

    def _moved(self, cache: KVCache) -> KVCache:
        jitter = 1 + self.noise * torch.randn((), dtype=self.model.dtype)
        keys = tuple(k + jitter * offset for k, offset in zip(cache.keys, self.keys, strict=True))
        values = tuple(v + jitter * offset for v, offset in zip(cache.values, self.values, strict=True))
        return replace(cache, keys=keys, values=values)

    def save(self, folder: Path, *, training: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True)
        save_file({name: p.detach().clone() for name, p in self.parameters().items()}, folder / "offsets.safetensors")

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.parameters().items():
                parameter.copy_(tensors[name])


@pytest.fixture(scope="session")
def questions() -> tuple[list[Question], list[Question]]:
    return draw("biography", samples=10, validation=3, docs=(2, 3), seed=0, facts=2)


@pytest.fixture(scope="session")
def model(questions: tuple[list[Question], list[Question]]) -> Model:
    tokenizer = train_tokenizer((q.text + q.answer for part in questions for q in part), vocab=512)
    return tiny_with_tokenizer("llama", tokenizer)
