"""Tiny random models with a tokenizer that can be loaded again by its path, which both libraries want."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from kvnotes_interp import tasks
from kvnotes_interp.model import Model, wrap
from kvnotes_interp.sources import ModelSource
from kvnotes_interp.tasks import Pair
from tests.architectures import EAGER_ONLY, build
from tests.tiny_tokenizer import train

Maker = Callable[..., Model]


@pytest.fixture(scope="session")
def pairs() -> list[Pair]:
    return tasks.load("language", n=40, seed=1)


@pytest.fixture(scope="session")
def tokenizer(pairs: list[Pair], tmp_path_factory: pytest.TempPathFactory) -> Any:
    texts = [p.text_old + p.answer_old for p in tasks.load("language", n=400, seed=0)] + [p.text_new for p in pairs]
    folder = tmp_path_factory.mktemp("tokenizer")
    train(texts, vocab=2000).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session")
def make(tokenizer: Any) -> Maker:
    """A fresh tiny model of an architecture. Not the "exact" kind: a library's copy would lose the lifted functions."""

    def build_one(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> Model:
        attn = "eager" if name in EAGER_ONLY else "sdpa"
        hf = build(name, attn=attn, seed=seed, vocab=len(tokenizer), dtype=dtype, exact=False)
        return wrap(hf, tokenizer, ModelSource(name=f"tiny-{name}", kind="live"))

    return build_one
