"""Multiple choice over a long document of biographies and code words: the answer is the letter of the right option.

In the manner of the questions on which Still (arXiv 2606.07878) is trained and judged; those are written by a model
about real documents, these are generated, so that the answer is known and a wrong option is a fact of someone else.
"""

from __future__ import annotations

from random import Random

from kvnotes_interp.errors import InputError
from kvnotes_interp.tasks.documents import biography, needle
from kvnotes_interp.tasks.documents.question import Question, draw, make_key, whole_number
from kvnotes_interp.tasks.pair import Split

PREFIX = "Read the text and answer the question with the letter of the right option.\n"
LETTERS = "ABCDEFGH"
FACTS = 4  # sentences of a biography
SECTION = 32  # words of a section without filler, at most


def choices(
    *,
    n: int = 64,
    seed: int = 0,
    split: Split | None = None,
    length: int = 400,
    documents: int = 1,
    people: int = 8,
    choices: int = 4,
) -> list[Question]:
    """Questions with `choices` lettered options about a text of `people` sections.

    A section is a short biography and a paragraph of filler with one code word in it. Every second question is about a
    person, content and split as in the task `biography`; the others about a code word, as in `needle`. Wrong options
    are what the text says of the other people or places. The place of the right option is drawn.

    Args:
        length: words of the text; the text has up to one sentence more.
        documents: the sections are spread over this many documents, at most `people`.
        people: number of sections, from `choices` to 24.
        choices: number of options, 2 to 8 (A to H).

    Raises:
        InputError: a value is out of range, or `length` is too short for as many people.
    """
    whole_number("choices", choices, least=2, most=len(LETTERS))
    whole_number("people", people, least=choices, most=len(needle.PLACES))
    whole_number("documents", documents, least=1, most=people)
    whole_number("length", length, least=8)
    if length < SECTION * people:
        raise InputError(
            f"length is {length} words: too short for {people} people with up to {SECTION} words each. Give a greater "
            "length or fewer people."
        )

    def make(rng: Random, part: Split, number: int) -> Question:
        asks_person, turn = number % 2 == 0, number // 2
        persons, pairs = biography.order_of_people(part, seed), needle.order_of_pairs(part, seed)
        person = persons[turn % len(persons)] if asks_person else None
        pair = None if asks_person else pairs[turn % len(pairs)]
        written = biography.write(rng, biography.draw_people(rng, part, people, asked=person), FACTS)
        needles = needle.draw_needles(rng, part, people - (pair is not None), apart=pair)
        if pair is not None:
            needles.insert(rng.randrange(people), pair)
        texts, where = _lay_out(rng, written, needles, length, documents)
        if asks_person:
            own = next(i for i, one in enumerate(written) if one.name == person)
            fact = rng.choice(written[own].facts)[0]
            question = biography.FACTS[fact].question.format(person)
            right, others = written[own].value(fact), {one.value(fact) for one in written}
        else:
            own = next(i for i, one in enumerate(needles) if one == pair)
            question = f"What is the code word of the {needles[own][0]}?"
            right, others = needles[own][1], {word for _, word in needles}
        offered = [right, *rng.sample(sorted(str(value) for value in others - {right}), choices - 1)]
        rng.shuffle(offered)
        options = "\n".join(f"{letter}. {value}" for letter, value in zip(LETTERS, offered, strict=False))
        suffix = f"Question: {question}\n{options}\nAnswer:"
        answer = LETTERS[offered.index(right)]
        return Question(
            family="choices",
            key=make_key("choices", *texts, suffix),
            content=f"choices:{person or '|'.join(needles[own])}",
            split=part,
            prefix=PREFIX,
            documents=texts,
            suffix=suffix,
            answer=f" {answer}",
            gold=(where[own],),
            distractors=tuple(f" {letter}" for letter in LETTERS[:choices] if letter != answer),
            details=(("about", "person" if asks_person else "place"), ("value", str(right)), ("words", length)),
        )

    return draw("choices", make, n=n, seed=seed, split=split)


def _lay_out(
    rng: Random, written: list[biography.Biography], needles: list[tuple[str, str]], length: int, documents: int
) -> tuple[tuple[str, ...], list[int]]:
    """The documents, and for each section the document that it stands in."""
    texts = [""] * documents
    where = [i * documents // len(written) for i in range(len(written))]
    words = 0
    for place, (person, own) in enumerate(zip(written, needles, strict=True)):
        words += len(person.text.split())
        room = length * (place + 1) // len(written) - words
        (paragraph,), _ = needle.haystack(rng, [own], [rng.random()], length=room)
        words += len(paragraph.split())
        texts[where[place]] += f"{person.text}{paragraph}"
    return tuple(texts), where
