"""A trained choice of slots, in the manner of KV-Distill: the baseline that is trained by the same loop as Still."""

from kvnotes_interp.operators.scorer.scorer import Scorer, new_scorer
from kvnotes_interp.operators.scorer.settings import ScorerSettings

__all__ = ["Scorer", "ScorerSettings", "new_scorer"]
