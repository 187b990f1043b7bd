"""(b) TransformerLens: `run_with_hooks` on the rotated keys and the values, one full forward per cell.

`transformer_lens.patching.generic_activation_patch` does the same, for one activation name at a time; a cell here is a
key and a value, so hooks for both are given. The KV cache is not used.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.problem import Cell, Problem, twin


class Run:
    """A bridge booted from the loaded model, over the same weights."""

    freeze = True  # see methods/__init__.py

    def __init__(self, problem: Problem) -> None:
        from transformer_lens.model_bridge import TransformerBridge

        self.problem = problem
        model = problem.model
        self.bridge: Any = TransformerBridge.boot_transformers(
            model.name, hf_model=twin(model.hf), tokenizer=model.tokenizer, dtype=model.dtype
        )
        self.ids = problem.ids()
        self.base, self.donor = self._cache("old"), self._cache("new")

    @torch.no_grad()
    def _cache(self, which: str) -> Any:
        wanted = lambda name: name.endswith(("hook_rot_k", "hook_v"))  # noqa: E731
        return self.bridge.run_with_cache(self.problem.ids(which), names_filter=wanted)[1]

    @torch.no_grad()
    def scores(self, cells: list[Cell]) -> Tensor:
        out = []
        for layer, pos in cells:
            hooks = [(name, partial(_put, donor=self.donor[name], at=slice(pos, pos + 1))) for name in _names(layer)]
            if self.freeze:
                later = (
                    name for above in range(layer + 1, self.problem.model.shape.n_layers) for name in _names(above)
                )
                hooks += [(name, partial(_put, donor=self.base[name], at=slice(0, -1))) for name in later]
            logits = self.bridge.run_with_hooks(self.ids, return_type="logits", fwd_hooks=hooks)
            out.append(self.problem.difference(logits[0, -1]))
        return torch.stack(out)


class Loose(Run):
    """The patch alone."""

    freeze = False


def _names(layer: int) -> tuple[str, str]:
    return f"blocks.{layer}.attn.hook_rot_k", f"blocks.{layer}.attn.hook_v"


def _put(activation: Tensor, hook: Any, *, donor: Tensor, at: slice) -> Tensor:
    activation[:, at] = donor[:, at]  # [batch pos kv_head d_head]
    return activation
