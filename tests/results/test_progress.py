from __future__ import annotations

import time

import pytest

from kvnotes_interp import progress


def test_quick_or_disabled_work_is_silent(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(progress.track([1, 2], description="quick")) == [1, 2]
    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    assert list(progress.track(iter([1, 2]), total=2, description="off", enabled=False)) == [1, 2]
    out, err = capfd.readouterr()
    assert out == err == ""


def test_slow_work_is_shown_on_stderr_only(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "QUIET_S", 0.02)
    for _ in progress.track(range(3), description="patching"):
        time.sleep(0.05)
    out, err = capfd.readouterr()
    assert out == ""
    assert "patching" in err
    assert "3/3" in err


def test_an_error_passes_through_and_closes_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "QUIET_S", 0.01)
    bar = progress.Bar(total=3, description="x")

    def fail() -> None:
        with bar:
            time.sleep(0.05)
            bar.advance()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert bar._closed


def test_notebook_line() -> None:
    assert progress.progress_line("patching", 8, 32, 12) == "patching: 8 of 32, 0:12 elapsed, 0:36 left"
    assert progress.progress_line("x", 0, None, 3700) == "x: 0, 1:01:40 elapsed"
    view_data = progress._NotebookView._data
    view = object.__new__(progress._NotebookView)
    view._description, view._started = "<x>", time.monotonic()
    assert "&lt;x&gt;" in view_data(view, 1, 2)["text/html"]
