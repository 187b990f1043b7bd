from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from kvnotes_interp.errors import InputError
from kvnotes_interp.results import Control, Result, Summary, manifest
from kvnotes_interp.results.summary import render
from tests.results.factory import make_result


def test_round_trip(tmp_path: Path) -> None:
    result = make_result(views=("state",))
    result.save(tmp_path / "run", figures=False)
    loaded = Result.load(tmp_path / "run")
    pd.testing.assert_frame_equal(loaded.frame, result.frame)
    pd.testing.assert_frame_equal(loaded.pairs, result.pairs)
    assert loaded.summary().to_dict() == result.summary().to_dict()
    assert str(loaded) == str(result)
    with pytest.raises(InputError, match="not empty"):
        result.save(tmp_path / "run")
    result.save(tmp_path / "run", figures=False, overwrite=True)


def test_load_says_what_is_wrong(tmp_path: Path) -> None:
    make_result(views=("state",)).save(tmp_path / "run", figures=False)
    with pytest.raises(InputError, match=r'no run at .*Did you mean "run"'):
        Result.load(tmp_path / "rum")
    (tmp_path / "run/pairs.parquet").write_bytes(b"x")
    with pytest.raises(InputError, match="sha256 differs"):
        Result.load(tmp_path / "run")
    (tmp_path / "run/pairs.parquet").unlink()
    with pytest.raises(InputError, match=r"lacks pairs\.parquet"):
        Result.load(tmp_path / "run")
    (tmp_path / "run/manifest.json").write_text("{")
    with pytest.raises(InputError, match="not valid JSON"):
        Result.load(tmp_path / "run")


def test_columns_are_checked_and_extra_ones_kept() -> None:
    frame = pd.DataFrame({"pair": ["a"], "value": [1.0], "head": [3]})
    result = Result.build(probe="p", frame=frame, pairs=pd.DataFrame({"pair": ["a"]}), summary=make_summary())
    assert result.frame["head"].tolist() == [3]
    assert result.frame["layer"].isna().all()
    with pytest.raises(InputError, match="column 'layer' must hold int64"):
        Result.build(probe="p", frame=frame.assign(layer="x"), pairs=pd.DataFrame(), summary=make_summary())
    assert result.plots() == ()
    assert "Result(probe='p', 1 rows" in repr(result)


def make_summary() -> Summary:
    rows = [
        {"quantity": "field_only", "mean": 0.0251, "low": -0.01, "high": 0.06, "n": 17, "n_effective": 8},
        {"quantity": "k50", "mean": np.float64("nan"), "low": None, "high": None, "n": 17, "n_effective": 8},
    ]
    return Summary.of(
        "local_patching on [tiny], task pronoun",
        rows,
        counts={"n_tried": 32, "n_competent": 17, "set_aside": {"small gap": 3, "no flip": 12}},
        controls=[
            Control("no_patch_is_base", True, 1.2e-6, 1e-4, 17),
            Control("patch_all_is_donor", False, 0.3, 1e-4, 17, "largest at layer 7"),
        ],
        notes=["field + downstream is a control."],
    )


def test_summary_as_text_fits_80_columns() -> None:
    text = str(make_summary())
    assert max(map(len, text.split("\n"))) <= 80
    for words in (
        "[tiny]",
        "-0.010 to 0.060",
        "17 (8)",
        "17 of 32 pairs competent; set aside: no flip 12, small gap 3",
        "Controls: 1 of 2 passed",
        "✗  patch all is donor  largest at layer 7",
        "Note: field + downstream is a control.",
    ):
        assert words in text
    assert "\x1b" not in render(make_summary())
    assert not make_summary().passed


def test_summary_as_json_and_html() -> None:
    data = make_summary().to_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["field_only"] == {"mean": 0.0251, "low": -0.01, "high": 0.06, "n": 17, "n_effective": 8}
    assert data["k50"]["mean"] is None
    assert data["n_tried"] == 32
    assert data["controls"]["patch_all_is_donor"]["passed"] is False
    assert Summary.from_dict(data).to_dict() == data
    assert str(Summary.from_dict(data)) == str(make_summary())
    html = make_summary()._repr_html_()
    assert "patch all is donor" in html
    assert "<script" not in html
    with pytest.raises(InputError, match="cannot be called 'controls'"):
        Summary.of("t", [{"quantity": "controls", "mean": 1}], counts={})


def test_git_state(tmp_path: Path) -> None:
    assert manifest.git_state(tmp_path) is None

    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    (tmp_path / "errors.py").write_text("")
    git("add", ".")
    assert manifest.git_state(tmp_path) is None  # tracked, but no commit yet
    git("commit", "-m", "x")
    assert manifest.git_state(tmp_path)["dirty"] is False
    (tmp_path / "new.py").write_text("")
    assert manifest.git_state(tmp_path)["dirty"] is True
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv/errors.py").write_text("")
    assert manifest.git_state(tmp_path / "venv") is None  # inside a repository that does not track it


def test_json_safe() -> None:
    value = {"a": (1, np.int64(2), np.array([0.5, np.nan])), "b": Path("x"), "c": {"z", "y"}}
    assert manifest.json_safe(value) == {"a": [1, 2, [0.5, None]], "b": "x", "c": ["y", "z"]}
    with pytest.raises(InputError, match="key 1 must be text"):
        manifest.json_safe({1: 2})


def test_importing_results_is_light() -> None:
    code = (
        "import sys, kvnotes_interp.results; print(sorted({'pandas', 'plotly', 'torch', 'pyarrow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
