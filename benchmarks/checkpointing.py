"""KV gradient checkpointing: what a Writer keeps for backward, and how long a step takes, as the document grows."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from benchmarks.report import Table, mib
from benchmarks.timing import Spread, interleaved

if TYPE_CHECKING:
    from torch import Tensor

    from kvnotes_interp.model import Model

LENGTHS = (1024, 2048, 4096)
ARMS = {"plain": False, "checkpointed": True}


def run(
    model: Model, *, lengths: Sequence[int] = LENGTHS, rounds: int = 3, kind: Any = "sempic"
) -> tuple[tuple[Table, ...], dict[str, Any]]:
    """One table: bytes kept for backward, seconds of forward and backward, and on CUDA the allocator's peak.

    One document of random tokens is compiled by a new Writer; the loss reads every key and value. Bytes are those of
    saved tensors and of the keys and values themselves, each storage once, without weights. Rounds are interleaved.
    """
    found: dict[int, dict[str, Any]] = {}
    for tokens in lengths:
        compiled = {arm: _compiling(model, tokens, checkpoint, kind) for arm, checkpoint in ARMS.items()}
        seconds = interleaved(
            {arm: lambda _turn, c=call: _step(*c) for arm, call in compiled.items()}, rounds=rounds, device=model.device
        )
        found[tokens] = {
            "bytes": {arm: _bytes(*call) for arm, call in compiled.items()},
            "seconds": seconds,
            "peak_bytes": {arm: _peak(*call) for arm, call in compiled.items()} if model.device.type == "cuda" else {},
        }
    columns = [
        "tokens",
        "kept, plain",
        "kept, checkpointed",
        "share",
        "step, plain, s",
        "step, checkpointed, s",
        "ratio",
    ]
    peaks = model.device.type == "cuda"
    columns += ["peak, plain", "peak, checkpointed"] if peaks else []
    rows = []
    for tokens, at in found.items():
        plain, saved = at["bytes"]["plain"], at["bytes"]["checkpointed"]
        slow = [b / a for a, b in zip(at["seconds"]["plain"], at["seconds"]["checkpointed"], strict=True)]
        row = [f"{tokens:,}", mib(plain), mib(saved), f"{saved / plain:.1%}"]
        row += [Spread.of(at["seconds"][arm]).text() for arm in ARMS] + [Spread.of(slow).text(".2f")]
        rows.append((*row, *(mib(size) for size in at["peak_bytes"].values())))
    about = (
        f"{model.name}, {kind} Writer, one document. Kept: tensors saved for backward, keys and values, each storage "
        f"once, weights left out. Step: forward and backward, median (min-max) of {rounds} rounds."
    )
    table = Table("KV gradient checkpointing of a Writer", tuple(columns), tuple(rows), (about,))
    return (table,), {"model": model.name, "kind": kind, "lengths": found}


Compiling = tuple[Callable[[], list["Tensor"]], list["Tensor"], list["Tensor"]]


def _compiling(model: Model, tokens: int, checkpoint: bool, kind: Any) -> Compiling:
    """(forward pass that gives all keys and values, what is trained, weights that are there anyway)."""
    from kvnotes_interp.operators import new_writer
    from kvnotes_interp.training.checkpointing import kv_checkpointing

    writer = new_writer(model, kind)
    rng = random.Random(0)
    ids = [rng.randrange(3, model.shape.vocab) for _ in range(tokens)]
    network, trained = writer.network(model), list(writer.parameters().values())

    def forward() -> list[Tensor]:
        with kv_checkpointing(network) if checkpoint else nullcontext():
            cache = writer.compile(model, [ids])[0]
        return [*cache.keys, *cache.values]

    return forward, trained, [*network.parameters(), *network.buffers(), *trained]


def _step(forward: Callable[[], list[Tensor]], trained: list[Tensor], _weights: list[Tensor]) -> None:
    import torch

    loss = torch.stack([t.float().square().mean() for t in forward()]).sum()
    torch.autograd.grad(loss, trained, allow_unused=True)


def _bytes(forward: Callable[[], list[Tensor]], _trained: list[Tensor], weights: list[Tensor]) -> int:
    from kvnotes_interp.training.checkpointing import saved_bytes

    return saved_bytes(forward, apart_from=weights)


def _peak(forward: Callable[[], list[Tensor]], trained: list[Tensor], weights: list[Tensor]) -> int:
    """What a step adds to the memory that CUDA's allocator has given out, at its highest."""
    import torch

    device = weights[0].device
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    _step(forward, trained, weights)
    return torch.cuda.max_memory_allocated(device) - before
