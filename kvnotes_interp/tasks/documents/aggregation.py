"""A list of words; the one that occurs most often is asked for, so every part of the text counts.

After the common-words aggregation of RULER (Hsieh et al. 2024, arXiv 2404.06654), with one word for an answer. To know
which words occur is not enough, and no single sentence holds the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations, pairwise
from random import Random

from kvnotes_interp.errors import InputError
from kvnotes_interp.tasks.documents.needle import WORDS
from kvnotes_interp.tasks.documents.question import Question, draw, make_key, whole_number
from kvnotes_interp.tasks.pair import Split

PREFIX = "Read the words and answer the question.\n"
SUFFIX = "Question: Which word occurs most often?\nAnswer: The word that occurs most often is"


def aggregation(
    *,
    n: int = 64,
    seed: int = 0,
    split: Split | None = None,
    length: int = 200,
    documents: int = 1,
    words: int = 12,
    ratio: float = 2.0,
) -> list[Question]:
    """Questions for the commonest word of a list of exactly `length` words, in random order.

    Content and split are by the two commonest words, whichever comes first; every word is in both splits.

    Args:
        length: words of the list.
        documents: the list is cut into this many documents of about equal length. All of them are gold.
        words: number of different words, 3 to 40. All but the commonest occur about equally often.
        ratio: the commonest occurs this many times as often as the second, rounded up; 1 is a lead of one, the hardest.

    Raises:
        InputError: a value is out of range, or `length` is too short for as many words and documents.
    """
    whole_number("length", length, least=6)
    whole_number("documents", documents, least=1, most=length)
    whole_number("words", words, least=3, most=len(WORDS))
    if not ratio >= 1:
        raise InputError(f"ratio is {ratio!r}; it must be a number of at least 1 (a lead of one).")
    counts = counts_of(length, words, ratio)

    def make(rng: Random, part: Split, number: int) -> Question:
        order = _order(part, seed)
        first, second = rng.sample(order[number % len(order)], 2)
        rest = rng.sample([word for word in WORDS if word not in (first, second)], words - 2)
        listed = [word for word, count in zip((first, second, *rest), counts, strict=True) for _ in range(count)]
        rng.shuffle(listed)
        cuts = [round(i * length / documents) for i in range(documents + 1)]
        texts = tuple(f"Words: {', '.join(listed[a:b])}.\n" for a, b in pairwise(cuts))
        return Question(
            family="aggregation",
            key=make_key("aggregation", *texts, SUFFIX),
            content=f"aggregation:{'|'.join(sorted((first, second)))}",
            split=part,
            prefix=PREFIX,
            documents=texts,
            suffix=SUFFIX,
            answer=f" {first}",
            gold=tuple(range(documents)),
            distractors=(f" {second}", *(f" {word}" for word in rest)),
            details=(("words", length), ("count", counts[0]), ("second", counts[1])),
        )

    return draw("aggregation", make, n=n, seed=seed, split=split)


def counts_of(length: int, words: int, ratio: float) -> tuple[int, ...]:
    """How often each word occurs, the commonest first: `length` in all, the lead as small as it can be.

    The second occurs more often than the rest, which differ by one at most.

    Raises:
        InputError: `length` words are too few.
    """
    for first in range(2, length):
        for second in range(min(int(first / ratio), first - 1), 1, -1):
            each, more = divmod(length - first - second, words - 2)
            if each >= 1:  # a smaller second leaves more to the rest, not less
                if each + (more > 0) < second:
                    return (first, second, *(each + (i < more) for i in range(words - 2)))
                break
    raise InputError(
        f"length is {length} words: too short for {words} different words, of which the commonest occurs {ratio:g} "
        "times as often as the second. Give a greater length, fewer words or a smaller ratio."
    )


@lru_cache(maxsize=16)
def _order(split: Split, seed: int) -> tuple[Sequence[str], ...]:
    """Pairs of words in the order in which they are the two commonest; half of all pairs are in each split."""
    wanted = 0 if split == "train" else 1
    pairs = [(WORDS[i], WORDS[j]) for i, j in combinations(range(len(WORDS)), 2) if (i + j) % 2 == wanted]
    return tuple(Random(f"aggregation|{seed}|{split}|order").sample(pairs, len(pairs)))
