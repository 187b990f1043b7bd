"""Packaged families: enough instances, one difference, determinism, splits by content."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvnotes_interp import tasks
from kvnotes_interp.errors import InputError
from kvnotes_interp.tasks.pair import Message, Pair, pieces_of

EXPECTED = {
    "pronoun": "derived",
    "sentiment": "derived",
    "rule": "derived",
    "rule_first": "derived",
    "capital": "verbatim",
    "language": "verbatim",
    "copy": "verbatim",
    "account_role": "derived",
    "safety_mode": "derived",
    "subscription_tier": "derived",
    "order_status": "derived",
    "timestamp": "control",
    "signal": "derived",
    "gate": "derived",
    "badge": "verbatim",
}


def drawn(name: str, n: int = 200, **options) -> list[Pair]:
    return tasks.load(name, n=n, **options)


INFO = tasks.families()
NAMES = sorted(INFO)


def test_the_promised_families_exist_with_their_kind() -> None:
    assert EXPECTED.items() <= {name: info.kind for name, info in INFO.items()}.items()
    for info in INFO.values():
        assert info.about
        assert info.source
        assert info.instances >= 200
        assert info.contents >= 8


@pytest.mark.parametrize("name", NAMES)
def test_two_hundred_distinct_instances(name: str) -> None:
    pairs = drawn(name)
    both_ways = {frozenset((pair.text_old, pair.text_new)) for pair in pairs}
    assert len(both_ways) == len({pair.key for pair in pairs}) == 200
    assert all(set(pair.key) <= set("abcdefghijklmnopqrstuvwxyz0123456789._-") for pair in pairs)


@pytest.mark.parametrize("name", NAMES)
def test_instances_differ_by_more_than_their_filler(name: str) -> None:
    pairs = drawn(name, **({"fillers": 0} if "fillers" in INFO[name].options else {}))
    assert len({frozenset((pair.text_old, pair.text_new)) for pair in pairs}) == 200


@pytest.mark.parametrize("name", NAMES)
def test_old_and_new_differ_only_in_the_field(name: str) -> None:
    for pair in drawn(name, n=40):
        old, new = list(pieces_of(pair.old)), list(pieces_of(pair.new))
        assert [(p.region, p.anchor) for p in old] == [(p.region, p.anchor) for p in new]
        assert [a.region for a, b in zip(old, new, strict=True) if a.text != b.text] == ["field"]
        assert pair.answer_old != pair.answer_new
        assert len({p.anchor for p in old}) == len(old)
        assert "{" not in pair.text_old


@pytest.mark.parametrize("name", NAMES)
def test_the_seed_decides_everything(name: str) -> None:
    assert drawn(name, n=20, seed=3) == drawn(name, n=20, seed=3)
    assert drawn(name, n=20, seed=3) != drawn(name, n=20, seed=4)
    assert drawn(name, n=8, seed=3) == drawn(name, n=20, seed=3)[:8]


def test_another_process_with_another_hash_seed_draws_the_same() -> None:
    code = "from kvnotes_interp import tasks; print([p.key for p in tasks.order_status(n=12, seed=5)])"
    out = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "77"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stdout.strip() == str([p.key for p in tasks.order_status(n=12, seed=5)])


def test_the_layer_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from kvnotes_interp import tasks; tasks.pronoun(n=2); "
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("name", NAMES)
def test_splits_share_no_content_whatever_the_seed(name: str) -> None:
    train = [p for seed in (0, 1) for p in drawn(name, n=60, seed=seed, split="train")]
    test = [p for seed in (0, 2) for p in drawn(name, n=60, seed=seed, split="test")]
    assert not {p.content for p in train} & {p.content for p in test}
    assert {p.split for p in train} == {"train"}
    assert {p.split for p in test} == {"test"}
    if name in ("pronoun", "sentiment", "capital", "language", "copy"):
        values = [{v for p in part for v in (p.field_old, p.field_new)} for part in (train, test)]
        assert not values[0] & values[1]


@pytest.mark.parametrize("name", NAMES)
def test_a_small_n_is_spread_over_contents(name: str) -> None:
    pairs = drawn(name, n=32)
    assert len({p.content for p in pairs}) == min(32, INFO[name].contents)
    assert {p.split for p in pairs} == {"train", "test"}
    # Old and new are swapped at random, so a constant preference for one answer cancels.
    if name != "timestamp":
        assert len({p.answer_old for p in pairs}) > 1


def test_a_value_is_not_used_twice_before_the_others() -> None:
    pairs = tasks.pronoun(n=32)
    values = [v for p in pairs for v in (p.field_old, p.field_new)]
    assert len(set(values)) == 64


def test_too_large_n_names_the_number(family_file) -> None:
    path = family_file()
    have = tasks.info(path).instances
    assert len({p.key for p in tasks.load(path, n=have)}) == have == 6
    with pytest.raises(InputError, match="has 6 distinct instances, fewer than n=7"):
        tasks.load(path, n=have + 1)
    with pytest.raises(InputError, match='3 distinct instances in split "test"'):
        tasks.load(path, n=4, split="test")


def test_fillers_are_counted_and_anchored() -> None:
    for count in (0, 5, 30):
        pair = tasks.order_status(n=1, fillers=count)[0]
        anchors = [p.anchor for p in pieces_of(pair.old) if p.region == "filler"]
        assert anchors == [f"filler.{i}" for i in range(count)]
    texts = [[p.text for p in pieces_of(pair.old) if p.region == "filler"] for pair in tasks.order_status(n=2)]
    assert texts[0] != texts[1]
    assert len(set(texts[0])) == 30
    with pytest.raises(InputError, match="0 to 48"):
        tasks.order_status(n=1, fillers=49)


def test_the_rule_stands_after_the_field_or_before_it() -> None:
    for name, after in (("rule", True), ("rule_first", False), ("order_status", True)):
        regions = [p.region for p in pieces_of(tasks.load(name, n=1)[0].old)]
        assert (regions.index("rule") > regions.index("field")) is after


def test_chat_form_and_plain_form() -> None:
    chat, plain = tasks.order_status(n=1)[0], tasks.order_status(n=1, chat=False)[0]
    assert chat.chat
    assert isinstance(chat.old[-1], Message)
    assert chat.old[-1].role == "assistant"
    assert not plain.chat
    assert plain.text_old == chat.text_old
    assert plain.text_old.endswith("\n\nDecision:")


def test_a_control_keeps_its_answer() -> None:
    for pair in tasks.timestamp(n=10):
        assert (pair.kind, pair.answer_old, pair.answer_new) == ("control", " approve", " deny")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: tasks.load("pronuon"), 'Did you mean "pronoun"'),
        (lambda: tasks.sentimnt(n=1), 'Did you mean "sentiment"'),
        (lambda: tasks.load("order_status", filers=3), 'Did you mean "fillers"'),
        (lambda: tasks.load("pronoun", fillers=3), "no option"),
        (lambda: tasks.load("pronoun", split="tset"), 'Did you mean "test"'),
        (lambda: tasks.load("pronoun", n=0), "n is 0"),
        (lambda: tasks.load("pronoun", seed=0.5), "seed is 0.5"),
        (lambda: tasks.load("order_status", chat="no"), "True or False"),
        (lambda: tasks.load("nowhere/x.yaml"), "no family file"),
    ],
)
def test_wrong_names_and_values_say_what_to_do(call, words: str) -> None:
    with pytest.raises(InputError, match=words):
        call()


def test_module_attributes() -> None:
    assert tasks.pronoun(n=2) == tasks.load("pronoun", n=2)
    assert not hasattr(tasks, "nonsense")
    assert "pronoun" in dir(tasks)
