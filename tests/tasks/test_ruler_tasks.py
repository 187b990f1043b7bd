"""Multi-key, tracking, aggregation and multiple choice: each prompt is answered by a reader written here.

The readers see the prompt's text alone, so an answer that the text does not give, or gives twice, is found.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from kvnotes_interp.errors import InputError
from kvnotes_interp.operators.blocks import cut_texts
from kvnotes_interp.organisms.trained import FOLDER
from kvnotes_interp.sources import local_tokenizer
from kvnotes_interp.tasks import documents
from kvnotes_interp.tasks.documents import biography, needle
from kvnotes_interp.tasks.documents.aggregation import counts_of

STATED = r"The code word of the (\w+) is (\w+)\."
LINK = r"The (\w+) has the code word of the (\w+)\."
SAID = {
    "born": r"was born in (\w+)\.",
    "live": r"lives in (\w+)\.",
    "job": r"works as a (\w+)\.",
    "instrument": r"plays the (\w+)\.",
    "pet": r"keeps a (\w+)\.",
    "drink": r"likes to drink (\w+)\.",
    "sport": r"enjoys (\w+)\.",
}
OPTIONS = {  # small and large, one document and several
    "multikey": [{}, {"keys": 2, "length": 16}, {"keys": 24, "length": None, "documents": 4}, {"depth": 0.0}],
    "tracking": [{}, {"hops": 0, "documents": 3}, {"chains": 1, "hops": 6}, {"chains": 6, "hops": 3, "length": 400}],
    "aggregation": [{}, {"words": 40, "length": 500, "documents": 5}, {"words": 3, "length": 30, "ratio": 1}],
    "choices": [
        {},
        {"choices": 2, "people": 2, "length": 64},
        {"choices": 8, "people": 24, "length": 800},
        {"documents": 4, "length": 1000},
    ],
}
CASES = [(name, options) for name, several in OPTIONS.items() for options in several]


def body(prompt: str) -> tuple[str, str]:
    """What stands before and from the question on."""
    text, _, question = prompt.partition("Question: ")
    return text, question


def read_place(prompt: str) -> str:
    """Follows stated code words and links, in the order of the text; a link to what is not known yet gives nothing."""
    text, question = body(prompt)
    known: dict[str, str] = {}
    for found in re.finditer(f"{STATED}|{LINK}", text):
        place, word, heir, source = found.groups()
        assert (place or heir) not in known, "stated twice"
        if word or source in known:
            known[place or heir] = word or known[source]
    asked = re.match(r"What is the code word of the (\w+)\?\nAnswer: The code word of the \1 is$", question)
    assert asked
    return known[asked[1]]


def read_commonest(prompt: str) -> str:
    text, question = body(prompt)
    assert question == "Which word occurs most often?\nAnswer: The word that occurs most often is"
    lists = re.findall(r"^Words: (.*)\.$", text, flags=re.MULTILINE)
    (first, most), (_, next_) = Counter(w for one in lists for w in one.split(", ")).most_common(2)
    assert most > next_
    return first


def read_letter(prompt: str) -> str:
    text, question = body(prompt)
    first, *options, last = question.split("\n")
    assert last == "Answer:"
    offered = {option[3:]: option[0] for option in options}
    assert "".join(offered.values()) == "ABCDEFGH"[: len(options)]
    assert all(re.fullmatch(r"[A-H]\. \w+", option) for option in options)
    if place := re.match(r"What is the code word of the (\w+)\?", first):
        values = re.findall(rf"The code word of the {place[1]} is (\w+)\.", text)
    else:
        name = re.search(r"[A-Z]\w+ [A-Z]\w+", first.partition(" ")[2])
        assert name
        (lives,) = re.findall(rf"^Biography of {name[0]}\.(.*)$", text, flags=re.MULTILINE)
        (fact,) = [fact for fact in SAID if re.search(rf"\b{fact}\b", first)]
        values = re.findall(SAID[fact], lives)
    (value,) = values
    assert all(re.search(rf"\b{other}\b", text) for other in offered), "every option stands in the text"
    return offered[value]


READERS = {
    "multikey": read_place,
    "tracking": read_place,
    "aggregation": read_commonest,
    "choices": read_letter,
}


@pytest.mark.parametrize(("name", "options"), CASES)
def test_the_text_gives_the_answer(name: str, options: dict) -> None:
    for q in documents.load(name, n=48, seed=1, **options):
        assert q.answer == f" {READERS[name](q.text)}"
        assert q.family == name
        assert len(q.documents) == options.get("documents", 1)
        assert len(set(q.distractors)) == len(q.distractors)
        asked: int | None = {**documents.options(name), **options}["length"]
        words = sum(len(text.split()) for text in q.documents)
        if name == "aggregation":  # the label of each document aside
            assert words - len(q.documents) == asked
        elif asked is not None:
            assert asked <= words < asked + 12


@pytest.mark.parametrize("name", ["multikey", "tracking", "choices"])
def test_the_gold_documents_are_needed_and_enough(name: str) -> None:
    several = {"multikey": {"documents": 4}, "tracking": {"documents": 6}, "choices": {"documents": 8}}
    for q in documents.load(name, n=40, seed=0, split=None, **several[name]):
        gold = replace(q, documents=tuple(q.documents[i] for i in q.gold), gold=(0,))
        if name == "choices":  # the wrong options stand in the other documents
            assert str(q.detail("value")) in gold.documents[0]
        else:
            assert READERS[name](gold.text) == q.answer[1:]
        for i in q.gold:  # control: without any one of them there is no answer
            fewer = replace(q, documents=tuple(t for j, t in enumerate(q.documents) if j != i), gold=(0,))
            with pytest.raises((KeyError, ValueError)):
                READERS[name](fewer.text)


def test_multikey_is_needle_with_more_keys() -> None:
    drawn = documents.load("multikey", n=20, keys=5, depth=0.3)
    plain = documents.load("needle", n=20, others=4, depth=0.3)
    assert [(q.text, q.answer, q.distractors) for q in drawn] == [(q.text, q.answer, q.distractors) for q in plain]
    assert [q.content for q in drawn] == [q.content.replace("needle", "multikey") for q in plain]
    for q in documents.load("multikey", n=20, keys=24, length=None):
        found = re.findall(STATED, q.documents[0])
        assert re.sub(STATED, "", q.documents[0]).strip() == "", "needles alone"
        assert {place for place, _ in found} == set(needle.PLACES)
        assert {f" {word}" for _, word in found} == {q.answer, *q.distractors}


@pytest.mark.parametrize(("chains", "hops"), [(1, 1), (3, 2), (4, 5), (24, 0)])
def test_chains_have_their_length_and_the_last_place_is_asked(chains: int, hops: int) -> None:
    for q in documents.load("tracking", n=30, chains=chains, hops=hops, length=400):
        text, _ = body(q.text)
        source = dict(re.findall(LINK, text))
        words = dict(re.findall(STATED, text))
        assert len(source) == chains * hops
        assert len(words) == chains == len(q.distractors) + 1
        assert len({*source, *words}) == chains * (hops + 1), "no place is used twice"
        place, walked = str(q.detail("place")), 0
        assert place not in source.values(), "nothing follows it"
        while place in source:
            place, walked = source[place], walked + 1
        assert (walked, q.answer) == (hops, f" {words[place]}")
        assert {f" {word}" for word in words.values()} - {q.answer} == set(q.distractors)
        if hops:  # no sentence holds both, so no single one answers
            assert not re.search(rf"{q.detail('place')}\b[^.]*{q.answer}", text)


def test_the_chains_of_tracking_are_mixed() -> None:
    """Else the nearest stated word would do."""
    nearest = 0
    for q in documents.load("tracking", n=200):
        before = body(q.text)[0].split(f"The {q.detail('place')} has")[0]
        nearest += re.findall(STATED, before)[-1][1] == q.answer[1:]
    assert nearest / 200 < 0.6


@given(length=st.integers(6, 90), words=st.integers(3, 12), ratio=st.floats(1, 6))
@settings(max_examples=150, deadline=None)
def test_counts_are_those_of_the_smallest_lead_or_there_are_none(length: int, words: int, ratio: float) -> None:
    fits = [
        first
        for first in range(1, length)
        for second in range(1, first)
        if first >= ratio * second
        and (rest := length - first - second) >= words - 2
        and -(-rest // (words - 2)) < second
    ]
    if not fits:
        with pytest.raises(InputError, match="too short"):
            counts_of(length, words, ratio)
        return
    first, second, *others = counts_of(length, words, ratio)
    assert first == min(fits) >= ratio * second
    assert first > second > max(others) >= min(others) >= 1
    assert max(others) - min(others) <= 1
    assert (first + second + sum(others), len(others)) == (length, words - 2)


def test_lists_hold_the_counts_drawn_and_all_documents_are_gold() -> None:
    for q in documents.load("aggregation", n=40, length=120, words=9, ratio=3, documents=4):
        found = Counter(word for text in q.documents for word in text.rstrip(".\n").split(": ")[1].split(", "))
        assert sorted(found.values(), reverse=True) == list(counts_of(120, 9, 3))
        (first, most), (second, next_) = found.most_common(2)
        assert (most, next_) == (q.detail("count"), q.detail("second"))
        assert q.content == f"aggregation:{'|'.join(sorted((first, second)))}"
        assert {f" {word}" for word in found} == {q.answer, *q.distractors}
        assert q.gold == (0, 1, 2, 3)
    hard = documents.load("aggregation", n=1, ratio=1)[0]
    assert hard.detail("count") == int(hard.detail("second")) + 1
    everywhere = {q.answer for q in documents.load("aggregation", n=300, split="test")}
    assert everywhere == {f" {word}" for word in needle.WORDS}


def test_letters_are_even_and_both_kinds_of_facts_are_asked() -> None:
    drawn = documents.load("choices", n=400)
    letters = Counter(q.answer for q in drawn)
    assert set(letters) == {" A", " B", " C", " D"}
    assert min(letters.values()) > 70
    assert Counter(q.detail("about") for q in drawn) == {"person": 200, "place": 200}
    longest = [max(re.findall(r"^[A-D]\. (\w+)$", q.suffix, re.MULTILINE), key=len) for q in drawn]
    assert sum(word == q.detail("value") for word, q in zip(longest, drawn, strict=True)) / 400 < 0.4
    for q in drawn[:50]:
        assert {q.answer, *q.distractors} == set(letters)


def test_people_and_code_words_of_a_text_are_of_its_split() -> None:
    for q in documents.load("choices", n=30):
        assert set(re.findall(STATED, q.text)) <= set(needle.pairs(q.split))
        assert set(re.findall(r"Biography of (\w+ \w+)\.", q.text)) <= set(biography.people(q.split))


def test_the_organisms_words_are_enough_for_places_and_chains() -> None:
    """One token per word, all of them known, so that `organism:trained` can be asked or trained."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(FOLDER)
    for name in ("multikey", "tracking"):
        for q in documents.load(name, n=60):
            assert tokenizer.unk_token_id not in tokenizer(q.text + q.answer)["input_ids"]
    letters = tokenizer(" A")["input_ids"]  # control: letters are not among its words
    assert letters == [tokenizer.unk_token_id]


def test_a_published_tokenizer_cuts_at_the_pieces_and_tells_answers_by_their_first_token() -> None:
    tokenizer = local_tokenizer("smollm2-135m")
    if tokenizer is None:
        pytest.skip("SmolLM2-135M is not on this machine")
    for name, options in CASES:
        for q in documents.load(name, n=4, **options):
            cut = cut_texts(tokenizer, q.prefix, q.documents, q.suffix, answer=q.answer)  # refuses tokens of two pieces
            assert len(cut.blocks.chunks) == len(q.documents)
            others = [tokenizer(text)["input_ids"][0] for text in q.distractors]
            assert cut.answer[0] not in others


REFUSED = {
    "multikey": [({"keys": 1}, "at least 2"), ({"keys": 25}, "at most 24"), ({"keys": 9, "length": 64}, "too short")],
    "tracking": [
        ({"chains": 9, "hops": 2}, "at most 8"),
        ({"hops": -1}, "at least 0"),
        ({"length": 70}, "3 chains of 26 words"),
        ({"documents": 20}, "20 documents"),
    ],
    "aggregation": [
        ({"words": 2}, "at least 3"),
        ({"ratio": 0.5}, "ratio is 0.5"),
        ({"ratio": float("nan")}, "ratio is nan"),
        ({"length": 15}, "12 different words"),
        ({"documents": 201}, "at most 200"),
    ],
    "choices": [
        ({"choices": 9}, "at most 8"),
        ({"people": 3}, "people is 3; it must be a whole number of at least 4"),
        ({"documents": 9}, "at most 8"),
        ({"length": 255}, "too short for 8 people"),
    ],
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_does_not_fit_is_refused(name: str) -> None:
    for options, words in REFUSED[name]:
        with pytest.raises(InputError, match=words):
            documents.load(name, **options)


def test_the_command_shows_an_example_of_every_document_task() -> None:
    from kvnotes_interp.cli.app import app

    listed = json.loads(CliRunner().invoke(app, ["tasks", "--json"]).stdout)
    for name in documents.names():
        assert listed[name] == {"kind": "question", "about": documents.about(name)}
        shown = CliRunner().invoke(app, ["tasks", name, "--seed", "3"])
        assert (shown.exit_code, "distractors" in shown.stdout) == (0, True)
        one = json.loads(CliRunner().invoke(app, ["tasks", name, "--seed", "3", "--json"]).stdout)
        (q,) = documents.load(name, n=1, seed=3)
        assert one["prefix"] + "".join(one["documents"]) + one["suffix"] == q.text
        assert (one["answer"], one["options"]) == (q.answer, documents.options(name))
    wrong = CliRunner().invoke(app, ["tasks", "trackin"])
    assert wrong.exit_code != 0
    assert 'Did you mean "tracking"?' in f"{wrong.output}{wrong.exception}"
