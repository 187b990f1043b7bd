"""Chains of assignments over the text: a place has a code word, the next has that of the first; the last is asked for.

After the variable tracking of RULER (Hsieh et al. 2024, arXiv 2404.06654), with places for variables and code words for
values. No sentence states the answer of the question: it has to be carried through `hops` sentences.
"""

from __future__ import annotations

from itertools import pairwise
from random import Random

from kvnotes_interp.tasks.documents.needle import (
    NEEDLE,
    PLACES,
    PREFIX,
    QUESTION,
    WORDS,
    check_room,
    order_of_pairs,
    scattered,
)
from kvnotes_interp.tasks.documents.question import Question, draw, make_key, whole_number
from kvnotes_interp.tasks.pair import Split

LINK = "The {} has the code word of the {}."


def tracking(
    *,
    n: int = 64,
    seed: int = 0,
    split: Split | None = None,
    length: int = 200,
    documents: int = 1,
    chains: int = 3,
    hops: int = 2,
) -> list[Question]:
    """Questions for the code word at the end of one of `chains` chains.

    A chain states the code word of its first place; each of its `hops` further places has that of the one before. The
    sentences of a chain stand in the order of the chain, those of different chains anywhere between each other.
    Content and split are by the pair of place asked about and code word, as in `needle`.

    Args:
        length: words of the text, chains included; the text has up to one sentence more.
        documents: the text is cut at sentences into this many documents. Those that hold the chain are gold.
        chains: number of chains, all of the same length; the code words of the others are the distractors.
        hops: links between the stated code word and the place asked about; 0 states it, as in `multikey`. All chains
            together have at most 24 places.

    Raises:
        InputError: a value is out of range, or `length` is too short for the chains and documents asked for.
    """
    whole_number("hops", hops, least=0, most=len(PLACES) - 1)
    whole_number("chains", chains, least=1, most=len(PLACES) // (hops + 1))
    whole_number("length", length, least=8)
    whole_number("documents", documents, least=1)
    words = 8 + 9 * hops
    check_room(length, documents, f"{chains} chains of {words} words", words=chains * words)

    def make(rng: Random, part: Split, number: int) -> Question:
        order = order_of_pairs(part, seed)
        asked, word = order[number % len(order)]
        others = rng.sample([place for place in PLACES if place != asked], chains * (hops + 1) - 1)
        places = [*others, asked]  # the last chain is the one asked about
        values = [*rng.sample([other for other in WORDS if other != word], chains - 1), word]
        stated: list[str] = []
        depths: list[float] = []
        for number_, value in enumerate(values):
            chain = places[number_ * (hops + 1) : (number_ + 1) * (hops + 1)]
            stated += [NEEDLE.format(chain[0], value), *(LINK.format(b, a) for a, b in pairwise(chain))]
            depths += sorted(rng.random() for _ in chain)
        texts, where = scattered(rng, stated, depths, length=length, documents=documents)
        suffix = QUESTION.format(asked)
        return Question(
            family="tracking",
            key=make_key("tracking", *texts, suffix),
            content=f"tracking:{asked}|{word}",
            split=part,
            prefix=PREFIX,
            documents=texts,
            suffix=suffix,
            answer=f" {word}",
            gold=tuple(sorted(set(where[-hops - 1 :]))),
            distractors=tuple(f" {value}" for value in values[:-1]),
            details=(("place", asked), ("hops", hops), ("chains", chains), ("words", length)),
        )

    return draw("tracking", make, n=n, seed=seed, split=split)
