"""The loss against distributions summed by hand."""

from __future__ import annotations

import math

import pytest
import torch

from kvnotes_interp import metrics
from kvnotes_interp.training import Target, kl_to_teacher


def rows(seed: int, n: int, tokens: int = 11) -> torch.Tensor:
    return 3 * torch.randn(n, tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def target(logits: torch.Tensor, tau: float, top: int | None) -> Target:
    """As the teacher keeps it, made without its code."""
    p = (logits / tau).softmax(-1)
    answer = tuple(range(len(logits)))
    if top is None:
        return Target(answer, p.log(), None, p.new_full((len(p),), float("-inf")))
    ids = p.argsort(-1, descending=True)[:, :top]
    kept = p.gather(-1, ids)
    return Target(answer, kept.log(), ids, (1 - kept.sum(-1)).log())


def by_hand(teacher: torch.Tensor, student: torch.Tensor, tau: float, top: int | None) -> float:
    total = 0.0
    for a, b in zip(teacher, student, strict=True):
        p, q = [[math.exp(x / tau) for x in row.tolist()] for row in (a, b)]
        p, q = [x / sum(p) for x in p], [x / sum(q) for x in q]
        order = sorted(range(len(p)), key=lambda i: -p[i])
        kept = order if top is None else order[:top]
        pairs = [(p[i], q[i]) for i in kept]
        if top is not None:
            pairs.append((sum(p[i] for i in order[top:]), sum(q[i] for i in order[top:])))
        total += tau**2 * sum(x * math.log(x / y) for x, y in pairs)
    return total


@pytest.mark.parametrize("tau", [1.0, 2.5])
@pytest.mark.parametrize("top", [None, 1, 4])
def test_against_sums_by_hand(tau: float, top: int | None) -> None:
    teacher, student = [rows(0, 3), rows(1, 2)], [rows(2, 3), rows(3, 2)]
    got = kl_to_teacher([target(t, tau, top) for t in teacher], student, tau=tau)
    assert got.tolist() == pytest.approx([by_hand(t, s, tau, top) for t, s in zip(teacher, student, strict=True)])


def test_all_tokens_are_the_metric_fewer_are_a_lower_bound_and_equal_logits_are_zero() -> None:
    teacher, student = rows(0, 4), rows(1, 4)
    full = float(kl_to_teacher([target(teacher, 1.0, None)], [student], tau=1.0))
    assert full == pytest.approx(float(metrics.kl_divergence(teacher, student).sum()))
    bounds = [float(kl_to_teacher([target(teacher, 1.0, k)], [student], tau=1.0)) for k in (1, 2, 5, 9)]
    assert bounds == sorted(bounds)
    assert bounds[-1] < full
    for top in (None, 3):
        assert float(kl_to_teacher([target(teacher, 1.0, top)], [teacher + 7.0], tau=1.0)) == pytest.approx(
            0, abs=1e-12
        )


def test_the_rest_keeps_its_digits_and_its_gradient_in_float32() -> None:
    """Where the student's top tokens hold everything, 1 minus their sum is 0 and its logarithm infinite."""
    teacher = torch.tensor([[2.0, 0.0, -0.5, -1.0]])
    student = torch.tensor([[100.0, 0.0, 1.0, -1.0]], requires_grad=True)
    found = kl_to_teacher([target(teacher.double(), 1.0, 1)], [student], tau=1.0).sum()
    found.backward()
    exact = by_hand(teacher.double(), student.detach().double(), 1.0, 1)
    assert exact > 10
    assert found.item() == pytest.approx(exact, rel=1e-6)
    assert student.grad is not None
    assert bool(student.grad.isfinite().all())
    assert float(student.grad[0, 0]) > 0.1
