"""Running a model on caches: prefill, extend, decide, decode, capture, and the sweep over many patched caches."""

from kvnotes_interp.attention import Cut
from kvnotes_interp.engine.capture import Captured, answer_logits, capture, head_writes
from kvnotes_interp.engine.edits import Edits, HeadPatch, ResidualPatch, WritePatch
from kvnotes_interp.engine.forward import (
    Generated,
    attention_by_layer,
    attention_rows,
    decide,
    decode,
    extend,
    logits_of,
    noise_floor,
    prefill,
)
from kvnotes_interp.engine.selective import Recomputed, blend, recompute
from kvnotes_interp.engine.sweep import SweepPlan, SweepResult, plan_sweep, sweep

__all__ = [
    "Captured",
    "Cut",
    "Edits",
    "Generated",
    "HeadPatch",
    "Recomputed",
    "ResidualPatch",
    "SweepPlan",
    "SweepResult",
    "WritePatch",
    "answer_logits",
    "attention_by_layer",
    "attention_rows",
    "blend",
    "capture",
    "decide",
    "decode",
    "extend",
    "head_writes",
    "logits_of",
    "noise_floor",
    "plan_sweep",
    "prefill",
    "recompute",
    "sweep",
]
