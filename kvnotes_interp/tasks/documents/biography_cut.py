"""Biographies cut behind their headings: the name stands in one document, what is said of the person in the next.

Texts and people are those of `biography`, cut before a space; every sentence begins with the same `subject`. "name" is
the first name, which no two people of a question share: the document of the statements holds all that the answer needs,
though not as the text around it would have it. With "pronoun" whom they are about stands in the heading alone.
"""

from __future__ import annotations

from random import Random

from kvnotes_interp.errors import InputError, nearest
from kvnotes_interp.tasks.documents.biography import (
    FACTS,
    FIRST,
    HE,
    PREFIX,
    Biography,
    ask,
    draw_people,
    order_of_people,
    write,
)
from kvnotes_interp.tasks.documents.question import Question, draw, make_key, whole_number
from kvnotes_interp.tasks.pair import Split

SUBJECTS = ("name", "pronoun")


def biography_cut(
    *, n: int = 64, seed: int = 0, split: Split | None = None, documents: int = 3, facts: int = 4, subject: str = "name"
) -> list[Question]:
    """Questions about people that do not exist. Content and split are by the person asked about.

    Args:
        documents: number of people, 1 to 24. Each has two documents: heading, statements.
        facts: statements per person, 1 to 7.
        subject: how every statement begins, "name" (the first name) or "pronoun".

    Raises:
        InputError: a value is out of range.
    """
    whole_number("documents", documents, least=1, most=len(FIRST) // 2)
    whole_number("facts", facts, least=1, most=len(FACTS))
    if subject not in SUBJECTS:
        raise InputError(f"subject={subject!r}: choose from {', '.join(SUBJECTS)}.{nearest(subject, SUBJECTS)}")

    def make(rng: Random, part: Split, number: int) -> Question:
        order = order_of_people(part, seed)
        asked = order[number % len(order)]
        written = write(rng, draw_people(rng, part, documents, asked=asked), facts)
        own = next(i for i, one in enumerate(written) if one.name == asked)
        return _cut(written, own, rng.choice(written[own].facts)[0], part, subject)

    return draw("biography_cut", make, n=n, seed=seed, split=split)


def _cut(written: list[Biography], own: int, fact: str, split: Split, subject: str) -> Question:
    whole = ask(written, own, fact, split)
    texts = tuple(text for one in written for text in (f"Biography of {one.name}.", _statements(one, subject)))
    return Question(
        family="biography_cut",
        key=make_key("biography_cut", *texts, whole.suffix),
        content=f"biography_cut:{written[own].name}",
        split=split,
        prefix=PREFIX,
        documents=texts,
        suffix=whole.suffix,
        answer=whole.answer,
        gold=(2 * own + 1,) if subject == "name" else (2 * own, 2 * own + 1),
        distractors=whole.distractors,
        details=(*whole.details, ("subject", subject)),
    )


def _statements(one: Biography, subject: str) -> str:
    first = one.name.split()[0]
    who = first if subject == "name" else "He" if first in HE else "She"
    return "".join(f" {who} {FACTS[fact].statement.format(value)}." for fact, value in one.facts) + "\n"
