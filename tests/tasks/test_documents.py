"""Document QA: the answer stands in its gold document alone, splits, seeds, pieces that tokenise as one text."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from kvnotes_interp.errors import InputError
from kvnotes_interp.tasks import documents
from kvnotes_interp.tasks.documents import Question, biography, needle
from tests.tiny_tokenizer import train

NAMES = documents.names()
CONTENTS = {"gated": 64}  # of the family gate; the others have more than 200


def test_the_tasks_and_their_options() -> None:
    made = "aggregation biography biography_cut choices gated multikey needle tracking"
    assert " ".join(NAMES) == made
    assert all(documents.about(name).endswith(".") for name in NAMES)
    assert documents.options("biography") == {"documents": 5, "facts": 4}
    assert documents.options("needle") == {"length": 200, "depth": None, "documents": 1, "others": 0}


@pytest.mark.parametrize("name", NAMES)
def test_seed_prefix_and_keys(name: str) -> None:
    whole = documents.load(name, n=200, seed=3)
    assert documents.load(name, n=200, seed=3) == whole
    assert documents.load(name, n=40, seed=3) == whole[:40]
    assert documents.load(name, n=40, seed=4) != whole[:40]
    assert len({q.key for q in whole}) == 200
    assert all(re.fullmatch(rf"{name}\.[0-9a-f]{{12}}", q.key) for q in whole)
    assert [q.split for q in whole[:4]] == ["train", "test", "train", "test"]
    assert len({q.content for q in whole}) == CONTENTS.get(name, 200), "no content comes twice before the others"


@pytest.mark.parametrize("name", NAMES)
def test_splits_share_no_content_whatever_the_seed(name: str) -> None:
    train_part = {q.content for s in (0, 1) for q in documents.load(name, n=300, seed=s, split="train")}
    test_part = {q.content for s in (0, 2) for q in documents.load(name, n=300, seed=s, split="test")}
    assert not train_part & test_part


def test_another_process_with_another_hash_seed_draws_the_same() -> None:
    code = (
        "import sys; from kvnotes_interp.tasks import documents as d; "
        "print([q.key for t in d.names() for q in d.load(t, n=6)]); "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "77"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stdout.strip() == str([q.key for t in NAMES for q in documents.load(t, n=6)])


def read_biography(text: str) -> tuple[str, dict[str, str]]:
    """Name and facts of a biography, by patterns written here."""
    patterns = {
        "birthplace": r"was born in (\w+)\.",
        "home": r"lives in (\w+)\.",
        "job": r"works as a (\w+)\.",
        "instrument": r"plays the (\w+)\.",
        "pet": r"keeps a (\w+)\.",
        "drink": r"likes to drink (\w+)\.",
        "sport": r"enjoys (\w+)\.",
    }
    found = {fact: re.findall(pattern, text) for fact, pattern in patterns.items()}
    assert all(len(values) <= 1 for values in found.values())
    name = re.match(r"Biography of (\w+ \w+)\.", text)
    assert name
    return name[1], {fact: values[0] for fact, values in found.items() if values}


@pytest.mark.parametrize("count", [1, 2, 5, 12, 24])
def test_a_biography_question_is_answered_by_its_gold_document_alone(count: int) -> None:
    for q in documents.load("biography", n=60, documents=count):
        read = [read_biography(text) for text in q.documents]
        names = [word for name, _ in read for word in name.split()]
        assert len(set(names)) == 2 * count, "no shared first or last name"
        fact, person = str(q.detail("fact")), q.detail("person")
        assert [i for i, (name, _) in enumerate(read) if name == person] == list(q.gold)
        assert q.suffix.count(str(person)) == 2
        assert q.answer == f" {read[q.gold[0]][1][fact]}"
        assert all(len(facts) == 4 and set(facts) == set(read[0][1]) for _, facts in read)
        assert set(q.distractors) == {f" {facts[fact]}" for _, facts in read} - {q.answer}
        if count <= 12:
            assert len(q.distractors) == count - 1, "every person has a value of their own"
        assert all(facts.get("home") != facts.get("birthplace") for _, facts in read if "home" in facts)


def test_everyone_in_a_biography_question_is_of_its_split() -> None:
    assert not set(biography.people("train")) & set(biography.people("test"))
    assert len(biography.people("train")) + len(biography.people("test")) == 48 * 48
    for q in documents.load("biography", n=40):
        assert {read_biography(text)[0] for text in q.documents} <= set(biography.people(q.split))


def test_gold_and_facts_are_spread() -> None:
    drawn = documents.load("biography", n=600, documents=3)
    for kind in ({q.gold for q in drawn}, {q.detail("fact") for q in drawn}):
        assert len(kind) in (3, 7)
    share = sum(q.gold == (0,) for q in drawn) / 600
    assert 0.25 < share < 0.42


@pytest.mark.parametrize(("depth", "documents_"), [(0.0, 1), (0.5, 1), (1.0, 1), (None, 4), (0.5, 3)])
def test_the_needle_stands_once_at_its_depth(depth: float | None, documents_: int) -> None:
    for q in documents.load("needle", n=40, length=240, depth=depth, documents=documents_, others=2):
        text = " ".join(part.rstrip("\n") for part in q.documents)
        sentence = f"The code word of the {q.detail('place')} is{q.answer}."
        assert text.count(sentence) == 1
        assert sentence in q.documents[q.gold[0]]
        sentences = re.findall(r"[^.]+\.", text)
        assert 240 <= len(text.split()) < 252
        assert len([s for s in sentences if "code word" in s]) == 3 == 1 + len(q.distractors)
        neutral = [s for s in sentences if "code word" not in s]
        before = [s for s in sentences[: [s.strip() for s in sentences].index(sentence)] if s in neutral]
        assert abs(len(before) / len(neutral) - float(q.detail("depth"))) <= 0.5 / len(neutral) + 1e-9
        assert len(q.documents) == documents_


def test_pieces_and_joint_text_have_the_same_tokens() -> None:
    drawn = [q for name in NAMES for q in documents.load(name, n=10, documents=3)]
    tokenizer = train([q.text + q.answer for q in drawn], vocab=900)
    for q in drawn:
        parts = [i for piece in (*q.pieces, q.answer) for i in tokenizer(piece)["input_ids"]]
        assert parts == tokenizer(q.text + q.answer)["input_ids"]
    q = drawn[0]  # control: a cut after the space moves the token borders
    loose = [i for piece in (q.text + " ", q.answer[1:]) for i in tokenizer(piece)["input_ids"]]
    assert loose != tokenizer(q.text + q.answer)["input_ids"]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: documents.load("biografy"), 'Did you mean "biography"'),
        (lambda: documents.load("needle", dept=0.5), 'Did you mean "depth"'),
        (lambda: documents.load("needle", depth=1.5), "between 0"),
        (lambda: documents.load("needle", length=20, others=3), "too short"),
        (lambda: documents.load("biography", documents=25), "at most 24"),
        (lambda: documents.load("biography", n=0), "n is 0"),
        (lambda: documents.load("biography", seed=0.5), "seed is 0.5"),  # pyright: ignore[reportArgumentType]
        (lambda: documents.load("biography", split="tset"), 'Did you mean "test"'),  # pyright: ignore[reportArgumentType]
        (lambda: documents.load("biography", n=1)[0].detail("fct"), 'Did you mean "fact"'),
    ],
)
def test_wrong_names_and_values_say_what_to_do(call, words: str) -> None:
    with pytest.raises(InputError, match=words):
        call()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gold": ()}, "gold is"),
        ({"gold": (2,)}, "gold is"),
        ({"answer": "x"}, "begin with a space"),
        ({"suffix": "Answer: "}, "must not end"),
        ({"distractors": (" x",)}, "also a distractor"),
    ],
)
def test_a_question_checks_itself(change: dict, words: str) -> None:
    fields = {
        "family": "f",
        "key": "k",
        "content": "c",
        "split": "test",
        "prefix": "P\n",
        "documents": ("A\n", "B\n"),
        "suffix": "Answer:",
        "answer": " x",
        "gold": (1,),
    }
    assert Question(**fields).text == "P\nA\nB\nAnswer:"
    with pytest.raises(InputError, match=words):
        Question(**{**fields, **change})


def test_needles_of_a_question_are_different() -> None:
    for q in documents.load("needle", n=20, length=300, others=8):
        assert len({q.answer, *q.distractors}) == 9
    test = needle.pairs("test")
    assert len(needle.pairs("train")) == 7 * len(test) == 7 * 24 * 40 // 8
    assert {len([a for a, _ in test if a == place]) for place in needle.PLACES} == {5}
    assert {len([b for _, b in test if b == word]) for word in needle.WORDS} == {3}
