"""The same grid by every method, in one process, in interleaved rounds: cells per second, and the ratios to ours."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.arithmetic import inner_clock, matmul_rates, sweep_flops
from benchmarks.memory import peak_of
from benchmarks.methods import METHODS, Entry, Method
from benchmarks.problem import Cell, Problem
from benchmarks.report import Table, mib
from benchmarks.timing import Spread, interleaved, seconds

# Largest difference of a logit difference between two methods. bf16 carries 8 bits; its rounding differs by method.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}
_SEED = 0


@dataclass(frozen=True)
class Effort:
    """How many cells each kind of method is given per round (`ours=None`: the whole grid).

    `check` cells are compared between all methods. Peak memory and the time inside the layers are taken apart from the
    timed rounds, on at most `most` cells.
    """

    rounds: int = 3
    ours: int | None = None
    batched: int = 128
    slow: int = 8
    loose: int = 4
    check: int = 12
    most: int = 4096


class Disagreement(AssertionError):
    """Two methods gave different numbers for the same cell."""


def prepare(problem: Problem, keys: Sequence[str]) -> tuple[dict[str, Method], dict[str, str]]:
    """The methods that can run here, and for the others the reason."""
    ready, skipped = {}, {}
    for key in keys:
        if reason := METHODS[key].missing():
            skipped[key] = reason
        else:
            ready[key] = METHODS[key].prepare(problem)
    return ready, skipped


def agree(problem: Problem, methods: Mapping[str, Method], n: int) -> dict[str, Any]:
    """Every method on one shared sample of cells. Raises Disagreement beyond the tolerance.

    The sample holds cells at the field, so that what is compared is not the unpatched run again and again.
    """
    cells = problem.shared_sample(n, seed=_SEED)
    found = {key: method.scores(cells).double() for key, method in methods.items() if METHODS[key].same}
    want, tolerance = found[next(iter(found))], TOLERANCE[problem.model.dtype]
    gaps = {key: float((scores - want).abs().max()) for key, scores in found.items()}
    for key, gap in gaps.items():
        if not gap < tolerance:
            raise Disagreement(f"{METHODS[key].label}: off by {gap:.3g} logits from the first method ({tolerance=:g}).")
    return {
        "cells": len(cells),
        "tolerance": tolerance,
        "largest_difference": gaps,
        "largest_effect": float((want - want.median()).abs().max()),
    }


def run(problem: Problem, *, keys: Sequence[str], effort: Effort) -> tuple[Table, dict[str, Any]]:
    """One table for one prompt length."""
    device = problem.model.device
    methods, skipped = prepare(problem, keys)
    agreement = agree(problem, methods, effort.check)
    shape = problem.model.shape
    rates = [matmul_rates(device, problem.model.dtype, d_model=shape.d_model, d_mlp=shape.d_mlp)]

    counts = {key: min(_count(METHODS[key], effort) or len(problem.cells), len(problem.cells)) for key in methods}
    cells = {key: [problem.sample(n, seed=_SEED + turn) for turn in range(effort.rounds)] for key, n in counts.items()}
    jobs: dict[str, Callable[[int], Tensor]] = {
        key: lambda turn, key=key: methods[key].scores(cells[key][turn]) for key in methods
    }
    for key in methods:  # once each, untimed
        methods[key].scores(cells[key][0][:2])
    times = interleaved(jobs, rounds=effort.rounds, device=device, seed=_SEED)
    # The rate is taken before and after: the better counts, so that a disturbance does not flatter the sweep.
    rates.append(matmul_rates(device, problem.model.dtype, d_model=shape.d_model, d_mlp=shape.d_mlp))
    rate = {name: max(r[name] for r in rates) for name in rates[0]}
    peaks = {key: peak_of(lambda key=key: methods[key].scores(cells[key][0][: effort.most]), device) for key in methods}
    speed = {key: [counts[key] / t for t in times[key]] for key in methods}
    raw: dict[str, Any] = {
        "tokens": problem.n_tokens,
        "grid": len(problem.cells),
        "cells": counts,
        "rounds": effort.rounds,
        "seconds": times,
        "cells_per_second": speed,
        "peak_bytes": {key: peak for key, (peak, _) in peaks.items()},
        "peak_how": next(iter(peaks.values()))[1],
        "matmul_flops_per_second": rate,
        "agreement": agreement,
        "skipped": skipped,
    }
    if "a" in methods:
        raw["ratio"] = {key: [o / s for o, s in zip(speed["a"], speed[key], strict=True)] for key in methods}
        raw["utilisation"] = _utilisation(
            problem, methods["a"], cells["a"], max(rate.values()), times["a"], effort.most
        )
    return _table(problem, raw), raw


def _count(entry: Entry, effort: Effort) -> int | None:
    if entry.key == "a":
        return effort.ours
    if entry.fast:
        return effort.batched
    return max(entry.least, effort.slow if entry.same else effort.loose)


def _utilisation(
    problem: Problem, ours: Method, cells: list[list[Cell]], rate: float, times: list[float], most: int
) -> dict[str, Any]:
    """Arithmetic done / (measured matmul rate x time), end to end and inside the layers."""
    flops = [sweep_flops(problem.model, turn, problem.n_tokens) for turn in cells]
    out: dict[str, Any] = {"flops": flops[0], "end_to_end": [f / (rate * t) for f, t in zip(flops, times, strict=True)]}
    if problem.model.device.type == "cpu":
        out["inner_loop"] = []
        some = cells[0] if len(cells[0]) <= most else problem.sample(most, seed=_SEED)
        flops = sweep_flops(problem.model, some, problem.n_tokens)
        for _ in times:
            with inner_clock(problem.model) as clock:
                total = seconds(lambda: ours.scores(some), problem.model.device)
            out["inner_loop"].append(flops / (rate * clock.seconds))
            out.setdefault("inner_share_of_time", []).append(clock.seconds / total)
    return out


def _table(problem: Problem, raw: dict[str, Any]) -> Table:
    rows = []
    for key, speed in raw["cells_per_second"].items():
        ratio = Spread.of(raw["ratio"][key]).text(".3g") if key != "a" and "ratio" in raw else "1"
        n = f"{raw['cells'][key]:,} x {raw['rounds']}"
        rows.append((f"({key}) {METHODS[key].label}", n, Spread.of(speed).text(), ratio, mib(raw["peak_bytes"][key])))
    rows += [(f"({key}) {METHODS[key].label}", "skipped", reason, "", "") for key, reason in raw["skipped"].items()]
    agreement = raw["agreement"]
    notes = [
        f"All methods agree on {agreement['cells']} cells within "
        f"{max(agreement['largest_difference'].values()):.1g} logits (tolerance {agreement['tolerance']:g}); the "
        f"largest effect among those cells is {agreement['largest_effect']:.2g} logits.",
        f"Peak memory is what a call takes on top of the loaded model ({raw['peak_how']}).",
    ]
    if "utilisation" in raw:
        used = raw["utilisation"]
        rates = raw["matmul_flops_per_second"].items()
        best = " and ".join(f"{rate / 1e9:,.0f} GFLOP/s for {name}" for name, rate in rates)
        text = f"Ours does {used['flops'] / 1e9:,.0f} GFLOP; measured matmul rate {best}. Of the better rate the sweep "
        text += f"reaches {Spread.of(used['end_to_end']).text('.0%')} end to end"
        if "inner_loop" in used:
            text += f", {Spread.of(used['inner_loop']).text('.0%')} inside the layers"
        notes.append(text + ".")
    dtype = str(problem.model.dtype).removeprefix("torch.")
    title = f"{problem.model.name}, {problem.n_tokens} tokens, {len(problem.cells):,} cells, {dtype}"
    columns = ("method", "cells timed", "cells/s: median (min-max)", "ours is faster by", "peak memory")
    return Table(title, columns, tuple(rows), tuple(notes))


def threads() -> int:
    """As many threads as there are cores this process may use."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.floor(count))
