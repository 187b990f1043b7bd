"""Tests run elsewhere: in a temporary folder each, and a run whose tests touched the checkout fails.

`Checkout` is a plugin of pytest. A clone in which somebody has worked holds run folders and figures, so that a test
that reads "runs/pronoun" or writes to "figures/out" passes here and fails there.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

LEFT_OUT = {".git", ".venv", "__pycache__", ".ruff_cache"}  # and *.egg-info
FORBIDDEN = ("runs", "figures/out", "benchmarks/out")  # what people make in a checkout
_LISTED = ("os.listdir", "os.scandir")
_OPENED = {"open", "os.listdir", "os.scandir", "os.mkdir", "os.remove", "os.rename", "os.rmdir"}


def listing(root: Path) -> dict[str, tuple[int, int]]:
    """Every file under `root` with its size and the time of its last change."""
    found = {}
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in LEFT_OUT and not name.endswith(".egg-info")]
        for name in files:
            path = os.path.join(folder, name)
            about = os.lstat(path)
            found[os.path.relpath(path, root)] = (about.st_size, about.st_mtime_ns)
    return found


def differences(before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> list[str]:
    """`created runs/x`, `changed README.md`, `deleted ...`, in the order of the names."""
    words = []
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            what = "created" if name not in before else "deleted" if name not in after else "changed"
            words.append(f"{what} {name}")
    return words


class Checkout:
    """Runs every test in a folder of its own, and watches over the checkout `root`.

    The audit hook sees what this process opens and lists; what other processes and C code leave behind is seen when the
    files are compared at the end, in the process that starts the workers.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.base = Path(tempfile.mkdtemp(prefix="kvnotes-tests-"))
        self.before: dict[str, tuple[int, int]] | None = None
        self.made = 0
        self.changes: list[str] = []
        self.running = False

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        if not hasattr(session.config, "workerinput"):
            self.before = listing(self.root)
        places = [os.path.join(self.root, *name.split("/")) for name in FORBIDDEN]

        def watch(event: str, arguments: tuple[Any, ...]) -> None:
            if event not in _OPENED or not self.running:
                return
            for path in arguments[:2] if event == "os.rename" else arguments[:1]:
                # Whoever looks for packages lists every folder beside the package.
                if event in _LISTED and sys._getframe(1).f_code.co_filename.endswith("pkgutil.py"):
                    continue
                if isinstance(path, (str, os.PathLike)):
                    whole = os.path.abspath(path)
                    if any(whole == place or whole.startswith(place + os.sep) for place in places):
                        raise AssertionError(f"a test may not touch {whole}: make it in tmp_path")

        sys.addaudithook(watch)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Also fixtures of a module or a session are made in the folder of the test that first asks for them."""
        folder = self.base / str(self.made)
        self.made += 1
        folder.mkdir()
        back = os.getcwd()
        os.chdir(folder)
        self.running = True
        try:
            return (yield)
        finally:
            self.running = False
            os.chdir(back)
            shutil.rmtree(folder, ignore_errors=True)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        shutil.rmtree(self.base, ignore_errors=True)
        if self.before is not None:
            self.changes = differences(self.before, listing(self.root))
            if self.changes and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.changes:
            terminalreporter.section("the checkout changed while the tests ran", red=True)
            terminalreporter.line("Tests write to temporary folders only. (Edited meanwhile? Then run them again.)")
            for change in self.changes:
                terminalreporter.line(f"  {change}")
