"""The compaction benchmark on a tiny model: what it times is what it says, and its ratios are of one round."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import compaction
from benchmarks.patch_sweep import Disagreement
from kvnotes_interp import engine
from kvnotes_interp.compact import CompactCache
from kvnotes_interp.operators import eviction
from kvnotes_interp.operators.eviction import Compactor
from kvnotes_interp.operators.still import new_still
from tests.tiny import tiny

STEPS = [compaction._steps(count) for count in (compaction.FEW, compaction.MORE)]


def test_a_context_has_its_length() -> None:
    ids = compaction.context(tiny("llama"), 50)
    assert len(ids) == 50
    assert ids == compaction.context(tiny("llama"), 50)
    assert ids != compaction.context(tiny("llama"), 50, seed=1)


def test_a_context_is_text_where_there_is_a_tokenizer() -> None:
    from kvnotes_interp.model import load

    model = load("organism:trained", check=False)
    ids = compaction.context(model, 300)
    assert len(ids) == 300
    assert "Biography of" in model.tokenizer.decode(ids)
    assert model.tokenizer.unk_token_id not in ids


def test_every_job_is_its_compactor_on_the_same_slots() -> None:
    model = tiny("llama")
    cache, still = engine.prefill(model, compaction.context(model, 40)), new_still(model)
    jobs = compaction.jobs_of(model, still, cache, 4)
    names = {**compaction.METHODS, **dict.fromkeys(STEPS, "trained_cache")}
    assert list(jobs) == [compaction.STILL, *names]
    assert jobs[compaction.STILL]().cache.slots == (10,) * cache.n_layers
    torch.testing.assert_close(
        jobs[compaction.STILL]().cache.keys, still(model, cache, budget=10).cache.keys, rtol=0, atol=0
    )
    for title, name in names.items():
        options = {"steps": int(title.split()[2])} if title in STEPS else {}
        made, again = jobs[title]().cache, eviction.find(name)(model, cache, budget=10, **options).cache
        assert made.slots == (10,) * cache.n_layers
        torch.testing.assert_close((made.keys, made.values), (again.keys, again.values), rtol=0, atol=0)


def test_the_prefill_is_not_timed_with_a_method(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    jobs = compaction.jobs_of(model, new_still(model), engine.prefill(model, compaction.context(model, 40)), 4)
    monkeypatch.setattr(engine, "prefill", lambda *_, **__: pytest.fail("prefilled inside the timed call"))
    for job in jobs.values():
        job()


def test_steps_are_extrapolated_in_each_round() -> None:
    fixed, each = (2.0, 3.0), (0.5, 0.25)
    few = [a + compaction.FEW * b for a, b in zip(fixed, each, strict=True)]
    more = [a + compaction.MORE * b for a, b in zip(fixed, each, strict=True)]
    per_step, total = compaction.extrapolated(few, more, 200)
    assert per_step == pytest.approx(each)
    assert total == pytest.approx([2 + 100, 3 + 50])
    assert compaction.extrapolated(few, more, compaction.FEW)[1] == pytest.approx(few)


@pytest.fixture(scope="module")
def done() -> Any:
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compaction, "peak_of", lambda job, _: (7 << 20, str(job())))  # it collects garbage: slow
        tables, raw = compaction.run(tiny("llama"), points={48: (4, 8), 64: (4,)}, rounds=2, say=said.append)
    return tables, raw, said


def test_a_run_gives_a_table_per_length(done: Any) -> None:
    tables, raw, said = done
    assert [table.title for table in tables] == ["Time to compact 48 tokens", "Time to compact 64 tokens"]
    assert all(len(row) == len(table.columns) for table in tables for row in table.rows)
    assert [len(table.rows) for table in tables] == [1 + 2 * 8, 1 + 8]
    assert tables[0].rows[1][:1] + tables[0].rows[1][2:3] == ("4x: Still", "1")
    assert tables[0].rows[1][4:] == ("25.0%", "7 MiB")
    assert any("200 steps *" in row[0] for row in tables[0].rows)
    assert "Extrapolated from 1 and 4 steps" in tables[0].notes[0]
    assert "12 steps at 4x, run once" in tables[0].notes[1]
    assert "run once" not in " ".join(tables[1].notes)
    assert raw["trained_cache_steps"] == 200
    assert any("round 2 of 2" in line for line in said)


def test_ratios_are_taken_within_a_round_and_bytes_are_counted(done: Any) -> None:
    tables, raw, _ = done
    at = raw["lengths"][48]
    still, h2o = at["seconds"][compaction.STILL][4], at["seconds"]["H2O"][4]
    pairs = sorted(a / b for a, b in zip(h2o, still, strict=True))
    row = next(row for row in tables[0].rows if row[0] == "4x: H2O")
    assert row[2] == f"{sum(pairs) / 2:.3g} ({pairs[0]:.3g}-{pairs[1]:.3g})"
    prefill = at["seconds"][compaction.PREFILL][1.0]
    assert len(prefill) == 2
    shares = sorted(a / b for a, b in zip(h2o, prefill, strict=True))
    assert row[3] == f"{sum(shares) / 2:.3g} ({shares[0]:.3g}-{shares[1]:.3g})"
    assert at["bytes"]["H2O"] == {4: 0.25, 8: 0.125}
    d_head = tiny("llama").shape.d_head
    assert at["bytes"]["Attention Matching"][4] == pytest.approx(0.25 * (1 + 1 / (2 * d_head))), "a bias per slot"
    assert set(at["checked"]) == {4}
    each = at["per_step"][4]
    timed = at["steps"][4]
    assert each == pytest.approx([(b - a) / 3 for a, b in zip(timed[1], timed[4], strict=True)])


def test_a_long_context_has_a_round_less_and_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "LONG", 32)
    monkeypatch.setattr(compaction, "peak_of", lambda *_: pytest.fail("measured memory"))
    (table,), raw = compaction.run(tiny("llama"), points={40: (4,)}, rounds=2, check=False)
    assert "peak memory" not in table.columns
    assert all(len(row) == len(table.columns) for row in table.rows)
    assert len(raw["lengths"][40]["seconds"]["H2O"][4]) == 1


def test_methods_that_keep_other_numbers_of_slots_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Compactor.__call__

    def generous(self: Compactor, model: Any, cache: Any, *, budget: Any, **more: Any) -> Any:
        made = real(self, model, cache, budget=budget, **more)
        return replace(made, cache=CompactCache.of(cache)) if self.name == "snapkv" else made

    monkeypatch.setattr(compaction, "peak_of", lambda job, _: (0, str(job())))
    monkeypatch.setattr(Compactor, "__call__", generous)
    with pytest.raises(Disagreement, match="at 4x SnapKV keeps"):
        compaction.run(tiny("llama"), points={48: (4,)}, rounds=1, check=False)
