"""Figures as files: self-contained HTML, JSON and the plotted data as CSV always; pictures where Chromium is found.

Pictures are drawn by kaleido in a process of its own with a time limit, because it has a record of hanging. Whatever
goes wrong there costs the picture, never the run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvnotes_interp.errors import InputError, nearest
from kvnotes_interp.files import replacing

if TYPE_CHECKING:
    import pandas as pd
    from plotly.graph_objects import Figure

log = logging.getLogger(__name__)

FORMATS = ("png", "pdf", "svg")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SCALE = 3  # pixels of a PNG per pixel of the layout: about 288 dpi


class Written(list[Path]):
    """The files written. `skipped` maps each picture that could not be made to the reason."""

    def __init__(self, paths: Sequence[Path] = (), skipped: Mapping[str, str] | None = None) -> None:
        super().__init__(paths)
        self.skipped: dict[str, str] = dict(skipped or {})


def write(fig: Figure, stem: str | Path, *, static: Sequence[str] = ("png", "pdf"), timeout_s: float = 90) -> Written:
    """Write `stem`.html, .json, .csv and, where possible, the pictures named in `static`.

    Args:
        fig: a figure of this package, or any plotly figure. stem: path without ending; a dot in it is kept.
        static: formats out of "png", "pdf", "svg". timeout_s: limit for all pictures together.
    """
    stem = Path(stem)
    return write_all({stem.name: fig}, stem.parent, static=static, timeout_s=timeout_s)


def write_all(
    figures: Mapping[str, Figure],
    folder: str | Path,
    *,
    static: Sequence[str] = ("png", "pdf"),
    timeout_s: float = 90,
) -> Written:
    """Write several figures to `folder` under their names; all pictures are drawn by one browser."""
    for name in static:
        if name not in FORMATS:
            raise InputError(f"{name!r} is not a picture format.{nearest(name, FORMATS)} Choose from {FORMATS}.")
    folder = Path(folder)
    written = Written()
    for name, fig in figures.items():
        written += _write_data(fig, folder, name)
    if static and figures:
        names = [f"{name}.{ending}" for name in figures for ending in static]
        reason = _render(figures, folder, static, timeout_s)
        for name in names:
            if (folder / name).is_file() and reason.get(name) is None:
                written.append(folder / name)
            else:
                written.skipped[name] = reason.get(name) or "not written"
        if written.skipped:
            log.info("pictures skipped: %s", "; ".join(sorted(set(written.skipped.values()))))
    return written


def _write_data(fig: Figure, folder: Path, name: str) -> list[Path]:
    paths = [folder / f"{name}.{ending}" for ending in ("html", "json", "csv")]
    # A fixed id for the element, where plotly would draw a random one: the same figure gives the same file.
    page = fig.to_html(include_plotlyjs=True, full_html=True, div_id=f"figure-{name}")
    texts = [page, f"{fig.to_json(pretty=False)}\n", data_of(fig).to_csv(index=False, lineterminator="\n")]
    for path, text in zip(paths, texts, strict=True):
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8", newline="\n")
    return paths


def data_of(fig: Figure) -> pd.DataFrame:
    """The plotted data: the table that a figure of this package carries, otherwise x and y of every trace."""
    import pandas as pd

    meta = fig.layout.meta
    if isinstance(meta, dict) and isinstance(meta.get("table"), dict):
        return pd.DataFrame(meta["table"])
    rows = [
        {"trace": trace.name or index, "x": x, "y": y}
        for index, trace in enumerate(fig.data)
        if getattr(trace, "x", None) is not None and getattr(trace, "y", None) is not None
        for x, y in zip(trace.x, trace.y, strict=False)
    ]
    return pd.DataFrame(rows, columns=["trace", "x", "y"])


def browser() -> str | None:
    """Path of a Chromium: the environment's BROWSER_PATH, or the first found on PATH."""
    named = os.environ.get("BROWSER_PATH")
    if named:
        return named if os.access(named, os.X_OK) else None
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


def _has_kaleido() -> bool:
    return importlib.util.find_spec("kaleido") is not None


def why_no_pictures() -> str | None:
    """The reason why pictures cannot be drawn on this machine, with what to do; None when they can."""
    if not _has_kaleido():
        return "kaleido is not installed: pip install 'kvnotes-interp[figures]'"
    if browser() is None:
        if os.environ.get("BROWSER_PATH"):
            return f"BROWSER_PATH={os.environ['BROWSER_PATH']} is not an executable file"
        return "no Chromium was found: install chromium or set BROWSER_PATH to one"
    return None


def _render(figures: Mapping[str, Figure], folder: Path, static: Sequence[str], timeout_s: float) -> dict[str, str]:
    """Draw all pictures in a child process; returns the reason for each that is missing, by file name."""
    names = [f"{name}.{ending}" for name in figures for ending in static]
    missing = why_no_pictures()
    if missing:
        return dict.fromkeys(names, missing)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvnotes-pictures-") as scratch:
        jobs = [
            {"figure": fig.to_json(), "path": str(Path(scratch) / f"{name}.{ending}"), "format": ending, "scale": SCALE}
            for name, fig in figures.items()
            for ending in static
        ]
        failure = _child(jobs, timeout_s)
        reasons: dict[str, str] = {}
        for name in names:
            made = Path(scratch) / name
            if made.is_file() and made.stat().st_size:
                with replacing(folder / name) as temporary:
                    shutil.copyfile(made, temporary)
            else:
                reasons[name] = failure or "kaleido wrote nothing"
    return reasons


def _child(jobs: list[dict[str, Any]], timeout_s: float) -> str | None:
    """Run `_render.py` on the jobs; returns what went wrong, or None. The browser never outlives the limit."""
    script = Path(__file__).with_name("_render.py")
    environment = {**os.environ, "BROWSER_PATH": browser() or ""}
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
    ) as child:
        try:
            _, errors = child.communicate(json.dumps(jobs), timeout=timeout_s)
        except (subprocess.TimeoutExpired, OSError) as error:
            _kill_tree(child.pid)
            if isinstance(error, OSError):
                return f"the process that draws pictures failed: {error}"
            return f"drawing pictures took more than {timeout_s:g} s and was stopped"
        except BaseException:  # Ctrl-C must not leave a browser behind
            _kill_tree(child.pid)
            raise
    if child.returncode:
        last = errors.strip().splitlines()[-1:] or [f"exit status {child.returncode}"]
        return f"kaleido failed: {last[0][:300]}"
    return None


def _kill_tree(pid: int) -> None:
    """End a process and all that it started; the browser has a session of its own, so ending a group is not enough."""
    children: dict[int, list[int]] = {}
    for child, parent in _processes():
        children.setdefault(parent, []).append(child)
    doomed = [pid]
    for one in doomed:  # grows while it is read
        doomed += children.get(one, [])
    for one in doomed:
        with contextlib.suppress(OSError):
            os.kill(one, signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)


def _processes() -> list[tuple[int, int]]:
    """(process, its parent) for every process: from /proc where there is one, otherwise from ps; empty on Windows."""
    found = []
    if Path("/proc/self/stat").exists():
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError, ValueError, IndexError):
                    # The name in brackets may hold blanks and brackets itself.
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                    found.append((int(entry.name), int(fields[1])))
    elif shutil.which("ps"):
        done = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=False)
        found = [(int(a), int(b)) for a, b in (line.split() for line in done.stdout.splitlines() if line.strip())]
    return found
