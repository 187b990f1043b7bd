"""Pairs in documents: where the field is, what follows it, and that the trained organism is competent."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvnotes_interp import tasks
from kvnotes_interp.errors import InputError
from kvnotes_interp.organisms import trained
from kvnotes_interp.tasks.documents.biography import FACTS
from kvnotes_interp.tasks.pair import Pair, pieces_of

FAMILIES = ("biography_pairs", "gate_documents")


def documents_of(pair: Pair) -> dict[int, str]:
    """Text of each document, -1 for what is outside."""
    out: dict[int, str] = {}
    for piece in pieces_of(pair.old):
        out[piece.document] = out.get(piece.document, "") + piece.text
    return out


@pytest.fixture(scope="module")
def organism() -> tuple[Any, Any]:
    return trained.build()


@pytest.mark.parametrize("name", FAMILIES)
def test_documents_are_whole_and_the_field_wanders_among_them(name: str) -> None:
    homes = set()
    for pair in tasks.load(name, n=30, seed=4, documents=3):
        texts = documents_of(pair)
        assert sorted(texts) == [-1, 0, 1, 2]
        assert all(texts[i].endswith("\n") for i in range(3))
        owners = [piece.document for piece in pieces_of(pair.old) if piece.document >= 0]
        assert owners == sorted(owners)
        field = next(piece for piece in pieces_of(pair.old) if piece.region == "field")
        homes.add(field.document)
        for piece in pieces_of(pair.old):
            if piece.document not in (-1, field.document):
                assert piece.region == "filler"
        assert "".join(texts[i] for i in range(3)) in pair.text_old
    assert homes == {0, 1, 2}


def test_one_fact_of_one_person_differs_and_nobody_else_has_the_new_value() -> None:
    last = 0
    for pair in tasks.load("biography_pairs", n=60, seed=1, documents=5, facts=4):
        assert pair.field_new not in pair.text_old
        assert (pair.answer_old, pair.answer_new) == (f" {pair.field_old}", f" {pair.field_new}")
        fact, _, person = pair.label.partition(" of ")
        assert {pair.field_old, pair.field_new} <= set(FACTS[fact].values)
        assert pair.content == f"biography_pairs:{person}"
        assert pair.text_old.count(FACTS[fact].statement.format(pair.field_old)) == 1
        assert pair.text_old.endswith(f"Answer: {FACTS[fact].opening.format(person)}")
        anchors = [piece.anchor for piece in pieces_of(pair.old)]
        behind = anchors[anchors.index("field") + 1 :]
        assert behind[0] == "own.stop"
        sentences = [a for a in behind if a.startswith("own.after")]
        assert sentences == [f"own.after.{i}" for i in range(len(sentences))]
        assert behind[1 + len(sentences)] == "own.end"
        last += not sentences
    assert 5 < last < 30  # a fact in four is the document's last


def test_gate_documents_are_the_lines_of_gate() -> None:
    for pair in tasks.load("gate_documents", n=20, seed=3, documents=4, lines=2):
        home = next(piece.document for piece in pieces_of(pair.old) if piece.region == "field")
        texts = documents_of(pair)
        assert len({texts[i].partition("\n")[0] for i in range(4)}) == 4  # no desk twice
        assert all(texts[i].count("- ") == 2 for i in range(4))
        own = texts[home].splitlines()
        assert own[1].startswith(f"The signal is {pair.field_old}")
        assert own[2].startswith("If the signal is ")
        assert texts[-1].startswith("Request: ")
        assert texts[-1].endswith("\nDecision:")
    assert {p.content.partition(":")[2] for p in tasks.load("gate_documents", n=64)} == {
        p.content.partition(":")[2] for p in tasks.load("gate", n=64)
    }


def test_the_delimiters_of_other_documents_are_not_the_field_s(organism: tuple[Any, Any]) -> None:
    for name in FAMILIES:
        for item in tasks.encode_all(organism[1], tasks.load(name, n=8))[0]:
            home = item.documents[item.field[0]]
            for slot in range(item.field[1], item.length):
                if item.documents[slot] not in (-1, home):
                    assert item.regions[slot] == "filler"
                elif item.documents[slot] == home:
                    assert (item.regions[slot] == "delimiter") == item.delimiter[slot]
            # Other families have no documents, and every delimiter is one.
    plain = tasks.encode_all(organism[1], tasks.load("gate", n=2))[0][0]
    assert set(plain.documents) == {-1}
    assert any(r == "delimiter" and a.startswith("filler") for r, a in zip(plain.regions, plain.anchors, strict=True))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_trained_organism_is_competent(organism: tuple[Any, Any], name: str) -> None:
    model, tokenizer = organism
    encoded, aside = tasks.encode_all(tokenizer, tasks.load(name, n=32, split="test"))
    assert not aside  # every word is one token
    right = []
    with torch.inference_mode():
        for item in encoded:
            best = [int(model(torch.tensor([ids])).logits[0, -1].argmax()) for ids in (item.old_ids, item.new_ids)]
            right.append(best == [item.answer_old_id, item.answer_new_id])
    assert sum(right) / len(right) >= 0.9


def test_wrong_options_are_named() -> None:
    for name, options, match in (
        ("biography_pairs", {"documents": 12}, "at most 11"),
        ("biography_pairs", {"facts": 0}, "facts is 0"),
        ("gate_documents", {"documents": 9}, "at most 8"),
        ("gate_documents", {"lines": 999}, "at most"),
        ("gate_documents", {"line": 2}, 'Did you mean "lines"'),
    ):
        with pytest.raises(InputError, match=match):
            tasks.load(name, n=2, **options)
    assert tasks.info("biography_pairs").options == {"documents": 5, "facts": 4}
    assert tasks.biography_pairs(n=3) == tasks.load_items("biography_pairs", n=3)
