"""How much arithmetic a sweep does, and how fast this machine multiplies matrices."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from benchmarks.problem import Cell
from benchmarks.timing import seconds
from kvnotes_interp import compat

if TYPE_CHECKING:
    from kvnotes_interp.model import Model


def sweep_flops(model: Model, cells: Sequence[Cell], n_tokens: int) -> float:
    """Floating-point operations of the layers, for single-layer cells and a tail of one token.

    Linear layers of every row from its patched layer on, and attention of one query against `n_tokens` keys. Norms,
    rotations, softmax and the corrections for patches are work too and are not counted.
    """
    s = model.shape
    width = s.n_heads * s.d_head
    linear = 2 * s.d_model * (2 * width + 2 * s.n_kv_heads * s.d_head + 3 * s.d_mlp)
    attention = 4 * width * n_tokens
    return float(sum(s.n_layers - layer for layer, _ in cells)) * (linear + attention)


def matmul_rates(device: torch.device, dtype: torch.dtype, *, d_model: int, d_mlp: int) -> dict[str, float]:
    """Measured rates in FLOP/s: a product of the sweep's shape, and a large square one. The best of several tries."""
    shapes = {
        f"[1024, {d_model}] x [{d_model}, {d_mlp}]": (1024, d_model, d_mlp),
        "[2048, 2048] x [2048, 2048]": (2048, 2048, 2048),
    }
    out = {}
    for name, (m, k, n) in shapes.items():
        a = torch.randn(m, k, device=device, dtype=dtype)
        w = torch.randn(n, k, device=device, dtype=dtype)
        repeat = max(1, int((4e11 if device.type == "cuda" else 1e10) / (2 * m * k * n)))

        def job(a: torch.Tensor = a, w: torch.Tensor = w, repeat: int = repeat) -> None:
            for _ in range(repeat):
                nn.functional.linear(a, w)

        job()
        out[name] = max(2.0 * m * k * n * repeat / seconds(job, device) for _ in range(5))
    return out


class Clock:
    """Seconds spent inside decoder layers."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._start = 0.0

    def start(self, *_: object) -> None:
        self._start = time.perf_counter()

    def stop(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._start


@contextmanager
def inner_clock(model: Model) -> Iterator[Clock]:
    """Time what happens inside the decoder layers, and nothing else. On a CPU: a layer ends when its call returns."""
    clock, handles = Clock(), []
    for layer in compat.layers(model.hf):
        handles += [layer.register_forward_pre_hook(clock.start), layer.register_forward_hook(clock.stop)]
    try:
        yield clock
    finally:
        for handle in handles:
            handle.remove()
