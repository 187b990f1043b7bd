"""Greedy answers to document questions, cut where the question says an answer ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvnotes_interp import engine
from kvnotes_interp.compact import Cache

if TYPE_CHECKING:
    from kvnotes_interp.model import Model


def greedy_answer(model: Model, cache: Cache, first: int, *, stops: Sequence[str], max_new_tokens: int) -> str:
    """The text from the token `first` on, up to the first of `stops`, the model's own end, or `max_new_tokens`.

    `cache` holds the whole prompt, and `first` is what its last logits put first.
    """
    ends = (*model.stop_ids, *_single_tokens(model.tokenizer, stops))
    ids = [first]
    if first not in ends and max_new_tokens > 1:
        ids += engine.decode(model, cache, [first], max_new_tokens=max_new_tokens - 1, stop=ends).token_ids
    text = str(model.tokenizer.decode([i for i in ids if i not in model.stop_ids]))
    return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]


def _single_tokens(tokenizer: Any, texts: Sequence[str]) -> list[int]:
    """Ids of those texts that are one token: decoding can end at them; the others are found in the text."""
    found = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    return [int(ids[0]) for ids in found if len(ids) == 1]
