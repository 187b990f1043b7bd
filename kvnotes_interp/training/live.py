"""The line that is shown while the loop runs: steps, loss, tokens per second, memory, time left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvnotes_interp.progress import Bar, _in_notebook

Show = Callable[[int, str], None]
"""Shows how many steps are done, and a note on the latest."""


@contextmanager
def live(*, total: int, done: int, description: str, enabled: bool) -> Iterator[Show]:
    """A rich progress line on standard error; the plain bar in a notebook; nothing when not `enabled`."""
    if not enabled or _in_notebook():
        with Bar(total=total, description=description, enabled=enabled) as bar:
            bar.advance(done)
            yield lambda now, note: bar.advance(now - bar.done)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Progress(*columns, console=Console(stderr=True, force_jupyter=False)) as progress:
        task = progress.add_task(description, total=total, completed=done, note="")
        yield lambda now, note: progress.update(task, completed=now, note=note)
