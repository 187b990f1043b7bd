"""(d) Plain PyTorch: forward hooks on `k_proj` and `v_proj`, one full forward per cell.

Before the rotation, which is the same patch: see `nnsight_traces.py`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from benchmarks.problem import Cell, Problem

_NAMES = ("k_proj", "v_proj")


class Run:
    """`model(ids).logits[0, -1]` under hooks."""

    freeze = True  # see methods/__init__.py
    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, problem: Problem) -> None:
        self.problem, self.ids = problem, problem.ids()
        self.hf: Any = problem.model.hf
        self.base, self.donor = self._read("old"), self._read("new")

    @torch.no_grad()
    def _read(self, which: str) -> dict[tuple[int, str], Tensor]:
        found: dict[tuple[int, str], Tensor] = {}
        handles = []
        for layer in range(len(self.hf.model.layers)):
            for name in _NAMES:
                keep = lambda _m, _a, out, key=(layer, name): found.update({key: out})  # noqa: E731
                handles.append(self._module(layer, name).register_forward_hook(keep))
        try:
            self.hf(self.problem.ids(which), use_cache=False, logits_to_keep=1)
        finally:
            for handle in handles:
                handle.remove()
        return found

    def _module(self, layer: int, name: str) -> nn.Module:
        return getattr(self.hf.model.layers[layer].self_attn, name)

    @torch.no_grad()
    def scores(self, cells: list[Cell]) -> Tensor:
        return torch.stack([self._one(layer, pos) for layer, pos in cells])

    def _one(self, layer: int, pos: int) -> Tensor:
        above = range(layer + 1, len(self.hf.model.layers)) if self.freeze else ()
        handles = [self._hook(layer, name, self.donor, slice(pos, pos + 1)) for name in _NAMES]
        handles += [self._hook(index, name, self.base, slice(0, -1)) for index in above for name in _NAMES]
        try:
            logits = self.hf(self.ids, use_cache=False, **self.options).logits[0, -1]
        finally:
            for handle in handles:
                handle.remove()
        return self.problem.difference(logits)

    def _hook(self, layer: int, name: str, source: dict[tuple[int, str], Tensor], at: slice) -> Any:
        donor = source[layer, name]

        def put(_module: nn.Module, _args: Any, out: Tensor) -> Tensor:
            out[:, at] = donor[:, at]
            return out

        return self._module(layer, name).register_forward_hook(put)


class LastLogits(Run):
    """The same, with the unembedding of the last token only."""

    options: ClassVar[dict[str, Any]] = {"logits_to_keep": 1}


class Loose(Run):
    """The patch alone."""

    freeze = False
