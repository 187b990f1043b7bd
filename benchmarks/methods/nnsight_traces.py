"""(c) nnsight: one trace per cell, and several invokes in one trace, which is its documented way to batch.

Keys and values are set where the projections leave them. For keys that is before the rotation, which turns each
position by its own angle: copying a projected row and copying a rotated row at the same position are the same patch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.problem import Cell, Problem, twin

INVOKES = 8


class Run:
    """One trace per cell."""

    freeze = True  # see methods/__init__.py

    def __init__(self, problem: Problem) -> None:
        from nnsight import TransformersModel

        self.problem = problem
        self.model: Any = TransformersModel(
            twin(problem.model.hf), tokenizer=problem.model.tokenizer, task="text-generation"
        )
        self.ids = problem.ids()
        self.base, self.donor = self._read("old"), self._read("new")

    @torch.no_grad()
    def _read(self, which: str) -> list[tuple[Tensor, Tensor]]:
        keys, values = [], []
        with self.model.trace(self.problem.ids(which)):
            for layer in self.model.model.layers:
                keys.append(layer.self_attn.k_proj.output.save())
                values.append(layer.self_attn.v_proj.output.save())
        return list(zip(keys, values, strict=True))

    @torch.no_grad()
    def scores(self, cells: list[Cell]) -> Tensor:
        return torch.cat([self.problem.difference(self._one(layer, pos)) for layer, pos in cells])

    def _one(self, layer: int, pos: int) -> Tensor:
        with self.model.trace(self.ids):
            self._patch(layer, pos)
            logits = self.model.lm_head.output[:, -1].save()
        return logits

    def _patch(self, layer: int, pos: int) -> None:
        """What one invoke sets; called inside a trace."""
        layers, (keys, values) = self.model.model.layers, self.donor[layer]
        layers[layer].self_attn.k_proj.output[:, pos] = keys[:, pos]
        layers[layer].self_attn.v_proj.output[:, pos] = values[:, pos]
        if self.freeze:
            for above in range(layer + 1, len(self.base)):
                keys, values = self.base[above]
                layers[above].self_attn.k_proj.output[:, :-1] = keys[:, :-1]
                layers[above].self_attn.v_proj.output[:, :-1] = values[:, :-1]


class Loose(Run):
    """The patch alone."""

    freeze = False


class Batched(Run):
    """Several invokes per trace: one batched forward, each invoke patching its own row."""

    @torch.no_grad()
    def scores(self, cells: list[Cell]) -> Tensor:
        out = []
        for start in range(0, len(cells), INVOKES):
            out += [self.problem.difference(logits) for logits in self._many(cells[start : start + INVOKES])]
        return torch.cat(out)

    def _many(self, cells: list[Cell]) -> list[Tensor]:
        with self.model.trace() as tracer:
            rows = list().save()  # noqa: C408
            for layer, pos in cells:
                with tracer.invoke(self.ids):
                    self._patch(layer, pos)
                    rows.append(self.model.lm_head.output[:, -1])
        return rows


class BatchedLoose(Batched):
    """The patch alone."""

    freeze = False
