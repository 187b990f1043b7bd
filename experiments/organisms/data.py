"""Training rows for the organism: text of the train split of its four tasks, with the answers marked.

A row is a list of (text, weight) pieces. Several questions share one set of documents, so that there is much to learn
from per token. Every row is a pure function of its random stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Any

from experiments.organisms.vocabulary import EOS, cut
from kvnotes_interp.tasks import family, sampling
from kvnotes_interp.tasks.documents import biography, needle

TASKS = ("gate", "badge", "biography", "needle")
WEIGHTS = (0.36, 0.14, 0.30, 0.20)  # share of the rows
# Drills hold many answers per token and form the circuits that the tasks need: look-up, whose fact, rule upon rule.
DRILLS = ("pairs", "lives", "rules")
DRILL_WEIGHTS = (0.35, 0.35, 0.3)
UPDATE = "[STATE UPDATE] {} has just changed to {}; this overrides any earlier value. Apply the current value.\n"
END = "</s>"

Row = list[tuple[str, float]]  # text, and how much each of its tokens counts in the loss; 0: hardly


@dataclass(frozen=True)
class Words:
    """The words of a pair family and what its test split holds out."""

    spec: family.FamilyFile
    slots: dict[str, list[Any]]
    values: tuple[str, ...]
    actions: tuple[str, ...]
    names: tuple[str, ...]
    held_out: frozenset


@lru_cache(maxsize=2)
def words(name: str) -> Words:
    """Read a family file; hold out the value and action pairs (gate) or person-value pairs (badge) of its test."""
    file = family.find(name)
    slots: dict[str, list[Any]] = dict(file.spec.slots)
    cases = slots["case"]
    test = {c.label for c in sampling._contents(file) if c.split == "test"}
    held = [c for c in cases if f"{name}:{c['id']}" in test]
    values = sorted({c[k] for c in cases for k in "ab"})
    if name == "gate":
        out = {frozenset((c["a"], c["b"])) for c in held} | {frozenset((c["x"], c["y"])) for c in held}
        return Words(
            file, file.spec.slots, tuple(values), tuple(sorted({c[k] for c in cases for k in "xy"})), (), frozenset(out)
        )
    others = [e for part in ("before", "after") for e in slots[part]]
    values = sorted({*values, *(e["value"] for e in others)})
    names = sorted({*(c["name"] for c in cases), *(e["name"] for e in others)})
    out = {(c["name"], c[k]) for c in held for k in "ab"}
    return Words(file, slots, tuple(values), (), tuple(names), frozenset(out))


def _render(name: str, slots: dict, lines: list[str]) -> list[tuple[str, str]]:
    """The family's prompt as (region, text) with its slots filled; the template stands in the family's file alone."""
    done = []
    for _, group in words(name).spec.spec.turns():
        for region, text in group:
            done += [
                (region, sampling._fill(text, {**slots, "filler": line}))
                for line in (lines if "{filler}" in text else [""])
            ]
    return done


def _lines(rng: Random, name: str, count: int) -> list[str]:
    own = words(name).spec.filler_lines
    return [rng.choice(own) for _ in range(count)]


def gate(rng: Random, length: int) -> Row:
    """One gated decision. Some rows state the signal anew after the rule, by an update or by the bare line."""
    w = words("gate")
    a, b = _two(rng, w.values)
    x, y = _two(rng, w.actions)
    field, trigger = rng.choice((a, b)), rng.choice((a, b))
    slots = {
        "desk": rng.choice(w.slots["desk"]),
        "name": rng.choice(w.slots["name"]),
        "item": rng.choice(w.slots["item"]),
        "polarity": {"trigger": trigger},
        "case": {"x": x, "y": y},
        "field": field,
    }
    parts = _render("gate", slots, _lines(rng, "gate", max(0, (length - 46) // 9)))
    texts = [text for _, text in parts]
    style = rng.random()
    if style < 0.15:  # an update, before the request or before the decision
        field = rng.choice((a, b))
        texts.insert(len(texts) - rng.choice((1, 2)), UPDATE.format("signal", field))
    elif style < 0.20:  # the signal's own line moved behind everything
        texts.insert(len(texts) - 1, texts.pop(1))
    return [("".join(texts), 0.0), (f" {x if field == trigger else y}" + END, 1.0)]


def _two(rng: Random, own: tuple[str, ...]) -> tuple[str, str]:
    """Two values or actions of the family, or of all words: else it could be learned which of them never meet."""
    while True:
        a, b = rng.sample(own if rng.random() < 0.6 else _plain_words(), 2)
        if frozenset((a, b)) not in words("gate").held_out:
            return a, b


def badge(rng: Random, length: int) -> Row:
    """Several people with a badge each; some are asked for after the neutral lines."""
    w = words("badge")
    count = 3 if rng.random() < 0.5 else rng.randrange(2, 9)
    while True:
        names, values = rng.sample(w.names, count), rng.sample(w.values, count)
        if rng.random() < 0.4:
            names, values = zip(*any_pairs(rng, count), strict=True)
        if w.held_out.isdisjoint(zip(names, values, strict=True)):
            break
    names, values = list(names), list(values)
    asked = rng.sample(range(count), min(count, 1 + (length - 40) // 60))
    first = asked[0]
    order = [(names[i], values[i]) for i in range(count)]
    slots = {
        "desk": rng.choice(w.slots["desk"]),
        "item": rng.choice(w.slots["item"]),
        "before": {"name": "{before}", "value": "x"},
        "after": {"name": "x", "value": "x"},
        "case": {"name": names[first]},
        "field": values[first],
    }
    facts = "".join(f"The badge of {a} is {b}.\n" for a, b in order)
    lines = _lines(rng, "badge", max(0, (length - 24 - 8 * count - 11 * len(asked)) // 9))
    texts = [
        facts if text.startswith("The badge of ") else text
        for _, text in _render("badge", {**slots, "before": {"name": "x", "value": "x"}}, lines)
    ]
    if rng.random() < 0.1:
        values[first] = rng.choice([v for v in w.values if (names[first], v) not in w.held_out])
        texts.insert(len(texts) - rng.choice((1, 2)), UPDATE.format(f"badge of {names[first]}", values[first]))
    row: Row = [("".join(texts), 0.0), (f" {values[first]}" + END, 1.0)]
    for i in asked[1:]:
        row += [(f"\nAnswer: The badge of {names[i]} is", 0.0), (f" {values[i]}" + END, 1.0)]
    return row


def _questions(asked: list) -> Row:
    row: Row = []
    for number, q in enumerate(asked):
        row += [(q.text if number == 0 else "\n" + q.suffix, 0.0), (q.answer + END, 1.0)]
    return row


def biographies(rng: Random, length: int) -> Row:
    """Several people, several questions."""
    facts = 4 if rng.random() < 0.5 else rng.randrange(1, 8)
    count = rng.randrange(1, 7) if length < 400 else rng.randrange(1, 9)
    each = 5 + 6.6 * facts
    people = max(1, min(24, round((length - 9 - 19 * count) / each)))
    count = max(1, min(people * facts, int((length - 9 - each * people) / 19)))
    written = biography.write(rng, biography.draw_people(rng, "train", people), facts)
    pool = [(i, fact) for i in range(people) for fact, _ in written[i].facts]
    return _questions([biography.ask(written, i, fact, "train") for i, fact in rng.sample(pool, count)])


def needles(rng: Random, length: int) -> Row:
    """Several needles, several questions."""
    count = 1 if rng.random() < 0.2 else rng.randrange(1, max(2, min(10, (length - 10) // 36) + 1))
    room = length - 10 - 27 * count
    drawn = any_pairs(rng, count) if rng.random() < 0.5 else needle.draw_needles(rng, "train", count)
    depths = [rng.random() for _ in drawn]
    texts, _ = needle.haystack(rng, drawn, depths, length=max(8, round(room * 0.9)))
    return _questions([needle.ask(texts, drawn, i, 0, "train") for i in rng.sample(range(count), count)])


@lru_cache(maxsize=1)
def _plain_words() -> tuple[str, ...]:
    values = [value for fact in biography.FACTS.values() for value in fact.values]
    every = (*biography.FIRST, *biography.LAST, *values, *needle.PLACES, *needle.WORDS, *needle.WHO, *needle.SPOTS)
    return tuple(dict.fromkeys((*every, *words("gate").values, *words("gate").actions, *words("badge").values)))


@lru_cache(maxsize=1)
def _kept_apart() -> frozenset[tuple[str, str]]:
    return words("badge").held_out | frozenset(needle.pairs("test"))


def any_pairs(rng: Random, count: int) -> list[tuple[str, str]]:
    """Keys and values among all words, so that no key tells anything about its value. Never a held-out pair."""
    while True:
        drawn = rng.sample(_plain_words(), 2 * count)
        found = list(zip(drawn[:count], drawn[count:], strict=True))
        if _kept_apart().isdisjoint(found):
            return found


def pairs(rng: Random, length: int) -> Row:
    """Needles or badges without anything between them, all of them asked for."""
    count = rng.randrange(2, max(3, min(16, length // 18) + 1))
    sentence = rng.choice(("The code word of the {} is", "The badge of {} is"))
    w = words("badge")
    if length >= 64 and rng.random() < 0.5:
        known = any_pairs(rng, count)
    elif "code" in sentence:
        known = needle.draw_needles(rng, "train", count)
    else:
        known = []
        while not known or not w.held_out.isdisjoint(known):
            known = list(zip(rng.sample(w.names, count), rng.sample(w.values, count), strict=True))
    facts = "\n".join(f"{sentence.format(a)} {b}." for a, b in known)
    row: Row = [(facts, 0.0)]
    for a, b in rng.sample(known, count):
        row += [(f"\nAnswer: {sentence.format(a)}", 0.0), (f" {b}{END}", 1.0)]
    return row


def lives(rng: Random, length: int) -> Row:
    """Short biographies, every fact asked for at once."""
    facts = rng.choice((1, 1, 2, 3))
    people = max(2, min(12, round(length / (5 + 17 * facts))))
    if length < 64:
        facts, people = 1, 2
    written = biography.write(rng, biography.draw_people(rng, "train", people), facts)
    every = [(one, fact, value) for one in written for fact, value in one.facts]
    row: Row = [("".join(one.text for one in written).rstrip("\n"), 0.0)]
    for one, fact, value in rng.sample(every, len(every)):
        row += [(f"\nAnswer: {biography.FACTS[fact].opening.format(one.name)}", 0.0), (f" {value}{END}", 1.0)]
    return row


def rules(rng: Random, length: int) -> Row:
    """One signal and one rule after another, each with its decision at once."""
    w = words("gate")
    values = rng.choice((w.values, _plain_words() if length >= 64 else w.values))
    field = rng.choice(values)
    row: Row = [(f"The signal is {field}.", 0.0)]
    others = [v for v in values if v != field and frozenset((field, v)) not in w.held_out]
    for other in rng.sample(others, min(len(others), max(1, (length - 5) // 19))):
        x, y = _two(rng, w.actions)
        trigger = rng.choice((field, other))
        rule = _render("gate", {**_ANY, "polarity": {"trigger": trigger}, "case": {"x": x, "y": y}}, [])[2][1]
        row += [(f"\n{rule}Decision:", 0.0), (f" {x if trigger == field else y}{END}", 1.0)]
    return row


_ANY = {"desk": "front", "name": "Anna", "item": "door", "field": "red"}

MAKERS = {
    "gate": gate,
    "badge": badge,
    "biography": biographies,
    "needle": needles,
    "pairs": pairs,
    "lives": lives,
    "rules": rules,
}


def row(rng: Random, task: str, length: int) -> Row:
    """A row of one task of about `length` tokens, not many more."""
    return MAKERS[task](rng, length)


def ids_of(row: Row, vocab: dict[str, int]) -> tuple[list[int], list[float]]:
    """Token ids and, per token, its weight in the loss; the end of an answer counts a tenth of the answer."""
    ids: list[int] = []
    weights: list[float] = []
    for text, weight in row:
        piece = [vocab[token] for token in cut(text.removesuffix(END))]
        ids += piece
        weights += [weight] * len(piece)
        if text.endswith(END):
            ids.append(EOS)
            weights.append(0.1 * weight)
    return ids, weights


def every_text() -> list[str]:
    """Texts that hold every word of the tasks, for the vocabulary."""
    rng = Random("vocabulary")
    texts = [UPDATE.format("the signal", "new") + " old value badge of is are not no yes"]
    for name in ("gate", "badge"):
        w = words(name)
        for case in w.slots["case"]:
            texts.append(" ".join(["", *case.values()]))
        for slot in w.slots.values():
            texts += [" ".join(["", *(e.values() if isinstance(e, dict) else [e])]) for e in slot]
        texts += [text for _, group in w.spec.spec.turns() for _, text in group]
        texts += [f"- {line}" for line in w.spec.filler_lines]
    for first in biography.FIRST:
        texts += [f" {first}", *(f" {last}" for last in biography.LAST)]
    for fact in biography.FACTS.values():
        texts += [fact.statement, fact.question, fact.opening, *(f" {value}" for value in fact.values)]
    for group in (
        needle.PLACES,
        needle.WORDS,
        needle.SIZES,
        needle.WHO,
        needle.DOES,
        needle.WHERE,
        needle.SPOTS,
        needle.WHEN,
    ):
        texts += [f" {word}" for word in group]
    # Literals between slots must not leave parts of a slot's name behind.
    texts = [sampling.SLOT.sub("", text).replace("{}", "").replace("{0}", "") for text in texts]
    for task in TASKS:
        texts += ["".join(t.removesuffix(END) for t, _ in row(rng, task, 200)) for _ in range(200)]
    return texts
