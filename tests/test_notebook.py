"""The notebooks under experiments/ run as they stand, and collect.py copies numbers from run folders."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.results.factory import make_result

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
NOTEBOOKS = sorted(EXPERIMENTS.rglob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_are_stored_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert not cell.outputs
            assert cell.execution_count is None


def _run(path: Path) -> list[Any]:
    """The outputs of a notebook's code cells, run in the test's own folder; none is an error."""
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": os.getcwd()}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [o for o in outputs if o.output_type == "error"]
    return outputs


def _figures(outputs: list[Any]) -> int:
    return sum("application/vnd.plotly.v1+json" in output.get("data", {}) for output in outputs)


def test_the_tour_runs(smollm2: Any) -> None:
    """`smollm2` is asked for so that the weights are there."""
    outputs = _run(EXPERIMENTS / "notes" / "tour.ipynb")
    assert _figures(outputs) == 2  # the strip and the map
    summary = next(o for o in outputs if "field" in o.get("data", {}).get("text/html", ""))
    assert "4 of 4 passed" in summary["data"]["text/html"]
    scores = outputs[-1]["data"]["text/plain"]
    assert all(state in scores for state in ("stale", "field only", "downstream only", "oracle"))


def test_the_learned_tour_runs() -> None:
    outputs = _run(EXPERIMENTS / "sempic" / "tour.ipynb")
    assert _figures(outputs) == 2  # the training and the deviation
    answers = next(o["data"]["text/plain"] for o in outputs if "exact_match" in o.get("data", {}).get("text/plain", ""))
    assert all(name in answers for name in ("full_recompute", "no_recompute", "sempic"))


def test_the_compact_tour_runs() -> None:
    outputs = _run(EXPERIMENTS / "still" / "tour.ipynb")
    assert _figures(outputs) == 4  # training, ratios, survival and attribution
    said = "".join(output.get("text", "") for output in outputs if output.output_type == "stream")
    gap = float(said.partition("largest gap ")[2].split()[0])
    assert gap < 1e-4  # a budget of all slots, written anew, is the full cache
    assert "522 tokens in 16 slots; the next token stands at 522" in said


@pytest.fixture
def collect(monkeypatch: pytest.MonkeyPatch) -> Any:
    path = EXPERIMENTS / "notes" / "collect.py"
    spec = importlib.util.spec_from_file_location("collect", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "collect", module)
    spec.loader.exec_module(module)
    return module


def test_collect_writes_between_the_markers_and_nowhere_else(collect: Any, tmp_path: Path) -> None:
    runs, readme = tmp_path / "runs", tmp_path / "README.md"
    readme.write_text(f"before\n\n{collect.BEGIN}\nold\n{collect.END}\n\nafter\n")
    result = make_result(views=("state",))
    result.save(runs / "pronoun", figures=False)
    verdict = {"expectations": [{"expected": "a.b above 0.5", "measured": "0.700 (0.6 to 0.8)", "outcome": "holds"}]}
    (runs / "cards" / "locality").mkdir(parents=True)
    (runs / "cards" / "locality" / "verdict.json").write_text(json.dumps(verdict))
    options = ["--runs", str(runs), "--readme", str(readme)]
    assert collect.main([*options, "--check"]) == 1
    assert collect.main([*options, "--write"]) == 0
    assert collect.main([*options, "--check"]) == 0
    text = readme.read_text()
    assert text.startswith("before\n\n")
    assert text.endswith("\n\nafter\n")
    assert "old\n" not in text.replace("-0", "")
    value = result.summary().to_dict()["field_only"]
    line = next(line for line in text.splitlines() if line.startswith("| Field only, derived"))
    assert f"{value['mean']:.3f} [{value['low']:.3f}, {value['high']:.3f}], 10 of 12 pairs" in line
    assert line.endswith("`pronoun` |")
    assert "Runs: `pronoun` (smollm2-135m" in text
    assert "| Downstream only, keys alone | not reported | not measured |" in text
    assert next(line for line in text.splitlines() if "near-verbatim" in line).endswith("not run | `capital` |")
    assert "| locality | a.b above 0.5 | 0.700 (0.6 to 0.8) | holds |" in text
    assert "| rule_order | | not run | |" in text


def test_summaries_of_finished_runs_are_kept_and_read(collect: Any, tmp_path: Path) -> None:
    make_result(views=("state",)).save(tmp_path / "runs" / "gate", figures=False)
    (tmp_path / "runs" / "half").mkdir()
    (tmp_path / "runs" / "half" / "manifest.json").write_text('{"status": "running"}')
    out = tmp_path / "kept"
    assert collect.keep(tmp_path / "runs", out) == [tmp_path / "runs" / "gate"]
    assert sorted(p.name for p in (out / "gate").iterdir()) == ["manifest.json", "summary.json"]
    row = next(line for line in collect.families(out) if line.startswith("| patch | field only"))
    assert row.count("not run") == len(collect.wanted.FAMILIES) - 1


def test_collect_rows_have_commands_and_the_page_has_its_markers(
    collect: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert collect.main(["--commands"]) == 0
    commands = capsys.readouterr().out
    wanted = {row.run for row in collect.wanted.ROWS} | {run for _, run, _ in collect.wanted.LISTS}
    assert all(f"--out runs/{run}\n" in commands for run in wanted)
    assert "kvprobe suffix --task pronoun" in commands
    assert "probes/locality.yaml" in commands
    text = collect.README.read_text()
    assert text.count(collect.BEGIN) == text.count(collect.END) == 1
    body = text.partition(collect.BEGIN)[2].partition(collect.END)[0].strip()
    if body:  # what stands there has a line for every row, none typed by hand
        assert all(f"| {row.quantity} |" in body for row in collect.wanted.ROWS)
