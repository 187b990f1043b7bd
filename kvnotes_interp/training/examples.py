"""Document questions as examples of the loop: drawn with several numbers of documents, and put in order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random
from typing import TYPE_CHECKING, Any

from kvnotes_interp.errors import InputError
from kvnotes_interp.operators.blocks import Blocks
from kvnotes_interp.probes.items import items_of
from kvnotes_interp.tasks import documents
from kvnotes_interp.tasks.documents.question import Question

if TYPE_CHECKING:
    from kvnotes_interp.model import Model


@dataclass(frozen=True)
class Example:
    """One question in blocks.

    Attributes:
        key, content: of the question.
        blocks: prefix, documents and suffix as token ids.
        answer: ids of the right answer as it follows the prompt.
        answers: the right answer and its aliases, as texts. stops: texts that end a greedy answer.
    """

    key: str
    content: str
    blocks: Blocks
    answer: tuple[int, ...]
    answers: tuple[str, ...]
    stops: tuple[str, ...]


def examples_of(model: Model, questions: Sequence[Question]) -> list[Example]:
    """The questions as examples, in their order.

    Raises InputError for no questions, a model without a tokenizer, pieces that do not agree with the joint text, and
    a question with one document at slot 0: its cache is that of the full context, so there is nothing to learn.
    """
    items, aside = items_of(model, questions)
    if aside:
        raise InputError(
            f"question {aside[0]['pair']} ({len(aside)} of {len(questions)}) has one document and no prefix: its cache "
            "is already that of the full context. Give it a prefix or more documents, or leave it out."
        )
    return [Example(i.key, i.content, i.blocks, i.answer, i.answers, i.stops) for i in items]


def draw(
    task: str,
    *,
    samples: int,
    validation: int,
    docs: Sequence[int] | None = (2, 3, 5, 7),
    seed: int = 0,
    **options: Any,
) -> tuple[list[Question], list[Question]]:
    """(training questions, validation questions) of the train split, spread evenly over numbers of documents.

    Contents of the two do not overlap, and the test split is left for evaluation. No content is asked twice before all
    were, whatever its number of documents. Where the contents do not suffice for that, a share of them drawn by `seed`
    (an eighth, rounded up) is held out for validation, and all others are asked about several times.

    Args:
        task: a document task of `tasks.documents`. options: of the task.
        samples, validation: number of questions; a remainder goes to the first numbers of documents.
        docs: numbers of documents per question; None: the task's own default.

    Raises InputError when the task has too few contents for both.
    """
    kinds = [{"documents": n, **options} for n in docs] if docs is not None else [options]
    sizes = [_shares(total, len(kinds)) for total in (samples, validation)]
    drawn: tuple[list[Question], list[Question]] = ([], [])
    start = 0
    for part, shares in zip(drawn, sizes, strict=True):
        for kind, share in zip(kinds, shares, strict=True):
            # A smaller n gives a prefix of a larger one: each kind takes its own stretch of the contents.
            part += documents.load(task, n=start + share, seed=seed, split="train", **kind)[start:] if share else []
            start += share
    train, held_out = drawn
    seen = {question.content for question in train}
    fresh = [question for question in held_out if question.content not in seen]
    return (train, fresh) if len(fresh) == validation else _held_out(task, kinds, sizes, seed, train + held_out)


@dataclass(frozen=True)
class Part:
    """A task to draw from, with `docs` and the options of `draw`."""

    task: str
    docs: Sequence[int] | None = (2, 3, 5, 7)
    options: Mapping[str, Any] = field(default_factory=dict)


def draw_parts(
    parts: Sequence[Part], *, samples: int, validation: int, seed: int = 0
) -> tuple[list[Question], list[Question]]:
    """(training questions, validation questions) in equal parts, each as `draw` gives it; the first get a remainder.

    Contents are kept apart within a part: two parts of one task may ask in validation what the other was trained on.
    Raises InputError for fewer questions than parts, and as `draw`.
    """
    if not 0 < len(parts) <= min(samples, validation):
        raise InputError(
            f"{samples} training and {validation} validation questions of {len(parts)} tasks: give at least one task, "
            "and at least one question of either kind for each."
        )
    shares = zip(_shares(samples, len(parts)), _shares(validation, len(parts)), strict=True)
    drawn = [
        draw(part.task, samples=ours, validation=theirs, docs=part.docs, seed=seed, **part.options)
        for part, (ours, theirs) in zip(parts, shares, strict=True)
    ]
    return [q for train, _ in drawn for q in train], [q for _, held in drawn for q in held]


def _held_out(
    task: str, kinds: Sequence[dict[str, Any]], sizes: Sequence[Sequence[int]], seed: int, drawn: Sequence[Question]
) -> tuple[list[Question], list[Question]]:
    """As `draw`, of a task whose contents were all drawn: an eighth of them is asked about in validation alone."""
    contents = sorted({question.content for question in drawn})
    held = set(Random(f"held out|{seed}").sample(contents, math.ceil(len(contents) / 8)))
    train: list[Question] = []
    validation: list[Question] = []
    for kind, ours, theirs in zip(kinds, *sizes, strict=True):
        # Contents are asked about in turn, so that this many questions hold both shares.
        rounds = math.ceil(max(ours / max(len(contents) - len(held), 1), theirs / len(held)))
        every = documents.load(task, n=rounds * len(contents), seed=seed, split="train", **kind)
        train += [question for question in every if question.content not in held][:ours]
        validation += [question for question in every if question.content in held][:theirs]
    if (len(train), len(validation)) != tuple(map(sum, sizes)):
        raise InputError(
            f'Task "{task}" has {len(contents)} contents to train on, {len(held)} of them for validation: they give '
            f"{len(train)} of {sum(sizes[0])} training and {len(validation)} of {sum(sizes[1])} validation questions. "
            "Ask for fewer of either."
        )
    return train, validation


def _shares(total: int, parts: int) -> list[int]:
    return [total // parts + (i < total % parts) for i in range(parts)]


def stretch(n: int, seed: int, start: int, count: int) -> list[int]:
    """Places `start` to `start + count` in the endless order of `n` examples: one shuffle after the other."""
    return [_shuffled(n, seed, place // n)[place % n] for place in range(start, start + count)]


@lru_cache(maxsize=4)
def _shuffled(n: int, seed: int, epoch: int) -> list[int]:
    return Random(f"{seed}|{epoch}").sample(range(n), n)
