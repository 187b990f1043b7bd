"""The package imports quickly and lazily, and its metadata agrees with the code."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import kvnotes_interp as kv

ROOT = Path(__file__).parent.parent
HEAVY = {"torch", "transformers", "pandas", "plotly", "sklearn", "pyarrow", "numpy"}


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize("module", ["kvnotes_interp", "kvnotes_interp.sources", "kvnotes_interp.errors"])
def test_import_pulls_in_nothing_heavy(module: str) -> None:
    loaded = run(f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})").split()
    assert not HEAVY & set(loaded)


def test_public_names_resolve_on_first_use_and_stay() -> None:
    names = 'print("InputError" in vars(kv))'  # in a fresh process: here other tests have looked
    looked = run(f"import kvnotes_interp as kv; {names}; kv.InputError; {names}")
    assert looked.split() == ["False", "True"]
    assert kv.InputError is vars(kv)["InputError"] is kv.errors.InputError
    assert issubclass(kv.InputError, kv.KVNotesError)
    assert kv.sources.DEFAULT == "smollm2-135m"


def test_dir_lists_what_is_lazy() -> None:
    assert {"load", "tasks", "probes", "KVCache", "Site", "Result", "engine", "__version__"} <= set(dir(kv))


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'KVCach'\. Did you mean .KVCache"):
        kv.KVCach  # noqa: B018


def test_base_dependencies_are_pinned_and_dev_names_no_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line and line[0] != "#"
    )
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(d for group in extras.values() for d in group)]
    names = {d.split("[")[0].split(">")[0].split("<")[0].split("=")[0].strip() for d in wanted} - {project["name"]}
    assert names <= set(pins)
    assert pins["torch"] == "2.13.0"
    assert not [d for d in extras["dev"] if d.startswith("torch")]
    assert set(extras) >= {"lens", "nnsight", "train", "notebook", "dev", "all"}


def test_markers_are_registered(pytestconfig: pytest.Config) -> None:
    markers = " ".join(pytestconfig.getini("markers"))
    assert all(f"{name}:" in markers for name in ("gpu", "hub", "slow"))
