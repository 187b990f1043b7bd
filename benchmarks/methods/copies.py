"""(e) A plain implementation of KV patching: copy the cache once per row, overwrite, run the last token on the batch.

Written without this package's cache and engine.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from benchmarks.problem import Cell, Problem

ROWS = 64


class Run:
    """Batches of 64 copied caches, fewer where 64 do not fit the device."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.hf: Any = problem.model.hf
        self.old, self.new = self._prefill("old"), self._prefill("new")
        self.rows = ROWS
        if problem.model.device.type == "cuda":
            row = sum(t.nbytes for pair in self.old for t in pair)
            free = torch.cuda.mem_get_info(problem.model.device)[0]
            self.rows = int(max(1, min(ROWS, free // (3 * row))))  # the copy, and what the cache's append makes of it

    @torch.no_grad()
    def _prefill(self, which: str) -> list[tuple[Tensor, Tensor]]:
        cache = DynamicCache()
        self.hf(self.problem.ids(which)[:, :-1], past_key_values=cache, use_cache=True, logits_to_keep=1)
        return [(layer.keys, layer.values) for layer in cache.layers]

    @torch.no_grad()
    def scores(self, cells: list[Cell]) -> Tensor:
        parts = [self._batch(cells[i : i + self.rows]) for i in range(0, len(cells), self.rows)]
        return torch.cat(parts)

    def _batch(self, cells: list[Cell]) -> Tensor:
        n, last = len(cells), self.problem.ids()[:, -1:]
        cache = DynamicCache()
        for layer, ((k, v), (donor_k, donor_v)) in enumerate(zip(self.old, self.new, strict=True)):
            keys, values = k.repeat(n, 1, 1, 1), v.repeat(n, 1, 1, 1)
            for row, (at, pos) in enumerate(cells):
                if at == layer:
                    keys[row, :, pos], values[row, :, pos] = donor_k[0, :, pos], donor_v[0, :, pos]
            cache.update(keys, values, layer)
        out = self.hf(last.expand(n, 1), past_key_values=cache, use_cache=True, logits_to_keep=1)
        return self.problem.difference(out.logits[:, -1])
