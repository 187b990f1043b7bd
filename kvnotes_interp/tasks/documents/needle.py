"""A needle in a haystack: one sentence with a code word among sentences that have nothing to do with it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from random import Random

from kvnotes_interp.errors import InputError
from kvnotes_interp.tasks.documents.question import Question, draw, make_key, whole_number, word_list
from kvnotes_interp.tasks.pair import Split

PREFIX = "Read the text and answer the question.\n"
NEEDLE = "The code word of the {} is {}."
QUESTION = "Question: What is the code word of the {0}?\nAnswer: The code word of the {0} is"

PLACES = word_list(
    """office kitchen library garage laboratory cellar workshop attic harbor station hospital museum theater school
    bakery prison castle tower temple palace factory stadium airport warehouse"""
)
WORDS = word_list(
    """apple river tiger silver winter hammer dragon orange pepper rocket mirror pencil candle island lemon eagle copper
    butter thunder planet violet ladder monkey button cherry marble basket ocean amber falcon anchor velvet walnut comet
    saddle magnet pebble lantern feather cactus"""
)

SIZES = word_list("old small quiet large young tired famous gentle")
WHO = word_list(
    """man woman child dog bird farmer painter sailor teacher driver neighbor stranger visitor student doctor
    merchant"""
)
DOES = word_list("walked waited slept worked sang rested played stood")
WHERE = word_list("""near the; behind the; in front of the; next to the; across from the""", ";")
SPOTS = word_list(
    """bridge garden river market road fountain hill lake forest field park wall gate beach tree square"""
)
WHEN = word_list(
    """in the morning; in the evening; at noon; at night; after lunch; before dinner; every day; last week""", ";"
)


def needle(
    *,
    n: int = 64,
    seed: int = 0,
    split: Split | None = None,
    length: int = 200,
    depth: float | None = None,
    documents: int = 1,
    others: int = 0,
) -> list[Question]:
    """Questions for a code word that stands once in `length` words of filler.

    Content and split are by the pair of place and code word: no pair is in both splits, every place and word is.

    Args:
        length: words of the haystack, needles included; the text has up to one sentence more.
        depth: where the needle stands, 0 (first sentence) to 1 (last); None draws it uniformly per question.
        documents: the haystack is cut at sentences into this many documents of about equal length.
        others: further needles at random depths, about other places with other code words.

    Raises:
        InputError: a value is out of range, or `length` is too short for the needles and documents asked for.
    """
    whole_number("length", length, least=8)
    whole_number("others", others, least=0, most=len(PLACES) - 1)
    whole_number("documents", documents, least=1)
    if depth is not None and not 0 <= depth <= 1:
        raise InputError(f"depth is {depth!r}; it must be between 0 (first sentence) and 1 (last), or None.")
    check_room(length, documents, f"{1 + others} needles of 8 words", words=8 * (1 + others))

    def make(rng: Random, part: Split, number: int) -> Question:
        order = order_of_pairs(part, seed)
        at = rng.random() if depth is None else float(depth)
        needles = [order[number % len(order)], *draw_needles(rng, part, others, apart=order[number % len(order)])]
        places = [at, *(rng.random() for _ in range(others))]
        texts, where = haystack(rng, needles, places, length=length, documents=documents)
        return ask(texts, needles, 0, where[0], part, details=(("depth", at), ("words", length)))

    return draw("needle", make, n=n, seed=seed, split=split)


def ask(
    texts: tuple[str, ...],
    needles: list[tuple[str, str]],
    which: int,
    gold: int,
    split: Split,
    *,
    details: tuple[tuple[str, str | int | float], ...] = (),
) -> Question:
    """The question for one of the needles that stand in the documents `texts`."""
    place, word = needles[which]
    suffix = QUESTION.format(place)
    return Question(
        family="needle",
        key=make_key("needle", *texts, suffix),
        content=f"needle:{place}|{word}",
        split=split,
        prefix=PREFIX,
        documents=texts,
        suffix=suffix,
        answer=f" {word}",
        gold=(gold,),
        distractors=tuple(f" {w}" for i, (_, w) in enumerate(needles) if i != which),
        details=(("place", place), *details),
    )


@lru_cache(maxsize=4)
def pairs(split: Split) -> tuple[tuple[str, str], ...]:
    """All (place, code word) of a split. An eighth is test: were it half, a place would give away half of the words."""
    test = split == "test"
    return tuple((a, b) for i, a in enumerate(PLACES) for j, b in enumerate(WORDS) if ((3 * i + j) % 8 == 0) is test)


def draw_needles(
    rng: Random, split: Split, count: int, *, apart: tuple[str, str] | None = None
) -> list[tuple[str, str]]:
    """`count` needles of different places and words, `apart` from one that is there already."""
    used = set(apart or ())
    drawn: list[tuple[str, str]] = []
    while len(drawn) < count:
        one = rng.choice(pairs(split))
        if used.isdisjoint(one):
            drawn.append(one)
            used.update(one)
    return drawn


def haystack(
    rng: Random, needles: list[tuple[str, str]], depths: list[float], *, length: int, documents: int = 1
) -> tuple[tuple[str, ...], list[int]]:
    """The documents, and for each needle the document that it stands in; see `scattered`."""
    return scattered(rng, [NEEDLE.format(*one) for one in needles], depths, length=length, documents=documents)


def check_room(length: int, documents: int, stated: str, *, words: int) -> None:
    """Refuses a `length` that cannot hold the sentences `stated` (of `words` words) or give every document a sentence.

    Raises:
        InputError: it is too short.
    """
    if length < words or length < 12 * documents:
        raise InputError(
            f"length is {length} words: too short for {stated} and {documents} documents of at least 12 words. Give a "
            "greater length, or fewer of them."
        )


def scattered(
    rng: Random, stated: Sequence[str], depths: Sequence[float], *, length: int, documents: int = 1
) -> tuple[tuple[str, ...], list[int]]:
    """Sentences among filler: the documents, and for each of `stated` the document that it stands in.

    A sentence of depth d stands after the share d of the filler sentences; equal depths keep their order.
    """
    sentences: list[str] = []
    words = sum(len(one.split()) for one in stated)
    while words < length:
        sentences.append(filler(rng))
        words += len(sentences[-1].split())
    order = sorted(range(len(stated)), key=lambda i: depths[i])
    slots = {i: round(depths[i] * len(sentences)) for i in order}
    text: list[tuple[str, int | None]] = []
    for place in range(len(sentences) + 1):
        text += [(stated[i], i) for i in order if slots[i] == place]
        if place < len(sentences):
            text.append((sentences[place], None))
    cuts = [round(i * len(text) / documents) for i in range(documents + 1)]
    chunks = [text[a:b] for a, b in pairwise(cuts)]
    where = {i: number for number, chunk in enumerate(chunks) for _, i in chunk if i is not None}
    texts = tuple(" ".join(sentence for sentence, _ in chunk) + "\n" for chunk in chunks)
    return texts, [where[i] for i in range(len(stated))]


def filler(rng: Random) -> str:
    """One neutral sentence of ten to twelve words."""
    pick = rng.choice
    return f"The {pick(SIZES)} {pick(WHO)} {pick(DOES)} {pick(WHERE)} {pick(SPOTS)} {pick(WHEN)}."


@lru_cache(maxsize=16)
def order_of_pairs(split: Split, seed: int) -> tuple[tuple[str, str], ...]:
    """Pairs of place and code word in the order in which they are asked about."""
    return tuple(Random(f"needle|{seed}|{split}|order").sample(pairs(split), len(pairs(split))))
