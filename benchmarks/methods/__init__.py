"""The ways to fill the grid, each as its own documentation does it.

A method is prepared once per problem (booting, and reading both runs' activations, are not timed) and then returns
the score of each cell it is given.

A cell patches what the *decision* reads from the cache: the tokens between the patch and the last one have been read
already and stay as they were. In a full forward they are read again and carry the patch upward, which is another
question with other answers. So the full forwards *freeze* them: in the layers
above the patch, keys and values before the last token are set back to the old run's. The `loose` entries leave
that out: they are timed, to show what freezing costs, and not compared.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from benchmarks.problem import Cell, Problem


class Method(Protocol):
    """A prepared method: `scores(cells)` gives the logit difference of each cell, on the CPU, in float32 or more."""

    def __init__(self, problem: Problem) -> None: ...

    def scores(self, cells: list[Cell]) -> Tensor: ...


@dataclass(frozen=True)
class Entry:
    """A method's place in the table. `fast` methods are given more cells; `same` ones must give the same numbers."""

    key: str
    label: str
    module: str
    cls: str = "Run"
    needs: str = ""
    fast: bool = False
    same: bool = True
    least: int = 1  # cells per call below which the method would not show what it can do

    def missing(self) -> str:
        """Why this method cannot run here, or an empty string."""
        if self.needs and importlib.util.find_spec(self.needs) is None:
            return f"{self.needs} is not installed: pip install -e '.[lens,nnsight]'"
        return ""

    def prepare(self, problem: Problem) -> Method:
        return getattr(importlib.import_module(f"benchmarks.methods.{self.module}"), self.cls)(problem)


METHODS = {
    e.key: e
    for e in (
        Entry("a", "ours, engine.sweep", "ours", fast=True),
        Entry("b", "TransformerLens bridge, one forward per cell", "lens", needs="transformer_lens"),
        Entry("c1", "nnsight, one trace per cell", "nnsight_traces", needs="nnsight"),
        Entry("c2", "nnsight, 8 invokes per trace", "nnsight_traces", cls="Batched", needs="nnsight", least=8),
        Entry("d", "plain hooks, one forward per cell", "hooks"),
        Entry("d2", "plain hooks, last token's logits only", "hooks", cls="LastLogits"),
        Entry("e", "batched copies of the cache, 64 rows", "copies", fast=True),
        Entry("b loose", "TransformerLens, not frozen", "lens", cls="Loose", needs="transformer_lens", same=False),
        Entry("c1 loose", "nnsight, not frozen", "nnsight_traces", cls="Loose", needs="nnsight", same=False),
        Entry(
            "c2 loose",
            "nnsight, 8 invokes, not frozen",
            "nnsight_traces",
            cls="BatchedLoose",
            needs="nnsight",
            same=False,
            least=8,
        ),
        Entry("d loose", "plain hooks, not frozen", "hooks", cls="Loose", same=False),
    )
}
