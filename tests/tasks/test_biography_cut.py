"""The cut biographies: what stands in which document, and what a reader of one document alone can know."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

import kvnotes_interp as kv
from kvnotes_interp.errors import InputError
from kvnotes_interp.operators.blocks import cut_texts
from kvnotes_interp.tasks import documents

SUBJECTS = ("name", "pronoun")


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("count", [1, 2, 5, 24])
def test_headings_and_statements_take_turns(count: int, subject: str) -> None:
    for question in documents.load("biography_cut", n=20, documents=count, facts=3, subject=subject):
        assert len(question.documents) == 2 * count
        person = str(question.detail("person"))
        own = question.gold[-1]
        assert question.documents[own - 1] == f"Biography of {person}."
        assert question.gold == ((own,) if subject == "name" else (own - 1, own))
        assert question.documents[own].count(question.answer) == 1
        assert question.answer not in question.distractors
        names = []
        for heading, statements in zip(question.documents[::2], question.documents[1::2], strict=True):
            name = re.fullmatch(r"Biography of (\w+ \w+)\.", heading)
            assert name
            names += name[1].split()
            begins = re.findall(r" (\w+) (?:was born|lives|works|plays|keeps|likes|enjoys) ", statements)
            assert len(begins) == 3
            # What the answer needs is in the statements' own document, or nothing of the name is.
            if subject == "name":
                assert set(begins) == {name[1].split()[0]}
            else:
                assert set(begins) in ({"He"}, {"She"})
                assert not set(name[1].split()) & set(re.findall(r"\w+", statements))
        assert len(set(names)) == 2 * count
        assert question.text.endswith(question.suffix)


def test_the_text_is_a_biography_cut_before_a_space_and_every_piece_has_its_tokens() -> None:
    tokenizer = kv.load("organism:trained").tokenizer
    for question in documents.load("biography_cut", n=12, documents=3):
        cut = cut_texts(tokenizer, question.prefix, question.documents, question.suffix)
        assert tokenizer.unk_token_id not in cut.blocks.token_ids
        assert all(after.startswith(" ") for after in question.documents[1::2])
        assert all(before.endswith(".") and after.endswith("\n") for before, after in pairwise(question.documents[:2]))


def test_splits_seeds_and_refusals() -> None:
    whole = documents.load("biography_cut", n=60, seed=3)
    assert whole[:20] == documents.load("biography_cut", n=20, seed=3)
    assert len({question.key for question in whole}) == len({question.content for question in whole}) == 60
    parts = [documents.load("biography_cut", n=60, split=split) for split in ("train", "test")]
    assert not {q.content for q in parts[0]} & {q.content for q in parts[1]}
    with pytest.raises(InputError, match='Did you mean "pronoun"'):
        documents.load("biography_cut", subject="pronouns")
    with pytest.raises(InputError, match="documents"):
        documents.load("biography_cut", documents=25)
