"""Every command and every example of README.md works, its links lead somewhere, and it fits what the code says."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import kvnotes_interp as kv
from tests.readme import blocks, commands
from tests.test_cli import COMMANDS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "experiments").rglob("README.md"))]
PAGES += [ROOT / "figures" / "README.md"]
TEXT = PAGES[0].read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_make_targets_and_scripts_exist(page: Path) -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for words in commands(page.read_text(encoding="utf-8")):
        if words[0] == "make":
            assert words[1] in targets, words
        elif words[:2] == ["python", "-m"]:
            base = ROOT / words[2].replace(".", "/")
            assert base.with_suffix(".py").is_file() or (base / "__main__.py").is_file(), words
        elif words[0] == "python":
            assert (ROOT / words[1]).is_file(), words
        else:
            assert words[0] in ("kvprobe", "pip"), f"no test runs {words}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_pip_install_names_this_project() -> None:
    assert ["pip", "install", "."] in commands(TEXT)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"]["kvprobe"] == "kvnotes_interp.cli:main"
    assert "Python 3.11" in TEXT
    assert project["requires-python"] == ">=3.11"


def test_every_kvprobe_command_runs(
    loaded: Any, kvprobe: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "probes").symlink_to(ROOT / "probes")
    monkeypatch.chdir(tmp_path)  # run folders land here
    monkeypatch.setenv("BROWSER_PATH", "/nowhere")
    found = [words for words in commands(TEXT) if words[0] == "kvprobe"]
    assert {words[1] for words in found} == set(COMMANDS)
    for words in found:
        done = kvprobe(*words[1:])
        assert done.code == 0, (words, done.err)
        assert done.out.strip(), words
        assert "✗" not in done.out, words
        if "--json" in words:
            assert json.loads(done.out)["n_tried"] > 0


def test_the_python_tour_runs(loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in blocks(TEXT, "python"):
        if "adapters" in block and not (find_spec("transformer_lens") and find_spec("nnsight")):
            continue  # optional; tests/adapters skips with its reason
        exec(compile(block, "README.md", "exec"), names)
    assert kv.Result.load("runs/tour").summary().to_dict() == names["result"].summary().to_dict()
    assert {trace.type for trace in names["figure"].data} & {"heatmap"}
    assert set(names["table"].columns) >= {"pair", "site", "readout", "value"}
    # The patched cache is a new value; all of the change lies in what was patched.
    assert names["patched"] != names["old"]
    before = kv.engine.decide(loaded, names["old"], names["pair"].old_ids[-1:], (1, 2))
    assert before.shape == names["scores"].shape
    frame = names["table"]
    row = frame[(frame["pair"] == names["pair"].pair.key) & (frame["site"] == "downstream_only")]
    row = row[(row["part"] == "kv") & (row["readout"] == "logit_diff")]
    old, new = names["scores"][0].tolist()
    assert new - old == pytest.approx(row["value"].item(), abs=1e-3)


def test_what_the_readme_lists_is_there() -> None:
    assert TEXT.count("<!-- performance -->") <= 1
    listed = re.findall(r"arXiv (\d{4}\.\d{5})", TEXT)
    assert set(listed) == {"2606.17107", "2607.28069", "2606.07878", "2604.13226"}
    for name in ("table.parquet", "pairs.parquet", "summary.json", "manifest.json", "figures/"):
        assert name in TEXT
