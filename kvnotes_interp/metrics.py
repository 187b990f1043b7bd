"""Readouts: what a cache makes the model do, as numbers.

Scores are `s = logit[new answer] - logit[old answer]` at the decision position: below zero the model acts on the old
value, above zero on the new one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


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

    def reason(self, *, old: float, new: float, noise: float, control: bool = False) -> str:
        """Why this pair is set aside, or an empty string. Both signs are required: `s_old < 0 < s_new`.

        A pair of a control family is always set aside: its answer must not change, so it has no recovery.
        """
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
