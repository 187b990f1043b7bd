"""(a) ours: one `engine.sweep` over all cells."""

from __future__ import annotations

from torch import Tensor

from benchmarks.problem import Cell, Problem
from kvnotes_interp import engine
from kvnotes_interp.sites import Site


class Run:
    """One sweep per call; the two prompts' caches are there already, as every other method's donor is."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.base, self.donor = problem.base, problem.donor
        self.scores(problem.cells[:1])  # the once-per-model trial of the shared path

    def scores(self, cells: list[Cell]) -> Tensor:
        p = self.problem
        sites = [Site((pos,), layers=(layer,)) for layer, pos in cells]
        result = engine.sweep(p.model, self.base, self.donor, sites, p.old[-1:], p.answers)
        assert result.path == "shared", result.plan.reason
        return result.difference
