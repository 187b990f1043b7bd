"""One question over several documents, at text level: no tokenizer, no model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Protocol, TypeVar

from kvnotes_interp.errors import InputError, nearest
from kvnotes_interp.tasks.pair import Split

SPLITS: tuple[Split, ...] = ("train", "test")
Detail = str | int | float


class Keyed(Protocol):
    """Anything with a unique key."""

    @property
    def key(self) -> str: ...


Drawn = TypeVar("Drawn", bound=Keyed)


@dataclass(frozen=True)
class Question:
    """Documents, a question about them and its answer. The prompt is `prefix + documents + suffix`.

    The pieces are cut where a newline ends one and a letter begins the next, so that the token ids of the pieces, one
    after the other, are those of the joint text for tokenizers that split at newlines.

    Args:
        family: name of the task.
        key: unique, stable and safe as a file name; a function of the texts alone.
        content: cluster for intervals and unit of the split. Equal contents are not independent observations.
        split: "train" or "test"; no content is in both.
        prefix: text before the documents, ending in a newline.
        documents: the documents in order, each ending in a newline; every one can be prefilled alone.
        suffix: question and the beginning of the answer, without a space at its end.
        answer: what follows the suffix, leading space included.
        gold: indices of the documents that hold the answer; at least one.
        distractors: answers that the same question would have about other documents; none equals the answer.
        aliases: other texts that count as right, leading space included.
        stops: texts that end a greedy answer.
        details: what was drawn, as (name, value), e.g. (("fact", "job"),) or (("depth", 0.5), ("words", 200)).
    """

    family: str
    key: str
    content: str
    split: Split
    prefix: str
    documents: tuple[str, ...]
    suffix: str
    answer: str
    gold: tuple[int, ...]
    distractors: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    stops: tuple[str, ...] = (".", "\n")
    details: tuple[tuple[str, Detail], ...] = ()

    def __post_init__(self) -> None:
        if not self.documents or not self.gold or not all(0 <= i < len(self.documents) for i in self.gold):
            raise InputError(
                f'Question "{self.key}": gold is {self.gold} with {len(self.documents)} documents; give one document '
                "or more, and the indices of those that hold the answer."
            )
        if not self.answer.startswith(" ") or self.suffix != self.suffix.rstrip():
            raise InputError(
                f'Question "{self.key}": the answer {self.answer!r} must begin with a space and the suffix must not '
                f"end in one (it ends {self.suffix[-8:]!r}); otherwise the answer's first token depends on the cut."
            )
        if self.answer in self.distractors:
            raise InputError(f'Question "{self.key}": the answer {self.answer!r} is also a distractor; take it out.')

    @property
    def pieces(self) -> tuple[str, ...]:
        """Prefix, documents and suffix in order."""
        return (self.prefix, *self.documents, self.suffix)

    @property
    def text(self) -> str:
        """The whole prompt, without the answer."""
        return "".join(self.pieces)

    def detail(self, name: str) -> Detail:
        """One of `details` by name."""
        found = dict(self.details)
        if name not in found:
            raise InputError(f'Question "{self.key}" has no detail "{name}".{nearest(name, found)}')
        return found[name]


def make_key(family: str, *texts: str) -> str:
    """`family.` and twelve hex digits of the texts' sha256."""
    return f"{family}.{hashlib.sha256(repr(texts).encode()).hexdigest()[:12]}"


def draw(
    family: str, make: Callable[[Random, Split, int], Drawn], *, n: int, seed: int, split: Split | None
) -> list[Drawn]:
    """`n` distinct questions (or pairs) from `make(rng, split, number)`, train and test in turn if `split` is None.

    Question `number` of a split has its own random stream, so a smaller `n` gives a prefix of a larger one.

    Raises:
        InputError: a wrong `n`, `seed` or `split`, or too few distinct questions.
    """
    whole_number("n", n, least=1)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise InputError(f"seed is {seed!r}; it must be a whole number.")
    if split not in (None, *SPLITS):
        raise InputError(f'split is "{split}"; it must be "train", "test" or None.{nearest(str(split), SPLITS)}')

    def stream(part: Split) -> Iterator[Drawn]:
        for number in range(8 * n + 64):
            yield make(Random(f"{family}|{seed}|{part}|{number}"), part, number)

    streams = [stream(part) for part in SPLITS if split in (None, part)]
    mixed = (question for row in zip(*streams, strict=True) for question in row)
    seen: set[str] = set()
    fresh = (q for q in mixed if q.key not in seen and not seen.add(q.key))
    questions = list(islice(fresh, n))
    if len(questions) < n:
        raise InputError(
            f'Task "{family}" gave {len(questions)} distinct questions with these options, fewer than n={n}.'
        )
    return questions


def whole_number(name: str, value: int, *, least: int, most: int | None = None) -> int:
    """`value` if it is a whole number in range.

    Raises:
        InputError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        upper = "" if most is None else f" and at most {most}"
        raise InputError(f"{name} is {value!r}; it must be a whole number of at least {least}{upper}.")
    return value


def word_list(text: str, separator: str | None = None) -> tuple[str, ...]:
    """The words of a text, or its parts between separators without the white space around them."""
    return tuple(part.strip() for part in text.split(separator))
