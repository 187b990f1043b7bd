"""Targets against one plain forward of prompt and answer; kept, shared and resumed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvnotes_interp import engine
from kvnotes_interp.errors import InputError
from kvnotes_interp.model import Model
from kvnotes_interp.training import Example, Target, examples_of, teach, teacher
from tests.reference import full_logits

EXACT = {"atol": 1e-10, "rtol": 0}


@pytest.fixture(scope="module")
def examples(model: Model, questions: Any) -> list[Example]:
    return examples_of(model, questions[0])[:5]


@pytest.fixture
def learn(model: Model, examples: list[Example], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`learn(**options) -> (targets, number of contexts that were run)`, with two examples per file."""
    monkeypatch.setattr(teacher, "CHUNK", 2)
    ran: list[int] = []
    plain = engine.prefill
    monkeypatch.setattr(engine, "prefill", lambda *a, **k: ran.append(1) or plain(*a, **k))

    def call(**options: Any) -> tuple[list[Target], int]:
        ran.clear()
        chosen = {"folder": tmp_path, "max_new_tokens": 4, "top": None, "progress": False} | options
        return teach(model, examples, **chosen), len(ran)

    return call


@pytest.mark.parametrize(("top", "tau"), [(None, 1.0), (5, 1.0), (5, 3.0), (10_000, 1.0)])
def test_rows_are_those_of_a_plain_forward(
    model: Model, examples: list[Example], learn: Callable[..., Any], top: int | None, tau: float
) -> None:
    for example, target in zip(examples, learn(top=top, tau=tau)[0], strict=True):
        n = len(target.answer)
        ids = torch.tensor([[*example.blocks.token_ids, *target.answer[:-1]]])
        logits = full_logits(model.hf, ids)[0, -n:]
        assert logits.argmax(-1).tolist() == list(target.answer)
        want = (logits / tau).log_softmax(-1)
        assert n == 4 or target.answer[-1] in model.stop_ids or "." in model.tokenizer.decode(target.answer[-1])
        if top != 5:
            assert target.ids is None
            torch.testing.assert_close(target.log_probs, want, **EXACT)
            continue
        torch.testing.assert_close(target.log_probs, want.gather(-1, target.ids), **EXACT)
        rest = 1 - want.gather(-1, target.ids).exp().sum(-1)
        torch.testing.assert_close(target.log_rest.exp(), rest, atol=1e-9, rtol=0)
        assert target.ids[:, 0].tolist() == list(target.answer)


def test_an_answer_ends_with_the_token_that_ends_it(model: Model, examples: list[Example], tmp_path: Path) -> None:
    options = {"folder": tmp_path, "max_new_tokens": 6, "progress": False}
    whole = teach(model, examples[:1], **options)[0].answer
    text = model.tokenizer.decode(whole)
    assert len(whole) == 6, "this model never ends an answer by itself"
    cut = Example(**{**vars(examples[0]), "stops": (text[len(model.tokenizer.decode(whole[:2])) :][:1],)})
    short = teach(model, [cut], **options)[0].answer
    assert short == whole[: len(short)]
    assert len(short) < 6
    assert cut.stops[0] in model.tokenizer.decode(short)
    assert cut.stops[0] not in model.tokenizer.decode(short[:-1])


def test_kept_once_shared_and_resumed(learn: Callable[..., Any], tmp_path: Path) -> None:
    first, ran = learn(top=5)
    assert ran == 5
    files = sorted(tmp_path.iterdir())
    assert len(files) == 3
    again, ran = learn(top=5)
    assert ran == 0
    for a, b in zip(first, again, strict=True):
        assert a.answer == b.answer
        assert all(torch.equal(getattr(a, n), getattr(b, n)) for n in ("log_probs", "ids", "log_rest"))
    files[1].unlink()
    assert 1 <= learn(top=5)[1] <= 2
    # Everything that decides the numbers is in the name.
    for options in ({"top": 6}, {"top": 5, "tau": 2.0}, {"top": 5, "max_new_tokens": 3}):
        assert learn(**options)[1] == 5, options


def test_a_damaged_file_is_named(learn: Callable[..., Any], tmp_path: Path) -> None:
    learn()
    path = sorted(tmp_path.iterdir())[0]
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(InputError, match=f"{path.name} holds no teacher targets .*; delete it"):
        learn()
