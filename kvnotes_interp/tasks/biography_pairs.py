"""Counterfactual biographies: one fact of one of several people differs, and the question asks for it.

The texts are those of the document task `biography`. Every person's biography is a document of its own, so that a note
about the fact can be looked for inside the document that states it, behind it, and at its end.
"""

from __future__ import annotations

from itertools import combinations
from random import Random

from kvnotes_interp.tasks.documents.biography import (
    FACTS,
    PREFIX,
    Biography,
    ask,
    draw_people,
    order_of_people,
    people,
    write,
)
from kvnotes_interp.tasks.documents.question import draw, make_key, whole_number
from kvnotes_interp.tasks.pair import Pair, Piece, Split

KIND = "verbatim"
ABOUT = "Several short biographies; one fact of one person differs, and the question asks for it."
SOURCE = "SemPIC, arXiv 2607.28069 (synthetic biographies), as pairs in the manner of Notes, arXiv 2606.17107"
_MOST = min(len(fact.values) for fact in FACTS.values()) - 1  # one value must be left that nobody has


def biography_pairs(
    *, n: int = 64, seed: int = 0, split: Split | None = None, documents: int = 5, facts: int = 4
) -> list[Pair]:
    """Pairs about people that do not exist. Content and split are by the person asked about.

    The new value is one that no person of the prompt has. Pieces of the fact's own document are named from the field:
    "own.before", "own.stop" (its sentence's end), "own.after.0", ..., "own.end"; the others "earlier.0" (the nearest
    one before it), "later.0", ...

    Args:
        documents: number of people, one short biography each, 1 to 11.
        facts: sentences per biography, 1 to 7.

    Raises:
        InputError: a value is out of range.
    """
    whole_number("documents", documents, least=1, most=_MOST)
    whole_number("facts", facts, least=1, most=len(FACTS))

    def make(rng: Random, part: Split, number: int) -> Pair:
        order = order_of_people(part, seed)
        asked = order[number % len(order)]
        written = write(rng, draw_people(rng, part, documents, asked=asked), facts)
        own = next(i for i, one in enumerate(written) if one.name == asked)
        fact = rng.choice(written[own].facts)[0]
        taken = {value for one in written for _, value in one.facts}
        new = rng.choice([value for value in FACTS[fact].values if value not in taken])
        return _pair(written, own, fact, new, part)

    return draw("biography_pairs", make, n=n, seed=seed, split=split)


def counts() -> tuple[int, int]:
    """(instances, contents): people, and people times the two values of one of their facts; other people aside."""
    contents = len(people("train")) + len(people("test"))
    return contents * sum(len(list(combinations(fact.values, 2))) for fact in FACTS.values()), contents


def _pair(written: list[Biography], own: int, fact: str, new: str, split: Split) -> Pair:
    name, old = written[own].name, str(written[own].value(fact))
    suffix = ask(written, own, fact, split).suffix
    prompts = [_prompt(written, own, fact, value, suffix) for value in (old, new)]
    texts = ["".join(piece.text for piece in prompt) for prompt in prompts]
    return Pair(
        family="biography_pairs",
        kind=KIND,
        key=make_key("biography_pairs", *texts),
        content=f"biography_pairs:{name}",
        split=split,
        old=prompts[0],
        new=prompts[1],
        answer_old=f" {old}",
        answer_new=f" {new}",
        chat=False,
        label=f"{fact} of {name}",
    )


def _prompt(written: list[Biography], own: int, fact: str, value: str, suffix: str) -> tuple[Piece, ...]:
    """The pieces, with `value` for the fact of `written[own]`."""
    pieces = [Piece(PREFIX, "preamble", "prefix")]
    for number, one in enumerate(written):
        if number != own:
            side, away = ("earlier", own - number) if number < own else ("later", number - own)
            pieces.append(Piece(one.text, "filler", f"{side}.{away - 1}", number))
            continue
        statement = FACTS[fact].statement.format(one.value(fact))
        before, _, after = one.text.partition(statement)
        lead, _, trail = FACTS[fact].statement.partition("{}")
        first, *sentences = (trail + after.removesuffix("\n")).split(". ")
        pieces += [
            Piece(before + lead, "context", "own.before", number),
            Piece(value, "field", "field", number),
            Piece(first if not sentences else f"{first}.", "context", "own.stop", number),
            *(
                Piece(f" {text.removesuffix('.')}.", "context", f"own.after.{i}", number)
                for i, text in enumerate(sentences)
            ),
            Piece("\n", "context", "own.end", number),
        ]
    return (*pieces, Piece(suffix, "decision", "question"))
