"""Encoding: spans, anchors, regions, and every refusal."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvnotes_interp import tasks
from kvnotes_interp.errors import InputError, TokenLengthError
from kvnotes_interp.tasks.encode import is_delimiter
from kvnotes_interp.tasks.pair import Pair, Piece

REGIONS = {"before", "field", "context", "rule", "filler", "delimiter", "decision", "template"}


def simple(
    old: str = "red", new: str = "green", answers: tuple[str, str] = (" stop", " go"), tail: str = "So we"
) -> Pair:
    def prompt(value: str) -> tuple[Piece, ...]:
        return (
            Piece("The light is ", "context", "0.0"),
            Piece(value, "field", "field"),
            Piece(". Mind the rule.\n", "rule", "1.0"),
            Piece(tail, "decision", "2.0"),
        )

    return Pair("f", "derived", "f.k", "f:c", "train", prompt(old), prompt(new), *answers, chat=False)


@pytest.fixture(scope="module")
def words(make_tokenizer: Any) -> Any:
    text = "The light is red. The light is green. Mind the rule.\nSo we stop go golden not note"
    return make_tokenizer([text] * 20 + [" red green stop go stopping"] * 20, vocab=400)


@pytest.mark.parametrize("name", sorted(tasks.families()))
def test_every_family_encodes(tokenizer: Any, name: str) -> None:
    pairs = tasks.load(name, n=16)
    encoded, aside = tasks.encode_all(tokenizer, pairs)
    assert len(encoded) + len(aside) == 16
    assert len(encoded) >= 6
    for item in encoded:
        length, (start, stop) = item.length, item.field
        assert len(item.new_ids) == length == len(item.regions) == len(item.anchors) == len(item.delimiter)
        differing = [i for i in range(length) if item.old_ids[i] != item.new_ids[i]]
        assert differing
        assert start <= differing[0]
        assert differing[-1] < stop < length
        assert item.old_ids[-1] == item.new_ids[-1]
        assert item.downstream == (stop, length - 1)
        assert item.answer_old_id != item.answer_new_id
        assert len(set(item.anchors)) == length
        assert set(item.regions) <= REGIONS
        assert item.regions[:start] == ("before",) * start
        assert item.regions[start:stop] == ("field",) * (stop - start)
        assert "".join(item.tokens_old[start:stop]).strip() == item.pair.field_old
        assert item.regions[-1] == "decision"
        assert item.old_ids.count(tokenizer.bos_token_id) == 1
        for place in range(stop, length):
            assert (item.regions[place] == "delimiter") <= item.delimiter[place]


@pytest.mark.parametrize("name", ["pronoun", "order_status"])
def test_the_same_place_has_the_same_anchor_in_every_instance(tokenizer: Any, name: str) -> None:
    encoded, _ = tasks.encode_all(tokenizer, tasks.load(name, n=12))
    literal = [
        {a: t for a, t, r in zip(e.anchors, e.tokens_old, e.regions, strict=True) if a[0].isdigit() or a[:4] == "temp"}
        for e in encoded
    ]
    assert all(anchors == literal[0] for anchors in literal)
    if name == "order_status":
        for item in encoded:
            at = dict(zip(item.anchors, item.tokens_old, strict=True))
            assert all(at[f"filler.{i}:-1"].endswith("\n") for i in range(30))


def test_chat_tokens_are_template_or_decision_at_the_end(tokenizer: Any) -> None:
    item = tasks.encode(tokenizer, tasks.order_status(n=1)[0])
    tail = item.regions[item.tokens_old.index("<|end|>") :]
    assert tail[0] == "template"
    assert tail[-1] == "decision"
    assert sorted(set(tail), key=tail.index) == ["template", "decision"]


def test_plain_form_needs_no_chat_template(make_tokenizer: Any, texts: list[str]) -> None:
    bare = make_tokenizer(texts[:100], chat=False)
    with pytest.raises(InputError, match="chat=False"):
        tasks.encode_all(bare, tasks.order_status(n=2))
    encoded, aside = tasks.encode_all(bare, tasks.order_status(n=8, chat=False))
    assert len(encoded) + len(aside) == 8


def test_unequal_lengths_print_both(words: Any) -> None:
    with pytest.raises(TokenLengthError) as caught:
        tasks.encode(words, simple(new="aquamarine"))
    text = str(caught.value)
    assert "'red'" in text
    assert "' red', '.'" in text
    assert "'aquamarine'" in text
    assert "'q'" in text
    assert "Choose two values" in text
    assert " tokens" in text


def test_a_field_that_merges_is_refused(make_tokenizer: Any, words: Any) -> None:
    pair = simple()
    glued = [
        dataclasses.replace(p, text=p.text.replace(". Mind", "g Mind")) if p.region == "rule" else p for p in pair.old
    ]
    merged = make_tokenizer([" redg greeng"] * 50 + [pair.text_old] * 20, vocab=400)
    new = tuple(dataclasses.replace(p, text="green") if p.region == "field" else p for p in glued)
    with pytest.raises(InputError, match="Put a space"):
        tasks.encode(merged, dataclasses.replace(pair, old=tuple(glued), new=new))


def test_answers_are_checked(make_tokenizer: Any, words: Any) -> None:
    good = tasks.encode(words, simple())
    assert words.decode([good.answer_old_id]) == " stop"
    with pytest.raises(InputError, match="both begin with token"):
        tasks.encode(words, simple(answers=(" go", " go!")))
    spaced = make_tokenizer(["So we stop go.  So we stop"] * 20, vocab=400)
    with pytest.raises(InputError, match="changes the tokens of the prompt"):
        tasks.encode(spaced, simple(old="red", new="tan", tail="So we ", answers=("stop", "go")))


def test_set_aside_has_reasons_and_never_raises(words: Any) -> None:
    pairs = [simple(), simple(new="aquamarine"), simple(answers=(" go", " go!"))]
    encoded, aside = tasks.encode_all(words, pairs)
    assert len(encoded) == 1
    assert [item.reason for item in aside] == ["unequal token length", "answers share first token"]
    assert all(item.detail and item.key == "f.k" and item.content == "f:c" for item in aside)


def test_double_bos_is_impossible(make_tokenizer: Any, words: Any, tokenizer: Any) -> None:
    item = tasks.encode(words, simple())
    assert item.old_ids.count(words.bos_token_id) == 1
    assert item.anchors[0] == "special:-1"
    pair = simple()
    begun = (Piece("<s>", "context", "b"),)
    with pytest.raises(InputError, match="more than once"):
        tasks.encode(words, dataclasses.replace(pair, old=begun + pair.old, new=begun + pair.new))  # type: ignore
    chat = tasks.order_status(n=1)[0]
    tokenizer_twice = make_tokenizer([chat.text_old] * 3)
    tokenizer_twice.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    with pytest.raises(InputError, match="BOS"):
        tasks.encode(tokenizer_twice, chat)


def test_a_tokenizer_without_bos_or_offsets(make_tokenizer: Any, texts: list[str]) -> None:
    plain = make_tokenizer(texts[:50], bos=False)
    assert tasks.encode_all(plain, tasks.copy(n=4))

    class Slow:
        is_fast = False

    with pytest.raises(InputError, match="no character offsets"):
        tasks.encode(Slow(), simple())


def test_a_template_that_changes_text_or_refuses_a_role(make_tokenizer: Any, tokenizer: Any) -> None:
    pair = tasks.order_status(n=1)[0]
    other = make_tokenizer([pair.text_old])
    other.chat_template = "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}"
    with pytest.raises(InputError, match="changes the text"):
        tasks.encode(other, pair)
    other.chat_template = "{{ raise_exception('no such role') }}"
    with pytest.raises(InputError, match="no such role"):
        tasks.encode(other, pair)


@pytest.mark.parametrize(
    ("token", "yes"),
    [
        (".", True),
        (" \n", True),
        ("", True),
        (' "-', True),
        (" a.", False),
        ("|>", True),
        ("5", False),
        ("\u2014", True),
    ],
)
def test_delimiter(token: str, yes: bool) -> None:
    assert is_delimiter(token) is yes
