"""The benchmark's methods answer the same question, and its tables are written as they are read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import big, machine, patch_sweep, report
from benchmarks.arithmetic import sweep_flops
from benchmarks.methods import METHODS
from benchmarks.problem import Problem, random_ids, twin
from kvnotes_interp.registry import ModelShape

SHAPE = ModelShape(n_layers=3, n_heads=4, n_kv_heads=2, d_head=16, d_model=64, d_mlp=96, vocab=211, n_params=0)


@pytest.fixture(scope="module")
def problem() -> Problem:
    model = big.random_llama(SHAPE, device="cpu", dtype=torch.float64, name="tiny")
    for parameter in model.hf.parameters():  # at the usual initialisation a patch moves next to nothing
        parameter.mul_(4)
    return random_ids(model, 17)


@pytest.fixture(scope="module")
def reference(problem: Problem) -> torch.Tensor:
    return METHODS["d"].prepare(problem).scores(problem.cells)


def test_the_reference_has_effects(problem: Problem, reference: torch.Tensor) -> None:
    assert float((reference - reference.median()).abs().max()) > 1e-2


@pytest.mark.parametrize("key", [key for key, entry in METHODS.items() if entry.same and not entry.needs])
def test_methods_give_the_same_numbers(key: str, problem: Problem, reference: torch.Tensor) -> None:
    got = METHODS[key].prepare(problem).scores(problem.cells)
    torch.testing.assert_close(got, reference, rtol=0, atol=1e-9)


@pytest.mark.parametrize("key", ["b", "c1", "c2"])
def test_the_libraries_give_the_same_numbers(key: str, problem: Problem) -> None:
    if reason := METHODS[key].missing():
        pytest.skip(reason)
    import kvnotes_interp as kv
    from kvnotes_interp.downloads import cache_dir

    if not any((cache_dir() / "models").glob("smollm2-135m-*/config.json")):
        pytest.skip("TransformerLens and nnsight want a tokenizer; smollm2-135m is not on this machine")
    from benchmarks.problem import english

    real = english(kv.load("smollm2-135m", device="cpu", check=False), 48)
    methods = {k: METHODS[k].prepare(real) for k in ("a", key)}
    found = patch_sweep.agree(real, methods, 6)
    assert found["largest_effect"] > 0.1


def test_a_method_that_answers_another_question_is_noticed(problem: Problem) -> None:
    """A control that can fail: without freezing, later tokens carry the patch upward."""
    entry = METHODS["d loose"]
    loose = entry.prepare(problem).scores(problem.cells)
    frozen = METHODS["d"].prepare(problem).scores(problem.cells)
    assert float((loose - frozen).abs().max()) > 1e-3

    class Wrong:
        def __init__(self, problem: Problem) -> None:
            self.inner = METHODS["d"].prepare(problem)

        def scores(self, cells: list[tuple[int, int]]) -> torch.Tensor:
            return self.inner.scores(cells) + 0.01

    with pytest.raises(patch_sweep.Disagreement, match=r"off by 0\.01"):
        patch_sweep.agree(problem, {"a": METHODS["a"].prepare(problem), "d": Wrong(problem)}, 6)


def test_a_table_is_made_saved_and_written(problem: Problem, tmp_path: Path) -> None:
    effort = patch_sweep.Effort(rounds=2, ours=None, batched=16, slow=3, check=4)
    table, raw = patch_sweep.run(problem, keys=("a", "d", "e"), effort=effort)
    assert len(table.rows) == 3
    assert raw["cells"] == {"a": 48, "d": 3, "e": 16}
    section = report.Section("sweep", (table,), raw, machine=machine.facts(torch.device("cpu")))
    assert report.Section.load(section.save(tmp_path)).tables == (table,)
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n", encoding="utf-8")
    report.write_readme([section], readme=readme)
    text = readme.read_text(encoding="utf-8")
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert table.title in text
    assert "\nold\n" not in text


def test_twins_share_weights_and_nothing_else(problem: Problem) -> None:
    hf = problem.model.hf
    other = twin(hf)
    assert all(a is b for a, b in zip(hf.parameters(), other.parameters(), strict=True))
    assert not {id(m) for m in hf.modules()} & {id(m) for m in other.modules()}


def test_arithmetic_is_counted_by_hand(problem: Problem) -> None:
    linear = 2 * 64 * (64 + 32 + 32 + 64 + 3 * 96)  # q k v o, and the three of the MLP
    attention = 2 * 2 * 4 * 16 * 17
    assert sweep_flops(problem.model, [(0, 1), (2, 5)], 17) == (3 + 1) * (linear + attention)
