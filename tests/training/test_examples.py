"""Drawing, ordering and settings."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from kvnotes_interp.errors import InputError
from kvnotes_interp.model import Model
from kvnotes_interp.tasks import documents
from kvnotes_interp.tasks.documents import load
from kvnotes_interp.training import Part, Settings, draw, draw_parts, examples_of
from kvnotes_interp.training.examples import stretch


def test_draw_mixes_numbers_of_documents_and_keeps_contents_apart() -> None:
    train, validation = draw("biography", samples=42, validation=9, docs=(2, 3, 5, 7), seed=3)
    assert Counter(len(q.documents) for q in train) == {2: 11, 3: 11, 5: 10, 7: 10}
    assert Counter(len(q.documents) for q in validation) == {2: 3, 3: 2, 5: 2, 7: 2}
    contents = [q.content for q in (*train, *validation)]
    assert len(set(contents)) == 51, "a content is asked once while there are fresh ones"
    assert {q.split for q in (*train, *validation)} == {"train"}
    assert (train, validation) == draw("biography", samples=42, validation=9, docs=(2, 3, 5, 7), seed=3)
    assert train != draw("biography", samples=42, validation=9, docs=(2, 3, 5, 7), seed=4)[0]


def test_draw_without_docs_takes_the_tasks_own() -> None:
    assert len(draw("biography", samples=2, validation=1, docs=None, documents=4)[0][0].documents) == 4


def test_parts_get_equal_shares_each_as_drawn_alone() -> None:
    parts = [Part("biography", (2, 3), {"facts": 2}), Part("gated", None), Part("needle", (2,))]
    train, validation = draw_parts(parts, samples=20, validation=7, seed=3)
    alone = [
        draw("biography", samples=7, validation=3, docs=(2, 3), seed=3, facts=2),
        draw("gated", samples=7, validation=2, docs=None, seed=3),
        draw("needle", samples=6, validation=2, docs=(2,), seed=3),
    ]
    assert train == [question for part, _ in alone for question in part]
    assert validation == [question for _, part in alone for question in part]
    one = Part("biography")
    assert draw_parts([one], samples=9, validation=5, seed=1) == draw("biography", samples=9, validation=5, seed=1)
    for wrong in ([], [one] * 6):
        with pytest.raises(InputError, match=f"5 validation questions of {len(wrong)} tasks"):
            draw_parts(wrong, samples=9, validation=5)


def test_an_eighth_of_few_contents_is_held_out() -> None:
    train, validation = draw("biography", samples=1200, validation=150, docs=(1, 2), seed=1, facts=1)
    assert Counter(len(q.documents) for q in train) == {1: 600, 2: 600}
    assert Counter(len(q.documents) for q in validation) == {1: 75, 2: 75}
    asked, held = (Counter(q.content for q in part) for part in (train, validation))
    assert not set(asked) & set(held)
    assert len(held) <= 144  # of 1152 people in the train split
    assert len({q.key for q in (*train, *validation)}) == 1350
    assert {q.split for q in (*train, *validation)} == {"train"}


def test_too_few_contents_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    question = documents.load("biography", n=1, documents=1)[0]
    monkeypatch.setattr(documents, "load", lambda *_, n, **__: [question] * n)
    with pytest.raises(InputError, match=r"has 1 contents.* they give 0 of 4 training and 2 of 2 validation"):
        draw("biography", samples=4, validation=2, docs=(1,))


def test_every_epoch_is_a_shuffle_of_its_own_from_any_place() -> None:
    order = stretch(7, 5, 0, 21)
    epochs = [order[i : i + 7] for i in (0, 7, 14)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert stretch(7, 5, 4, 9) == order[4:13]
    assert stretch(7, 6, 0, 21) != order


def test_examples_are_the_questions_in_blocks(model: Model, questions: Any) -> None:
    example, question = examples_of(model, questions[0][:1])[0], questions[0][0]
    assert model.tokenizer.decode(example.blocks.token_ids) == question.text
    assert model.tokenizer.decode(example.answer) == question.answer
    assert len(example.blocks.chunks) == len(question.documents)
    assert (example.answers, example.stops) == ((question.answer,), question.stops)


def test_a_lone_document_at_slot_zero_is_refused(model: Model) -> None:
    lone = load("biography", n=1, documents=1)[0]
    bare = type(lone)(**{**vars(lone), "prefix": ""})
    with pytest.raises(InputError, match=r"1 of 1\) has one document and no prefix"):
        examples_of(model, [bare])


def test_settings_count_steps() -> None:
    assert Settings().total_steps(1024) == 320
    assert Settings(batch=8, accumulate=3, epochs=2).total_steps(100) == 9
    assert Settings(steps=7).total_steps(1000) == 7
    assert Settings().validation_interval(1024) == 32
    assert Settings(validate_every=5).validation_interval(1024) == 5


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lrr": 1.0}, 'training has no setting "lrr". Did you mean "lr"?'),
        ({"lr": 0.0}, "training setting lr=0.0: input should be greater than 0"),
        ({"batch": 1.5}, "training setting batch=1.5: input should be a valid integer"),
        ({"autocast": "fp16"}, "training setting autocast='fp16': input should be 'bf16'"),
        ({"steps": 0}, "training setting steps=0"),
    ],
)
def test_wrong_settings_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        Settings(**values)
    assert message in str(caught.value)


def test_settings_do_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings().lr = 1.0  # type: ignore[misc]
