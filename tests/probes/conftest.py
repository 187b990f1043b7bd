"""A tiny random model with a tokenizer of its own, and pairs on which it happens to change its answer."""

from __future__ import annotations

import pytest

from kvnotes_interp import tasks
from kvnotes_interp.model import Model
from kvnotes_interp.tasks import Pair
from tests.tiny import tiny_with_tokenizer
from tests.tiny_tokenizer import train


@pytest.fixture(scope="session")
def pairs() -> list[Pair]:
    return tasks.load("language", n=40, seed=1)


@pytest.fixture(scope="session")
def model(pairs: list[Pair]) -> Model:
    texts = [p.text_old + p.answer_old for p in tasks.load("language", n=400, seed=0)] + [p.text_new for p in pairs]
    return tiny_with_tokenizer("llama", train(texts, vocab=2000), seed=6)


LENIENT = {"min_gap": 0.0, "min_gap_noise": 0.0, "progress": False}
