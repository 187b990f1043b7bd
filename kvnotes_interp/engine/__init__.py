"""Running a model on caches: prefill, extend, decide, decode, and the sweep over many patched caches."""

from kvnotes_interp.engine.forward import (
    Generated,
    attention_rows,
    decide,
    decode,
    extend,
    noise_floor,
    prefill,
)
from kvnotes_interp.engine.sweep import SweepPlan, SweepResult, plan_sweep, sweep

__all__ = [
    "Generated",
    "SweepPlan",
    "SweepResult",
    "attention_rows",
    "decide",
    "decode",
    "extend",
    "noise_floor",
    "plan_sweep",
    "prefill",
    "sweep",
]
