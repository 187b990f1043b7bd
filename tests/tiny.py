"""Tiny random models of many architectures, wrapped as this package wraps any model."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from kvnotes_interp.model import Model, wrap
from kvnotes_interp.sources import ModelSource
from tests.architectures import EAGER_ONLY, build


@lru_cache(maxsize=128)
def tiny(name: str, attn: str = "") -> Model:
    """A float64 model of this architecture, without a tokenizer; sdpa where the family has it."""
    attn = attn or ("eager" if name in EAGER_ONLY else "sdpa")
    return wrap(build(name, attn=attn), None, ModelSource(name=f"tiny-{name}", kind="live"))


def tiny_with_tokenizer(name: str, tokenizer: Any, *, seed: int = 0) -> Model:
    """The same with a tokenizer, whose vocabulary the model takes."""
    attn = "eager" if name in EAGER_ONLY else "sdpa"
    hf = build(name, attn=attn, seed=seed, vocab=len(tokenizer))
    return wrap(hf, tokenizer, ModelSource(name=f"tiny-{name}", kind="live"))
