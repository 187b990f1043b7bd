"""A short pair on tiny models of several architectures."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import pytest

from kvnotes_interp import tasks
from kvnotes_interp.metrics import Competence
from kvnotes_interp.model import Model
from kvnotes_interp.probes import measure
from kvnotes_interp.probes.measure import Case
from kvnotes_interp.tasks import EncodedPair, Pair
from tests.tiny import tiny

# GQA, a bias on the projection, q/k norm, sandwich norms and sliding windows, LayerNorm in parallel.
NAMES = ("llama", "llama_biased", "qwen3", "gemma3", "mistral", "gpt_neox")


# Short enough that a sliding window of six tokens carries the field to the decision within three layers.
OLD = (7, 31, 12, 55, 8, 60, 3, 44, 19, 71, 25, 66)
FIELD, NEW_TOKEN = 3, 90


def short_pair(pair: Pair) -> EncodedPair:
    """Twelve tokens that differ in one; which family they claim to be of makes no difference."""
    n = len(OLD)
    new = (*OLD[:FIELD], NEW_TOKEN, *OLD[FIELD + 1 :])
    return EncodedPair(
        pair=pair,
        old_ids=OLD,
        new_ids=new,
        field=(FIELD, FIELD + 1),
        answer_old_id=5,
        answer_new_id=17,
        tokens_old=tuple(map(str, OLD)),
        tokens_new=tuple(map(str, new)),
        regions=("before",) * FIELD + ("field",) + ("context",) * (n - FIELD - 2) + ("decision",),
        delimiter=(False,) * n,
        anchors=tuple(f"place:-{n - i}" for i in range(n)),
    )


def opened(model: Model, pair: EncodedPair) -> Case:
    """The pair on this model. Patches need no competence: two prompts that differ will do."""
    return measure.open_case(model, pair, competence=Competence(0, 0), sweeper=measure.Sweeper())


@pytest.fixture(scope="session")
def case_of(pairs: list[Pair]) -> Callable[[str], Case]:
    """`case_of("gemma3")`: the short pair on a tiny float64 model of this architecture."""

    @lru_cache(maxsize=16)
    def make(name: str) -> Case:
        return opened(tiny(name), short_pair(pairs[0]))

    return make


@pytest.fixture(scope="session")
def language_case(model: Model, pairs: list[Pair]) -> Case:
    """A pair of the language family, with a tokenizer and a template whose places have names."""
    return opened(model, tasks.encode_all(model.tokenizer, pairs[:1])[0][0])
