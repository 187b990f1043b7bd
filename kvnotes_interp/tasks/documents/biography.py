"""Synthetic biographies: several people, one document each, one fact of one of them is asked.

The values of the facts are shared by all people and birthplace and home draw from the same cities, so an answer can be
found only by its person and its relation. In one question no two people share a first or a last name.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from random import Random

from kvnotes_interp.tasks.documents.question import Question, draw, make_key, whole_number, word_list
from kvnotes_interp.tasks.pair import Split

PREFIX = "Read the biographies and answer the question.\n"

HE = word_list(
    """John James Robert Michael William David Richard Joseph Thomas Charles Daniel Matthew Mark Paul Steven Andrew
    George Edward Brian Kevin Peter Henry Simon Oliver"""
)
SHE = word_list(
    """Mary Jennifer Linda Elizabeth Barbara Susan Jessica Sarah Karen Lisa Nancy Margaret Emily Laura Amanda Helen Anna
    Emma Julia Rachel Alice Diana Grace Lucy"""
)
FIRST = HE + SHE
LAST = word_list(
    """Smith Brown Wilson Taylor Clark Lewis Walker Hall Allen Young King Wright Scott Green Baker Adams Nelson Hill
    Campbell Mitchell Carter Roberts Turner Phillips Parker Evans Edwards Collins Stewart Morris Murphy Cook Rogers
    Morgan Cooper Peterson Reed Bailey Bell Kelly Howard Ward Cox Richardson Watson Brooks Wood Bennett"""
)

CITIES = word_list(
    """Paris London Rome Berlin Madrid Tokyo Moscow Athens Cairo Delhi Havana Lima Dublin Lisbon Vienna Warsaw Stockholm
    Oslo Toronto Sydney Boston Chicago Dallas Seattle"""
)
JOBS = word_list(
    """nurse teacher lawyer driver painter baker doctor writer farmer dentist pilot sailor singer judge tailor chef
    banker butcher soldier gardener"""
)
INSTRUMENTS = word_list("piano violin guitar flute drums trumpet cello harp banjo clarinet trombone saxophone")
PETS = word_list("dog cat horse rabbit parrot turtle hamster goat pony snake lizard donkey")
DRINKS = word_list("tea coffee milk water juice beer wine lemonade cider cocoa soda whiskey")
SPORTS = word_list("tennis football golf hockey chess rugby baseball basketball cricket volleyball boxing poker")


@dataclass(frozen=True)
class Fact:
    """A relation: how a document states it, how it is asked, how the answer begins, and its values."""

    statement: str
    question: str
    opening: str
    values: tuple[str, ...]


FACTS: dict[str, Fact] = {
    "birthplace": Fact("was born in {}", "Where was {} born?", "{} was born in", CITIES),
    "home": Fact("lives in {}", "Where does {} live?", "{} lives in", CITIES),
    "job": Fact("works as a {}", "What is the job of {}?", "{} works as a", JOBS),
    "instrument": Fact("plays the {}", "Which instrument does {} play?", "{} plays the", INSTRUMENTS),
    "pet": Fact("keeps a {}", "Which pet does {} keep?", "{} keeps a", PETS),
    "drink": Fact("likes to drink {}", "What does {} like to drink?", "{} likes to drink", DRINKS),
    "sport": Fact("enjoys {}", "Which sport does {} enjoy?", "{} enjoys", SPORTS),
}


@dataclass(frozen=True)
class Biography:
    """One person and what is said of them; `facts` are (name of the fact, value) in the order of the text."""

    name: str
    facts: tuple[tuple[str, str], ...]
    text: str

    def value(self, fact: str) -> str | None:
        """The person's value of a fact, None if the document does not state it."""
        return dict(self.facts).get(fact)


def biography(
    *, n: int = 64, seed: int = 0, split: Split | None = None, documents: int = 5, facts: int = 4
) -> list[Question]:
    """Questions about people that do not exist. Content and split are by the person asked about.

    Args:
        documents: number of people, one short biography each, 1 to 24. All are of the question's split.
        facts: sentences per biography, 1 to 7; every biography states the same facts, each in an order of its own.

    Raises:
        InputError: a value is out of range.
    """
    whole_number("documents", documents, least=1, most=len(FIRST) // 2)
    whole_number("facts", facts, least=1, most=len(FACTS))

    def make(rng: Random, part: Split, number: int) -> Question:
        order = order_of_people(part, seed)
        asked = order[number % len(order)]
        written = write(rng, draw_people(rng, part, documents, asked=asked), facts)
        gold = next(i for i, one in enumerate(written) if one.name == asked)
        fact = rng.choice(written[gold].facts)[0]
        return ask(written, gold, fact, part)

    return draw("biography", make, n=n, seed=seed, split=split)


def ask(written: list[Biography], gold: int, fact: str, split: Split) -> Question:
    """The question for one fact of `written[gold]`."""
    name, value = written[gold].name, written[gold].value(fact)
    suffix = f"Question: {FACTS[fact].question.format(name)}\nAnswer: {FACTS[fact].opening.format(name)}"
    others = sorted({one.value(fact) for one in written} - {value, None}, key=str)
    texts = tuple(one.text for one in written)
    return Question(
        family="biography",
        key=make_key("biography", *texts, suffix),
        content=f"biography:{name}",
        split=split,
        prefix=PREFIX,
        documents=texts,
        suffix=suffix,
        answer=f" {value}",
        gold=(gold,),
        distractors=tuple(f" {other}" for other in others),
        details=(("fact", fact), ("person", name)),
    )


@lru_cache(maxsize=4)
def people(split: Split) -> tuple[str, ...]:
    """All people of a split, half of all combinations each. Both splits use every first and every last name."""
    wanted = 0 if split == "train" else 1
    return tuple(f"{a} {b}" for i, a in enumerate(FIRST) for j, b in enumerate(LAST) if (i + j) % 2 == wanted)


def draw_people(rng: Random, split: Split, count: int, *, asked: str | None = None) -> list[str]:
    """`count` people without a shared first or last name, in random order, `asked` among them."""
    pool = people(split)
    chosen = [asked or rng.choice(pool)]
    used = set(chosen[0].split())
    while len(chosen) < count:
        one = rng.choice(pool)
        if used.isdisjoint(one.split()):
            chosen.append(one)
            used.update(one.split())
    rng.shuffle(chosen)
    return chosen


def write(rng: Random, names: list[str], facts: int) -> list[Biography]:
    """A biography for each person, all about the same `facts` facts.

    No two people share a value of a fact while there are values enough, and nobody was born where they live.
    """
    stated = rng.sample(list(FACTS), facts)
    values: dict[str, list[str]] = {}
    for fact in stated:
        pool = FACTS[fact].values
        drawn = rng.sample(pool, len(pool))
        values[fact] = [drawn[i % len(drawn)] for i in range(len(names))]
    if "home" in values and "birthplace" in values:
        while any(a == b for a, b in zip(values["home"], values["birthplace"], strict=True)):
            values["home"] = rng.sample(CITIES, len(names))
    written = []
    for place, name in enumerate(names):
        first = name.split()[0]
        own = [(fact, values[fact][place]) for fact in rng.sample(stated, len(stated))]
        pronoun = "He" if first in HE else "She"
        sentences = [
            f"{first if rng.random() < 0.3 else pronoun} {FACTS[fact].statement.format(value)}." for fact, value in own
        ]
        written.append(Biography(name, tuple(own), f"Biography of {name}. {' '.join(sentences)}\n"))
    return written


@lru_cache(maxsize=16)
def order_of_people(split: Split, seed: int) -> tuple[str, ...]:
    """People in the order in which they are asked about."""
    return tuple(Random(f"biography|{seed}|{split}|order").sample(people(split), len(people(split))))
