"""The checkpointing benchmark on a tiny model: what it counts is what the two paths keep."""

from __future__ import annotations

import pytest
import torch

from benchmarks import checkpointing
from tests.tiny import tiny


@pytest.mark.parametrize("kind", ["sempic", "packet"])
def test_a_run_counts_less_for_the_checkpointed_path_and_grows_with_the_document(kind: str) -> None:
    model = tiny("llama")
    (table,), raw = checkpointing.run(model, lengths=(32, 64), rounds=2, kind=kind)
    assert [row[0] for row in table.rows] == ["32", "64"]
    assert all(len(row) == len(table.columns) for row in table.rows)
    small, large = (raw["lengths"][n] for n in (32, 64))
    for at in (small, large):
        assert at["bytes"]["checkpointed"] < 0.5 * at["bytes"]["plain"]
        assert {arm: len(found) for arm, found in at["seconds"].items()} == {"plain": 2, "checkpointed": 2}
        assert at["peak_bytes"] == {}, "a CPU has no allocator to ask"
    for arm in checkpointing.ARMS:
        assert small["bytes"][arm] < large["bytes"][arm]


def test_a_step_reaches_what_is_trained() -> None:
    forward, trained, weights = checkpointing._compiling(tiny("llama"), 16, True, "joint")
    loss = torch.stack([t.square().sum() for t in forward()]).sum()
    grads = torch.autograd.grad(loss, trained, allow_unused=True)
    assert sum(grad is not None for grad in grads) >= 2
    assert {id(t) for t in trained} <= {id(t) for t in weights}
