"""Validation: KL to the teacher, and greedy answers against the right ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kvnotes_interp import engine, metrics
from kvnotes_interp.compact import Cache
from kvnotes_interp.probes.greedy import greedy_answer
from kvnotes_interp.training.examples import Example
from kvnotes_interp.training.loss import kl_to_teacher
from kvnotes_interp.training.method import Method
from kvnotes_interp.training.reader import answer_logits
from kvnotes_interp.training.teacher import Target

if TYPE_CHECKING:
    from kvnotes_interp.model import Model


def student_logits(
    model: Model, caches: Sequence[Cache], examples: Sequence[Example], targets: Sequence[Target]
) -> list[torch.Tensor]:
    """Logits `[row token]` of every row that predicts a token of the teacher's answer, given the answer up to there."""
    tails = [(*e.blocks.suffix, *t.answer[:-1]) for e, t in zip(examples, targets, strict=True)]
    return answer_logits(model, caches, tails, rows=[len(t.answer) for t in targets])


@torch.no_grad()
def validate(
    method: Method,
    model: Model,
    examples: Sequence[Example],
    targets: Sequence[Target],
    *,
    tau: float,
    batch: int,
    max_new_tokens: int,
) -> dict[str, float]:
    """Means over the examples, in full precision.

    `kl`: to the teacher, as in the loss. `first_token`: the first token of the right answer comes first.
    `exact_match` and `token_f1` (words pooled over all examples): of the greedy answer against the right ones.
    """
    kl: list[float] = []
    first: list[float] = []
    texts: list[str] = []
    for start in range(0, len(examples), batch):
        part, theirs = examples[start : start + batch], targets[start : start + batch]
        caches = method.caches(part)
        kl += kl_to_teacher(theirs, student_logits(model, caches, part, theirs), tau=tau).tolist()
        for example, cache in zip(part, caches, strict=True):
            grown, hidden = engine.extend(model, cache, example.blocks.suffix)
            token = int(engine.logits_of(model, hidden[0, -1]).argmax())
            first.append(float(token == example.answer[0]))
            texts.append(greedy_answer(model, grown, token, stops=example.stops, max_new_tokens=max_new_tokens))
    answers = [example.answers for example in examples]
    exact = [float(metrics.exact_match(text, right)) for text, right in zip(texts, answers, strict=True)]
    return {
        "kl": _mean(kl),
        "token_f1": metrics.micro_f1(texts, answers),
        "exact_match": _mean(exact),
        "first_token": _mean(first),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
