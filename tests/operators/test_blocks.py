"""Cutting prompts into blocks: joint tokens, boundaries that do not agree, sentences of a pair."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvnotes_interp import operators, tasks
from kvnotes_interp.errors import InputError
from kvnotes_interp.operators.blocks import Blocks, _sentence_ends, cut_pair, cut_texts
from kvnotes_interp.organisms.words import word_tokenizer
from kvnotes_interp.tasks import documents
from tests.tiny_tokenizer import tiny_tokenizer, train

WORDS = ["John went home.\n", "Mary lives in Rome.\n", "The light is red, so we stop.\n", "Is it late? No.\n"]


def test_blocks_know_where_their_chunks_stand() -> None:
    blocks = Blocks((1, 2), ((3, 4, 5), (6,)), (7, 8))
    assert blocks.token_ids == (1, 2, 3, 4, 5, 6, 7, 8)
    assert blocks.context == (1, 2, 3, 4, 5, 6)
    assert blocks.spans == ((2, 5), (5, 6))
    assert (len(blocks), blocks.n_context) == (8, 6)
    assert Blocks((), [[3]], [7]).spans == ((0, 1),)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("parts", "match"),
    [
        (((), (), (1,)), "there is no chunk"),
        (((), ((1,), ()), (1,)), "chunk 1 of 2 is empty"),
        (((), ((1,),), ()), "suffix"),
    ],
)
def test_empty_pieces_are_refused(parts: Any, match: str) -> None:
    with pytest.raises(InputError, match=match):
        Blocks(*parts)


@given(chosen=st.lists(st.sampled_from(WORDS), min_size=1, max_size=4), bos=st.booleans())
@settings(max_examples=25, deadline=None)
def test_the_pieces_are_the_joint_tokens(chosen: list[str], bos: bool) -> None:
    tokenizer = tiny_tokenizer(bos=bos)
    prefix, suffix = "Read the text.\n", "Question: Where does Mary live?"
    cut = cut_texts(tokenizer, prefix, chosen, suffix, answer=" In Rome")
    joint = tuple(tokenizer("".join((prefix, *chosen, suffix)))["input_ids"])
    assert cut.blocks.token_ids == joint
    assert len(cut.blocks.chunks) == len(chosen)
    for chunk, text in zip(cut.blocks.chunks, chosen, strict=True):
        assert tokenizer.decode(chunk) == text
        assert list(chunk) == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert (cut.blocks.prefix[0] == tokenizer.bos_token_id) is bos
    assert joint + cut.answer == tuple(tokenizer("".join((prefix, *chosen, suffix, " In Rome")))["input_ids"])
    assert cut.straddling == ()
    assert cut.alone_differs == ()


def test_a_token_over_a_boundary_is_refused_or_shown() -> None:
    tokenizer = tiny_tokenizer()
    pieces = ("", ["John went to the mar", "ket to buy bread.\n"], "On the way home,")
    with pytest.raises(InputError, match=r"between piece 1 and 2: together \[.*' market'.*\], alone") as caught:
        cut_texts(tokenizer, *pieces)
    assert 'straddle="show"' in str(caught.value)
    shown = cut_texts(tokenizer, *pieces, straddle="show")
    assert len(shown.straddling) == 1
    assert shown.blocks.token_ids == tuple(
        tokenizer("John went to the market to buy bread.\nOn the way home,")["input_ids"]
    )
    # The token is in the later piece, and both pieces differ from what they are alone.
    assert tokenizer.decode(shown.blocks.chunks[0]) == "John went to the"
    assert tokenizer.decode(shown.blocks.chunks[1]).startswith(" market")
    assert shown.alone_differs == (1, 2)


def test_a_space_at_the_end_of_a_document_straddles_too() -> None:
    with pytest.raises(InputError, match="token holds text of two pieces"):
        cut_texts(tiny_tokenizer(), "", ["John went home. "], "The end")


def test_wrong_uses_are_named() -> None:
    tokenizer = tiny_tokenizer()
    with pytest.raises(InputError, match="refuse"):
        cut_texts(tokenizer, "", ["a\n"], "b", straddle="maybe")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"chunk 1 of 2 is empty"):
        cut_texts(tokenizer, "", ["a\n", ""], "b")
    with pytest.raises(InputError, match="changes the tokens of the prompt"):
        cut_texts(tokenizer, "", ["John went to the\n"], "to the mar", answer="ket")
    with pytest.raises(InputError, match=r"no operator 'no_recompte'\. Did you mean \"no_recompute\""):
        operators.find("no_recompte")
    with pytest.raises(AttributeError, match="precompile"):
        operators.precompil  # noqa: B018


def test_every_biography_is_cut_at_its_documents() -> None:
    questions = documents.load("biography", n=12, seed=0, documents=3)
    tokenizer = train([q.text + q.answer for q in questions], vocab=900)
    for question in questions:
        cut = cut_texts(tokenizer, question.prefix, question.documents, question.suffix, answer=question.answer)
        assert [tokenizer.decode(chunk) for chunk in cut.blocks.chunks] == list(question.documents)
        assert tokenizer.decode(cut.answer) == question.answer


# --- sentences of a pair -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    texts = [p.text_old + " he she tea milk" for f in ("pronoun", "rule_first") for p in tasks.load(f, n=100, seed=0)]
    return train(texts, vocab=2000)


def encoded(tokenizer: Any, family: str) -> list[tasks.EncodedPair]:
    return tasks.encode_all(tokenizer, tasks.load(family, n=8, seed=0))[0]


def test_a_pair_is_cut_behind_its_full_stops(tokenizer: Any) -> None:
    for pair in encoded(tokenizer, "pronoun"):
        blocks = cut_pair(pair)
        assert blocks.token_ids == pair.old_ids
        assert blocks.prefix == ()
        texts = [tokenizer.decode(chunk) for chunk in blocks.chunks]
        assert texts[0].startswith("Once")
        assert texts[1:] == [" The place was crowded and the line was slow."]
        assert tokenizer.decode(blocks.suffix) == " Afterwards,"
        assert cut_pair(pair, side="new").token_ids == pair.new_ids


def test_whole_sentences_before_the_field_are_the_prefix(tokenizer: Any) -> None:
    for pair in encoded(tokenizer, "rule_first"):
        blocks = cut_pair(pair)
        assert tokenizer.decode(blocks.prefix).count(".") == 2
        assert len(blocks.prefix) <= pair.field[0] < blocks.spans[0][1]
        assert [tokenizer.decode(c)[-1] for c in blocks.chunks] == [".", "."]


def test_a_bos_token_is_prefix() -> None:
    pairs = tasks.load("pronoun", n=4, seed=0)
    tokenizer = train([p.text_old + " he she" for p in tasks.load("pronoun", n=100, seed=0)], vocab=1500, bos=True)
    for pair in tasks.encode_all(tokenizer, pairs)[0]:
        assert cut_pair(pair).prefix == (tokenizer.bos_token_id,)


def test_sentence_ends_take_quotes_and_blank_lines_along() -> None:
    tokens = [" He", " said", ' "', "stop", '."', "\n", "\n", "-", " Next", ",", " one", "!", " x"]
    flags = [t.strip() in ("", '"', '."', "-", ",", "!") for t in tokens]
    assert _sentence_ends(tokens, flags, 0, len(tokens)) == [7, 12]
    assert _sentence_ends(tokens, flags, 6, 11) == [7]


def test_short_sentences_join_the_next_and_the_last_the_one_before(tokenizer: Any) -> None:
    pair = encoded(tokenizer, "rule_first")[0]
    whole = cut_pair(pair)
    assert len(cut_pair(pair, min_tokens=1).chunks) == len(whole.chunks) == 2
    one = cut_pair(pair, min_tokens=1000)
    assert len(one.chunks) == 1
    assert one.token_ids == whole.token_ids


# --- documents of a pair ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["biography_pairs", "gate_documents"])
def test_a_pair_in_documents_is_cut_at_them(family: str) -> None:
    pairs = tasks.load(family, n=6, seed=2, documents=4)
    words = word_tokenizer(text for p in pairs for text in (p.text_old + p.answer_old, p.text_new + p.answer_new))
    for pair in tasks.encode_all(words, pairs)[0]:
        whole = cut_pair(pair, blocks="documents")
        assert whole.token_ids == pair.old_ids
        assert len(whole.chunks) == 4
        texts = [words.decode(chunk) for chunk in whole.chunks]
        begin = "Biography of" if family == "biography_pairs" else "Log of the"
        assert all(text.startswith(begin) and text.endswith("\n") and text.count(begin) == 1 for text in texts)
        assert words.decode(whole.prefix) == (documents.biography.PREFIX if family == "biography_pairs" else "")
        assert words.decode(whole.suffix).startswith(("Question:", "Request:"))
        home = pair.documents[pair.field[0]]
        start, stop = whole.spans[home]
        assert start <= pair.field[0] < pair.field[1] <= stop
        other = cut_pair(pair, side="new", blocks="documents")
        assert [i for i in range(4) if whole.chunks[i] != other.chunks[i]] == [home]


def test_a_prompt_without_documents_is_one_chunk_from_the_field_on(tokenizer: Any) -> None:
    for family in ("pronoun", "rule_first"):
        for pair in encoded(tokenizer, family):
            whole, cut = cut_pair(pair, blocks="documents"), cut_pair(pair)
            assert len(whole.chunks) == 1 < len(cut.chunks)
            assert (whole.prefix, whole.suffix, whole.token_ids) == (cut.prefix, cut.suffix, cut.token_ids)
    with pytest.raises(InputError, match="sentences"):
        cut_pair(pair, blocks="lines")  # type: ignore[arg-type]


def test_text_between_documents_is_a_chunk_of_its_own(tokenizer: Any) -> None:
    pair = encoded(tokenizer, "pronoun")[0]
    stop = len(pair.old_ids) - len(cut_pair(pair).suffix)
    owners = (-1, -1, *(0,) * 4, -1, *(1,) * (stop - 7), *(-1,) * (pair.length - stop))
    blocks = cut_pair(dataclasses.replace(pair, documents=owners), blocks="documents")
    assert [len(blocks.prefix), *map(len, blocks.chunks)] == [2, 4, 1, stop - 7]
