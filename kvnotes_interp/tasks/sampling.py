"""Drawing instances from a family: seeded, spread over contents, split by content.

A *content* is what makes two instances dependent. Draws go round-robin over contents, train and test in turn,
and each content has its own random stream, so a smaller `n` is a prefix of a larger one and the split of a
content never depends on `n` or on the seed. Only `random.Random` is used, seeded with text.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from kvnotes_interp.errors import InputError, nearest
from kvnotes_interp.tasks.family import SLOT, FamilyFile, entry_label
from kvnotes_interp.tasks.pair import Message, Pair, Piece, Prompt, Split, plain_text

SPLITS: tuple[Split, ...] = ("train", "test")
_DECK = 4096  # below this many combinations they are shuffled as a whole, above it drawn until new

Choice = tuple[str, str]  # a value of the field and the answer it leads to, both still templates


@dataclass(frozen=True)
class _Content:
    label: str
    split: Split
    pairs: tuple[tuple[Choice, Choice], ...]  # value pairs that may be drawn
    fixed: Mapping[str, Any]  # the slot entry that this content stands for, if it is a slot's


def default_options(family: FamilyFile) -> dict[str, Any]:
    """Options that `load` takes for this family, with their defaults."""
    options: dict[str, Any] = {}
    if family.spec.chat:
        options["chat"] = True
    if family.spec.fillers:
        options["fillers"] = family.spec.fillers.count
    return options


def count_instances(family: FamilyFile, split: Split | None = None) -> tuple[int, int]:
    """(instances, contents): how many instances differ by more than filler lines and old/new order."""
    contents = [c for c in _contents(family) if split in (None, c.split)]
    return sum(len(_combinations(family, c)) for c in contents), len(contents)


def sample(family: FamilyFile, *, n: int, seed: int, split: str | None, options: Mapping[str, Any]) -> list[Pair]:
    """Draw `n` distinct pairs. See `tasks.load`."""
    chosen = _check_options(family, options)
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise InputError(f"n is {n!r}; it must be a whole number of at least 1.")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise InputError(f"seed is {seed!r}; it must be a whole number.")
    if split not in (None, *SPLITS):
        raise InputError(f'split is "{split}"; it must be "train", "test" or None.{nearest(str(split), SPLITS)}')
    contents = _contents(family)
    streams = [
        _round_robin(family, _spread(family, [c for c in contents if c.split == part], seed), seed, chosen)
        for part in SPLITS
        if split in (None, part)
    ]
    pairs = list(itertools.islice(_alternate(streams), n))
    if len(pairs) < n:
        where = f' in split "{split}"' if split else ""
        raise InputError(
            f'Family "{family.name}" has {len(pairs)} distinct instances{where}, fewer than n={n}. '
            f"Ask for n={len(pairs)} or fewer, or add values or slot entries to a copy of its file."
        )
    return pairs


def _check_options(family: FamilyFile, options: Mapping[str, Any]) -> dict[str, Any]:
    chosen = default_options(family)
    for name, value in options.items():
        if name not in chosen:
            known = ", ".join(chosen) or "none"
            raise InputError(
                f'Family "{family.name}" has no option "{name}".{nearest(name, chosen)} Its options: {known} '
                "(besides n, seed and split)."
            )
        if name == "chat" and not isinstance(value, bool):
            raise InputError(f"chat is {value!r}; it must be True or False.")
        if name == "fillers":
            have = len(family.filler_lines)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= have:
                raise InputError(f'fillers is {value!r}; family "{family.name}" has 0 to {have} filler lines.')
        chosen[name] = value
    return chosen


def _contents(family: FamilyFile) -> list[_Content]:
    spec = family.spec
    entries = spec.entries()
    if spec.content != "field":
        pairs = tuple(_value_pairs(family, entries))
        return [
            _Content(f"{family.name}:{entry_label(entry)}", SPLITS[place % 2], pairs, {spec.content: entry})
            for place, entry in enumerate(spec.slots[spec.content])
        ]
    contents = [
        _Content(f"{family.name}:{pair[0][0]}|{pair[1][0]}", part, (pair,), {})
        for number, part in enumerate(SPLITS)
        for pair in _value_pairs(family, _half(entries, number))
    ]
    if not contents:
        raise InputError(
            f'Family "{family.name}": content is "field", but there are too few values to split into train and test. '
            "Give every answer two values or more, or name a slot as content."
        )
    return contents


def _half(entries: list[Choice], number: int) -> list[Choice]:
    """Every second value of each answer; if every answer has one value, every second answer."""
    groups: dict[str, list[Choice]] = {}
    for entry in entries:
        groups.setdefault(entry[1], []).append(entry)
    if all(len(group) == 1 for group in groups.values()):
        return entries[number::2]
    return [entry for group in groups.values() for entry in group[number::2]]


def _value_pairs(family: FamilyFile, entries: list[Choice]) -> Iterator[tuple[Choice, Choice]]:
    """All unordered pairs of values that lead to different answers (control, copy: of different values)."""
    for first, second in itertools.combinations(entries, 2):
        if isinstance(family.spec.values, list) or first[1] != second[1]:
            yield first, second


def _spread(family: FamilyFile, contents: list[_Content], seed: int) -> list[_Content]:
    """Contents in random order, in rounds in which no value of the field is used twice."""
    rng = Random(f"{family.name}|{seed}|order")
    waiting = rng.sample(contents, len(contents))
    if family.spec.content != "field":
        return waiting
    ordered: list[_Content] = []
    while waiting:
        used: set[str] = set()
        later: list[_Content] = []
        for content in waiting:
            values = {value for value, _ in content.pairs[0]}
            if used & values:
                later.append(content)
            else:
                used |= values
                ordered.append(content)
        waiting = later
    return ordered


def _alternate(streams: list[Iterator[Pair]]) -> Iterator[Pair]:
    """One from each stream in turn; an exhausted stream drops out."""
    live = list(streams)
    while live:
        for stream in list(live):
            pair = next(stream, None)
            if pair is None:
                live.remove(stream)
            else:
                yield pair


def _round_robin(family: FamilyFile, contents: list[_Content], seed: int, options: Mapping[str, Any]) -> Iterator[Pair]:
    return _alternate([_instances(family, content, seed, options) for content in contents])


def _instances(family: FamilyFile, content: _Content, seed: int, options: Mapping[str, Any]) -> Iterator[Pair]:
    """All distinct instances of one content, in random order."""
    rng = Random(f"{family.name}|{seed}|{content.label}")
    table = _combinations(family, content)
    for index in _random_order(rng, len(table)):
        (first, second), slots = table[index]
        if rng.random() < 0.5:
            first, second = second, first
        lines = rng.sample(family.filler_lines, options.get("fillers", 0))
        yield _build(family, content, first, second, slots, lines, options.get("chat", False))


class _Combinations:
    """The product of value pairs and slot entries as a sequence that is never written out."""

    def __init__(self, content: _Content, free: Mapping[str, list[Any]]) -> None:
        self.content = content
        self.free = free

    def __len__(self) -> int:
        size = len(self.content.pairs)
        for entries in self.free.values():
            size *= len(entries)
        return size

    def __getitem__(self, index: int) -> tuple[tuple[Choice, Choice], dict[str, Any]]:
        slots = dict(self.content.fixed)
        for name, entries in self.free.items():
            index, place = divmod(index, len(entries))
            slots[name] = entries[place]
        return self.content.pairs[index], slots


def _combinations(family: FamilyFile, content: _Content) -> _Combinations:
    """Slots that no text of this content can reach are left out: they would only repeat instances."""
    spec = family.spec
    texts = [text for _, group in spec.turns() for _, text in group] + [
        t for pair in content.pairs for c in pair for t in c
    ]
    texts += [*(spec.answers or []), spec.label]
    reached: dict[str, list[Any]] = {}
    while texts:
        for slot in SLOT.findall(texts.pop()):
            name = slot.split(".")[0]
            if name in spec.slots and name not in reached:
                entries = [content.fixed[name]] if name in content.fixed else spec.slots[name]
                reached[name] = entries
                for entry in entries:
                    texts += entry.values() if isinstance(entry, dict) else [entry]
    free = {name: entries for name, entries in reached.items() if name not in content.fixed}
    return _Combinations(content, dict(sorted(free.items())))


def _random_order(rng: Random, size: int) -> Iterator[int]:
    if size <= _DECK:
        yield from rng.sample(range(size), size)
        return
    seen: set[int] = set()
    while len(seen) < size:
        index = rng.randrange(size)
        if index not in seen:
            seen.add(index)
            yield index


def _build(
    family: FamilyFile,
    content: _Content,
    old: Choice,
    new: Choice,
    slots: Mapping[str, Any],
    lines: list[str],
    chat: bool,
) -> Pair:
    spec = family.spec
    values = [_fill(value, slots) for value, _ in (old, new)]
    answers = [_fill(answer, {**slots, "field": value}) for (_, answer), value in zip((old, new), values, strict=True)]
    if spec.answers:
        answers = [_fill(answer, slots) for answer in spec.answers]
    if not all(values) or values[0] == values[1] or answers[0] == answers[1]:
        raise InputError(
            f'Family "{family.name}", content "{content.label}": values {values} and answers {answers} must differ '
            "and not be empty. Correct the slots they come from."
        )
    prompts = [_prompt(family, {**slots, "field": value}, lines, chat) for value in values]
    digest = hashlib.sha256(repr((chat, *map(plain_text, prompts), answers)).encode()).hexdigest()[:12]
    label = re.sub(r"[^a-z0-9]+", "-", content.label.split(":", 1)[1].lower()).strip("-")[:40]
    return Pair(
        family=family.name,
        kind=spec.kind,
        key=".".join(part for part in (family.name, label, digest) if part),
        content=content.label,
        split=content.split,
        old=prompts[0],
        new=prompts[1],
        answer_old=answers[0],
        answer_new=answers[1],
        chat=chat,
        label=_fill(spec.label, slots),
        **_outcomes(family, old, new, slots),
    )


def _outcomes(family: FamilyFile, old: Choice, new: Choice, slots: Mapping[str, Any]) -> dict[str, str]:
    """The answers before their last words are filled in, where that tells them apart."""
    names = [_outcome(answer, slots) for _, answer in (old, new)]
    if family.spec.answers or names[0] == names[1]:
        return {}
    return {"outcome_old": names[0], "outcome_new": names[1]}


def _outcome(answer: str, slots: Mapping[str, Any]) -> str:
    """Fill slots that stand for other slots (a polarity's answer is one of the case's), and leave the others."""

    def put(match: re.Match[str]) -> str:
        base, _, key = match[1].partition(".")
        entry = slots.get(base, "")
        text = entry[key] if key else entry
        return _outcome(text, slots) if SLOT.search(text) else match[0]

    return SLOT.sub(put, answer)


def _prompt(family: FamilyFile, slots: Mapping[str, Any], lines: list[str], chat: bool) -> Prompt:
    turns: list[tuple[str, tuple[Piece, ...]]] = []
    names: dict[str, int] = {}
    place = 0
    for role, group in family.spec.turns():
        pieces: list[Piece] = []
        for region, text in group:
            if "{filler}" in text:
                filled = [_fill(text, {**slots, "filler": line}) for line in lines]
                pieces += [Piece(line, region, f"filler.{i}") for i, line in enumerate(filled)]
            else:
                pieces += _fragments(text, region, place, slots, names)
            place += 1
        turns.append((role, _stripped(pieces) if role else tuple(pieces)))
    if chat:
        return tuple(Message(role, pieces) for role, pieces in turns)
    plain: list[Piece] = []
    for number, (_, turn) in enumerate(turns):
        if plain and turn:
            plain.append(Piece("\n\n", turn[0].region, f"turn.{number}"))
        plain += turn
    return tuple(plain)


def _fragments(text: str, region: Any, place: int, slots: Mapping[str, Any], names: dict[str, int]) -> list[Piece]:
    """A piece of the file cut at its slots. Literals are anchored by place, slots by name."""
    pieces: list[Piece] = []
    for number, part in enumerate(SLOT.split(text)):
        if number % 2 == 0:
            piece = Piece(part, region, f"{place}.{number // 2}")
        else:
            names[part] = names.get(part, 0) + 1
            anchor = part if names[part] == 1 else f"{part}#{names[part]}"
            piece = Piece(_lookup(part, slots), "field" if part == "field" else region, anchor)
        if piece.text:
            pieces.append(piece)
    return pieces


def _stripped(pieces: list[Piece]) -> tuple[Piece, ...]:
    """Chat turns carry no outer white space: many templates trim it, and spans could not be found."""
    if pieces:
        pieces[0] = Piece(pieces[0].text.lstrip(), pieces[0].region, pieces[0].anchor)
        pieces[-1] = Piece(pieces[-1].text.rstrip(), pieces[-1].region, pieces[-1].anchor)
    return tuple(piece for piece in pieces if piece.text)


def _lookup(name: str, slots: Mapping[str, Any]) -> str:
    base, _, key = name.partition(".")
    entry = slots[base]
    return _fill(entry[key] if key else entry, slots)


def _fill(text: str, slots: Mapping[str, Any], depth: int = 0) -> str:
    """Replace every {slot}; entries may hold further slots."""
    if depth > 8:
        raise InputError(f"Slots refer to each other in a circle near {text!r}. Write one of them out.")

    def put(match: re.Match[str]) -> str:
        base, _, key = match[1].partition(".")
        entry = slots[base]
        return _fill(entry[key] if key else entry, slots, depth + 1)

    return SLOT.sub(put, text)
