"""Readouts of `metrics`: distances between next-token distributions, and answers compared as texts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvnotes_interp import metrics
from kvnotes_interp.errors import InputError

TEXTS = st.text(alphabet="ab c.,The", max_size=20)


def test_kl_by_hand() -> None:
    p, q = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.25, 0.5])
    want = 0.5 * math.log(2) + 0.25 * math.log(0.5)
    assert float(metrics.kl_divergence(p.log(), q.log())) == pytest.approx(want, rel=1e-6)
    # Logits are free up to a constant, and the direction matters.
    assert float(metrics.kl_divergence(p.log() + 7, q.log() - 3)) == pytest.approx(want, rel=1e-6)
    other = torch.tensor([0.8, 0.1, 0.1])
    forward, backward = metrics.kl_divergence(p.log(), other.log()), metrics.kl_divergence(other.log(), p.log())
    assert abs(float(forward - backward)) > 0.01


def test_kl_agrees_with_torch_and_is_zero_on_itself() -> None:
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(3, 50, generator=g), torch.randn(3, 50, generator=g)
    want = torch.nn.functional.kl_div(
        b.double().log_softmax(-1), a.double().log_softmax(-1), reduction="none", log_target=True
    ).sum(-1)
    torch.testing.assert_close(metrics.kl_divergence(a, b), want)
    assert (metrics.kl_divergence(a, a) == 0).all()


def test_cosine_and_agreement_by_hand() -> None:
    a, b = torch.tensor([[3.0, 4.0], [1.0, 0.0]]), torch.tensor([[4.0, 3.0], [0.0, 2.0]])
    assert metrics.logit_cosine(a, b).tolist() == pytest.approx([24 / 25, 0.0])
    assert metrics.agreement(a, b).tolist() == [False, False]
    assert metrics.agreement(a, a * 2).tolist() == [True, True]
    # A large common part hides a change of decision from the cosine, not from the others.
    high, other = torch.tensor([100.0, 101.0, 99.0]), torch.tensor([102.0, 100.0, 99.0])
    assert float(metrics.logit_cosine(high, other)) > 0.999
    assert not bool(metrics.agreement(high, other))
    assert float(metrics.kl_divergence(high, other)) > 0.5
    with pytest.raises(InputError, match=r"\(2, 2\) and \(3,\)"):
        metrics.kl_divergence(a, high)


def test_answers_are_normalised() -> None:
    assert metrics.normalised("  The  Eiffel-Tower, an icon.\n") == "eiffeltower icon"
    assert metrics.exact_match(" Paris.", "paris")
    assert metrics.exact_match("a dog", ("cat", "the dog"))
    assert not metrics.exact_match("Paris, France", "Paris")
    assert not metrics.exact_match("theatre", "atre")


def test_token_f1_by_hand() -> None:
    # 2 words in common of 3 and 4: P = 2/3, R = 1/2.
    assert metrics.token_f1("red green blue", "green blue black white") == pytest.approx(2 * 2 / 7)
    # Repeats count as often as both sides have them.
    assert metrics.token_f1("no no no", "no") == pytest.approx(2 * 1 / 4)
    assert metrics.token_f1("rome", ("paris", "Rome")) == 1
    assert metrics.token_f1("", "paris") == 0
    assert metrics.token_f1("the", "") == 1


def test_micro_f1_pools_before_dividing() -> None:
    predictions, answers = ["red green", "blue"], ["red", ("black white yellow", "blue sky")]
    # common 1 + 1, predicted 2 + 1, expected 1 + 2
    assert metrics.micro_f1(predictions, answers) == pytest.approx(2 * 2 / 6)
    mean = sum(metrics.token_f1(p, a) for p, a in zip(predictions, answers, strict=True)) / 2
    assert mean == pytest.approx(2 / 3)
    longer = metrics.micro_f1([*predictions, "x y z u v w"], [*answers, "q"])
    assert longer == pytest.approx(2 * 2 / 13)
    assert math.isnan(metrics.micro_f1([], []))
    with pytest.raises(InputError, match="1 predictions and 2 answers"):
        metrics.micro_f1(["a"], ["a", "b"])
    with pytest.raises(InputError, match="no answer"):
        metrics.token_f1("a", ())


@given(a=TEXTS, b=TEXTS)
def test_f1_is_symmetric_bounded_and_one_on_equal_words(a: str, b: str) -> None:
    score = metrics.token_f1(a, b)
    assert 0 <= score <= 1
    assert score == metrics.token_f1(b, a)
    assert metrics.token_f1(a, a) == 1
    assert (score == 1) == (sorted(metrics.normalised(a).split()) == sorted(metrics.normalised(b).split()))
    assert metrics.micro_f1([a], [b]) == score
