"""A progress bar with the time left, on standard error, for work that takes longer than about a second.

Standard output stays clean for data. In a notebook the line is updated in place through IPython's own display, which
needs no widgets.
"""

from __future__ import annotations

import html
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

QUIET_S = 1.0  # nothing is shown for work that ends within this time
REFRESH_S = 0.2


class _View(Protocol):
    def update(self, done: float, total: float | None) -> None: ...

    def close(self, done: float, total: float | None) -> None: ...


class Bar:
    """`with Bar(total=32, description="patching") as bar: ... bar.advance()`.

    Args:
        total: steps of work; None when not known. description: shown before the bar.
        enabled: False shows nothing and costs nothing.
    """

    def __init__(self, *, total: float | None, description: str, enabled: bool = True) -> None:
        self.total, self.description, self.enabled = total, description, enabled
        self.done = 0.0
        self._view: _View | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Bar:
        if self.enabled:
            # A timer, not the first step, opens the view: the first step may be the long one.
            self._timer = threading.Timer(QUIET_S, self._open)
            self._timer.daemon = True
            self._started = time.monotonic()
            self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        with self._lock:
            self._closed = True
            if self._view is not None:
                self._view.close(self.done, self.total)

    def advance(self, steps: float = 1) -> None:
        """Count `steps` more as done."""
        self.done += steps
        if self._view is not None:
            with self._lock:
                self._view.update(self.done, self.total)

    def _open(self) -> None:
        with self._lock:
            if self._closed or (self.total is not None and self.done >= self.total):
                return
            kind = _NotebookView if _in_notebook() else _TerminalView
            self._view = kind(self.description, self.total, self._started)
            self._view.update(self.done, self.total)


def track(iterable: Iterable[T], *, total: float | None = None, description: str, enabled: bool = True) -> Iterator[T]:
    """Yield from `iterable` while showing progress. `total` defaults to its length, where it has one."""
    if total is None and hasattr(iterable, "__len__"):
        total = len(iterable)  # type: ignore[arg-type]
    with Bar(total=total, description=description, enabled=enabled) as bar:
        for item in iterable:
            yield item
            bar.advance()


class _TerminalView:
    """A rich bar on standard error. Where that is a file, only the last state is written, once."""

    def __init__(self, description: str, total: float | None, started: float) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=Console(stderr=True, force_jupyter=False),
        )
        self._task: Any = self._progress.add_task(description, total=total)
        # The view opens late; the time already spent counts for the rate.
        self._progress.tasks[0].start_time = self._progress.get_time() - (time.monotonic() - started)
        self._progress.start()

    def update(self, done: float, total: float | None) -> None:
        self._progress.update(self._task, completed=done, total=total)

    def close(self, done: float, total: float | None) -> None:
        self.update(done, total)
        self._progress.stop()


class _NotebookView:
    """One output cell that is updated in place, at most five times a second."""

    def __init__(self, description: str, total: float | None, started: float) -> None:
        from IPython.display import display  # type: ignore[import-not-found]

        self._description, self._started, self._last = description, started, 0.0
        self._handle: Any = display(self._data(0, total), raw=True, display_id=True)

    def update(self, done: float, total: float | None) -> None:
        now = time.monotonic()
        if now - self._last >= REFRESH_S:
            self._last = now
            self._handle.update(self._data(done, total), raw=True)

    def close(self, done: float, total: float | None) -> None:
        self._handle.update(self._data(done, total), raw=True)

    def _data(self, done: float, total: float | None) -> dict[str, str]:
        text = progress_line(self._description, done, total, time.monotonic() - self._started)
        bar = f'<progress value="{done:g}" max="{total:g}"></progress> ' if total else ""
        return {"text/plain": text, "text/html": f"<div>{bar}<code>{html.escape(text)}</code></div>"}


def progress_line(description: str, done: float, total: float | None, elapsed_s: float) -> str:
    """`patching: 8 of 32, 0:12 elapsed, 0:36 left`."""
    count = f"{done:g}" if total is None else f"{done:g} of {total:g}"
    line = f"{description}: {count}, {_clock(elapsed_s)} elapsed"
    if total and 0 < done < total:
        line += f", {_clock(elapsed_s / done * (total - done))} left"
    return line


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _in_notebook() -> bool:
    """True inside a Jupyter kernel; a plain IPython shell in a terminal is a terminal."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and type(shell).__name__ in {"ZMQInteractiveShell", "Shell"}
