"""Readouts: what a cache makes the model do, as numbers.

Distances between next-token distributions take logits over the whole vocabulary; logit cosine says little on its own
and always stands beside KL and agreement. Answers are compared as texts. Scores are
`s = logit[new answer] - logit[old answer]` at the decision position: below zero the model acts on the old value, above
zero on the new one.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxtyping import Bool, Float

from kvnotes_interp.errors import NOT_FINITE, InputError

if TYPE_CHECKING:
    from torch import Tensor


def recovery(score: float, *, old: float, new: float) -> float:
    """`(s - s_old) / (s_new - s_old)`: 0 acts as the stale cache, 1 as the oracle. (Notes, arXiv 2606.17107.)

    NaN when old and new do not differ; `competence` keeps such pairs out before anything is averaged.
    """
    gap = new - old
    return (score - old) / gap if gap != 0 else math.nan


@dataclass(frozen=True)
class Competence:
    """Whether a pair may count: the model must change its answer, by more than noise.

    Attributes:
        min_gap: least `s_new - s_old`, in logits.
        min_gap_noise: the same, in units of the measured noise floor; the larger of the two holds.
    """

    min_gap: float = 0.25
    min_gap_noise: float = 50.0

    def __post_init__(self) -> None:
        for name in ("min_gap", "min_gap_noise"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise InputError(f"{name}={value!r}: give a number from 0.")

    def reason(self, *, old: float, new: float, noise: float, control: bool = False) -> str:
        """Why this pair is set aside, or an empty string. Both signs are required: `s_old < 0 < s_new`.

        A pair of a control family is always set aside: its answer must not change, so it has no recovery.
        """
        if not (math.isfinite(old) and math.isfinite(new)):
            return f"{NOT_FINITE} score"
        if control:
            return "control family: no change of answer is expected"
        if old >= 0 and new <= 0:
            return "answers reversed"
        if old >= 0:
            return "old prompt not answered"
        if new <= 0:
            return "new prompt not answered"
        if new - old < max(self.min_gap, self.min_gap_noise * noise):
            return "gap below minimum"
        return ""


# --- next-token distributions: logits over the whole vocabulary ------------------------------------------------------


def kl_divergence(
    reference: Float[Tensor, "*rows token"], other: Float[Tensor, "*rows token"]
) -> Float[Tensor, "*rows"]:
    """KL(reference || other) in nats, per row, in float64. Constants added to a row of logits change nothing."""
    _same_shape(reference, other)
    log_p, log_q = reference.double().log_softmax(-1), other.double().log_softmax(-1)
    # Rounding can leave a hair below zero where the two are equal.
    return (log_p.exp() * (log_p - log_q)).sum(-1).clamp_min(0.0)


def logit_cosine(
    reference: Float[Tensor, "*rows token"], other: Float[Tensor, "*rows token"]
) -> Float[Tensor, "*rows"]:
    """Cosine of two logit vectors, per row, in float64, not centred (Notes, arXiv 2606.17107).

    Logits share a large common part, so two caches that decide differently easily score 0.99: never read it alone.
    """
    _same_shape(reference, other)
    a, b = reference.double(), other.double()
    return (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))


def agreement(reference: Float[Tensor, "*rows token"], other: Float[Tensor, "*rows token"]) -> Bool[Tensor, "*rows"]:
    """Whether both rows put the same token first."""
    _same_shape(reference, other)
    return reference.argmax(-1) == other.argmax(-1)


def _same_shape(a: Tensor, b: Tensor) -> None:
    if a.shape != b.shape:
        raise InputError(f"logits of shape {tuple(a.shape)} and {tuple(b.shape)}: one row of each is compared.")


# --- answers as texts ------------------------------------------------------------------------------------------------


def normalised(text: str) -> str:
    """Lower case, without punctuation, without a, an and the, single spaces: the usual form for comparing answers."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def exact_match(prediction: str, answers: str | Sequence[str]) -> bool:
    """Whether the normalised prediction is one of the normalised answers."""
    return normalised(prediction) in {normalised(answer) for answer in _several(answers)}


def token_f1(prediction: str, answers: str | Sequence[str]) -> float:
    """F1 of the words of prediction and answer after `normalised`; the best over several answers.

    Two empty texts agree (1), an empty one and another do not (0).
    """
    return max(_f1(*_overlap(prediction, answer)) for answer in _several(answers))


def micro_f1(predictions: Sequence[str], answers: Sequence[str | Sequence[str]]) -> float:
    """F1 of words pooled over a corpus: overlaps and lengths are summed first (SemPIC, arXiv 2607.28069).

    Of several answers the one with the best `token_f1` counts. NaN for no predictions.
    """
    if len(predictions) != len(answers):
        raise InputError(f"{len(predictions)} predictions and {len(answers)} answers: one answer per prediction.")
    if not predictions:
        return math.nan
    best = [
        max((_overlap(prediction, one) for one in _several(several)), key=lambda counts: _f1(*counts))
        for prediction, several in zip(predictions, answers, strict=True)
    ]
    return _f1(*(sum(column) for column in zip(*best, strict=True)))


def _several(answers: str | Sequence[str]) -> Sequence[str]:
    several = (answers,) if isinstance(answers, str) else tuple(answers)
    if not several:
        raise InputError("no answer to compare with: give at least one.")
    return several


def _overlap(prediction: str, answer: str) -> tuple[int, int, int]:
    """Words in common (with repeats), words of the prediction, words of the answer."""
    mine, theirs = normalised(prediction).split(), normalised(answer).split()
    return sum((Counter(mine) & Counter(theirs)).values()), len(mine), len(theirs)


def _f1(common: int, mine: int, theirs: int) -> float:
    # 2PR / (P + R) with P = common / mine and R = common / theirs.
    return 2 * common / (mine + theirs) if mine + theirs else 1.0
