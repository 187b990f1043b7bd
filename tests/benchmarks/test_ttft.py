"""The TTFT benchmark at tiny lengths: what it times is what it says, and its slope is that of a power law."""

from __future__ import annotations

import math

import pytest

from benchmarks import ttft
from kvnotes_interp import operators
from kvnotes_interp.operators import find
from tests.tiny import tiny


def test_blocks_have_the_length_and_the_pieces() -> None:
    blocks = ttft.blocks_of(97, 200, 5)
    assert len(blocks) == 200
    assert (len(blocks.prefix), len(blocks.suffix)) == (ttft.PREFIX, ttft.SUFFIX)
    sizes = [len(chunk) for chunk in blocks.chunks]
    assert len(sizes) == 5
    assert max(sizes) - min(sizes) <= 1
    assert blocks == ttft.blocks_of(97, 200, 5)
    assert blocks != ttft.blocks_of(97, 200, 5, seed=1)


def test_the_arms_are_operators_and_every_job_gives_their_token() -> None:
    model = tiny("llama")
    jobs = ttft._jobs(model, 80, 2, ttft.ARMS)
    assert set(jobs) == {ttft.FULL, *ttft.ARMS}
    blocks = ttft.blocks_of(model.shape.vocab, 80, 2)
    from kvnotes_interp import compat, engine

    for arm, name in {ttft.FULL: "full_recompute", **ttft.ARMS}.items():
        _, hidden = engine.extend(model, find(name)(model, blocks).cache, blocks.suffix)
        assert jobs[arm](0) == int(compat.unembed(model.hf, hidden[:, -1])[0].argmax()), arm


def test_compiling_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    jobs = ttft._jobs(model, 80, 2, ttft.ARMS)
    monkeypatch.setattr(operators, "precompile", lambda *_: pytest.fail("compiled inside the timed call"))
    monkeypatch.setattr("kvnotes_interp.operators.compose.precompile", lambda *_: pytest.fail("compiled inside"))
    for call in jobs.values():
        call(1)


def test_slope_is_the_power() -> None:
    assert ttft.slope({n: 0.5 * n**0.7 for n in (256, 512, 2048)}) == pytest.approx(0.7)
    assert ttft.slope(dict.fromkeys((256, 512), 3.0)) == pytest.approx(0.0)
    assert math.isnan(ttft.slope({256: 2.0}))


def test_a_run_gives_a_table_per_number_of_chunks() -> None:
    tables, raw = ttft.run(tiny("llama"), lengths=(64, 96), chunks=(1, 2), rounds=2)
    assert [table.title for table in tables] == [
        "Time to the first token, 1 chunk",
        "Time to the first token, 2 chunks",
    ]
    assert [row[0] for row in tables[0].rows] == ["64", "96"]
    assert all(len(row) == len(table.columns) for table in tables for row in table.rows)
    one = raw["chunks_1"]
    assert one["speedup"]["splice"][64][0] == pytest.approx(
        one["seconds"][64][ttft.FULL][0] / one["seconds"][64]["splice"][0]
    )
    assert set(one["slope"]) == set(ttft.ARMS)
