"""How the time of one cell grows with the prompt, and with the number of rows in a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.methods.ours import Run
from benchmarks.problem import english
from benchmarks.report import Table
from benchmarks.timing import Spread, interleaved

if TYPE_CHECKING:
    from kvnotes_interp.model import Model


def run(
    model: Model,
    *,
    lengths: Sequence[int] = (64, 128, 256, 512, 1024, 2048),
    cells: int = 960,
    rows: Sequence[int] = (64, 256, 1024, 4096),
    rows_tokens: int = 512,
    rounds: int = 3,
) -> tuple[tuple[Table, Table], dict[str, Any]]:
    """Time per cell against T (the same number of cells at each), and against rows at one T; interleaved rounds."""
    at_length = {n: Run(english(model, n)) for n in lengths}
    jobs = {
        f"{n}": lambda turn, n=n: at_length[n].scores(at_length[n].problem.sample(cells, seed=turn)) for n in lengths
    }
    timed = interleaved(jobs, rounds=rounds, device=model.device)
    counts = {n: min(cells, len(at_length[n].problem.cells)) for n in lengths}
    per_cell = {n: [t / counts[n] * 1e3 for t in timed[f"{n}"]] for n in lengths}

    many = Run(english(model, rows_tokens))
    more = {f"{n}": lambda turn, n=n: many.scores(many.problem.sample(n, seed=turn)) for n in rows}
    timed = interleaved(more, rounds=rounds, device=model.device)
    per_row = {n: [t / n * 1e3 for t in timed[f"{n}"]] for n in rows}

    first = Spread.of(per_cell[lengths[0]]).median
    growth = {n: Spread.of(v).median / first for n, v in per_cell.items()}
    by_length = Table(
        f"Time per cell against prompt length ({cells:,} cells at each)",
        ("tokens", "ms per cell: median (min-max)", "times the shortest", "times as many tokens"),
        tuple((f"{n}", Spread.of(per_cell[n]).text(), f"{growth[n]:.2f}", f"{n / lengths[0]:.0f}") for n in lengths),
    )
    by_rows = Table(
        f"Time per cell against rows ({rows_tokens} tokens)",
        ("rows", "ms per cell: median (min-max)"),
        tuple((f"{n:,}", Spread.of(per_row[n]).text()) for n in rows),
    )
    raw = {"ms_per_cell_by_tokens": per_cell, "ms_per_cell_by_rows": per_row, "growth": growth, "cells": counts}
    return (by_length, by_rows), raw
