from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pandas as pd
import pytest
from plotly import graph_objects as go

from kvnotes_interp import plots
from kvnotes_interp.errors import InputError
from kvnotes_interp.plots import export
from tests.results.factory import make_result


def test_data_files_are_self_contained_and_reproducible(tmp_path: Path) -> None:
    fig = plots.draw(make_result(views=("state",)), "states")
    written = export.write(fig, tmp_path / "a" / "states.v1", static=())
    assert [p.name for p in written] == ["states.v1.html", "states.v1.json", "states.v1.csv"]
    page = written[0].read_text()
    assert "<script src=" not in page
    assert len(page) > 1_000_000
    assert json.loads(written[1].read_text())["layout"]["meta"]["kind"] == "states"
    assert "field_only" in set(pd.read_csv(written[2])["site"])
    again = export.write(fig, tmp_path / "b" / "states.v1", static=())
    assert again[0].read_bytes() == written[0].read_bytes()


def test_any_plotly_figure_and_wrong_format(tmp_path: Path) -> None:
    fig = go.Figure(go.Scatter(x=[1, 2], y=[3, 4], name="line"))
    export.write(fig, tmp_path / "line", static=())
    assert pd.read_csv(tmp_path / "line.csv").to_dict("list") == {"trace": ["line"] * 2, "x": [1, 2], "y": [3, 4]}
    with pytest.raises(InputError, match=r"'pgn' is not a picture format\. Did you mean \"png\""):
        export.write(fig, tmp_path / "line", static=("pgn",))


def test_without_a_browser_the_reason_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BROWSER_PATH", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(export, "_has_kaleido", lambda: True)
    written = export.write(go.Figure(), tmp_path / "f", static=("png", "pdf"))
    assert len(written) == 3
    assert set(written.skipped) == {"f.png", "f.pdf"}
    assert "no Chromium was found" in written.skipped["f.png"]
    monkeypatch.setattr(export, "_has_kaleido", lambda: False)
    assert "kaleido is not installed" in export.write(go.Figure(), tmp_path / "f").skipped["f.png"]


@pytest.mark.skipif(os.name != "posix", reason="the fake browser is a shell script")
def test_a_hanging_browser_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not export._has_kaleido():
        pytest.skip("kaleido is not installed")
    pid = tmp_path / "pid"
    fake = tmp_path / "chromium"
    fake.write_text(f"#!/bin/sh\necho $$ > {pid}\nexec sleep 60\n")
    fake.chmod(0o755)
    monkeypatch.setenv("BROWSER_PATH", str(fake))
    started = time.monotonic()
    written = export.write(go.Figure(), tmp_path / "f", static=("png",), timeout_s=4)
    assert time.monotonic() - started < 20
    assert "f.png" in written.skipped
    assert pid.exists(), "the fake browser was never started"
    for _ in range(50):  # the system needs a moment to bury it
        if not is_running(int(pid.read_text())):
            return
        time.sleep(0.1)
    pytest.fail("the browser outlived the time limit")


def is_running(pid: int) -> bool:
    """False for a process that is gone, or dead and not yet collected by its new parent."""
    stat = Path(f"/proc/{pid}/stat")
    if Path("/proc/self/stat").exists():
        return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_pictures(tmp_path: Path) -> None:
    reason = export.why_no_pictures()
    if reason:
        pytest.skip(reason)
    fig = plots.draw(make_result(views=("state",)), "states", part="kv")
    written = export.write(fig, tmp_path / "states", timeout_s=120)
    assert written.skipped == {}
    assert (tmp_path / "states.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "states.pdf").read_bytes().startswith(b"%PDF")
