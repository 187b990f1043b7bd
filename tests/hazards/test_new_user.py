"""A new user's commands in the README's order, in one clone: none takes what another left behind for its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import readme, test_figures
from tests.elsewhere import FORBIDDEN, differences, listing

ROOT = Path(__file__).parents[2]


@pytest.fixture
def used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory in which somebody has run the README's commands, with nothing right in it."""
    names = ["runs/tour", "runs/short-suffix", "runs/pronoun-suffix", "figures/out", "benchmarks/out"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    tasks = next(line for line in makefile.splitlines() if line.startswith("DEMO_TASKS")).partition("=")[2].split()
    for name in (*names, *(f"runs/{task}" for task in tasks)):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "manifest.json").write_text("not a run")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_recipes_do_not_take_a_run_of_the_working_directory_for_their_own(
    used: Path, kvprobe: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """`make demo`, then `make test`: the recipe's command refused the folder that the demo had made."""
    assert kvprobe("patch", "--task", "pronoun", "--dry-run", "--out", "runs/pronoun").code == 2  # it would be seen
    test_figures.test_recipes_name_runs_that_their_commands_make(kvprobe, tmp_path_factory.mktemp("own"))


def test_figures_write_where_they_are_told(used: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    before = listing(used)
    own = tmp_path_factory.mktemp("own")
    done = subprocess.run(
        [sys.executable, "-m", "figures", "memoization_map", "--runs", str(own), "--out", str(own / "out")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert str(own / "pronoun") in done.stderr
    assert differences(before, listing(used)) == []


@pytest.mark.parametrize("name", FORBIDDEN)
def test_a_test_that_opens_what_people_make_in_the_checkout_fails(name: str) -> None:
    path = ROOT / name
    for touch in (
        lambda: (path / "pronoun" / "manifest.json").read_text(),
        lambda: list(os.scandir(path)),
        lambda: os.mkdir(path / "new"),
        lambda: os.rename("here", path / "new"),
    ):
        with pytest.raises(AssertionError, match="a test may not touch"):
            touch()
    assert not Path(name).exists()  # relative: the test's own folder, which is empty


def test_every_test_runs_elsewhere() -> None:
    assert not Path.cwd().is_relative_to(ROOT)
    assert list(Path.cwd().iterdir()) == []
    assert str(ROOT) in os.environ["PYTHONPATH"].split(os.pathsep)


CLEAN = """
from pathlib import Path
def test_x():
    Path("made.txt").write_text("in its own folder")
"""
DIRTY = """
from pathlib import Path
root = Path(__file__).parent
def test_created():
    (root / "made.txt").write_text("")
def test_changed():
    (root / "kept.txt").write_text("longer than before")
def test_deleted():
    (root / "gone.txt").unlink()
"""
RUN = """
import sys
from pathlib import Path
import pytest
from tests.elsewhere import Checkout
root = Path(sys.argv[1])
options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", str(root), str(root / "test_x.py")]
sys.exit(pytest.main(options, plugins=[Checkout(root)]))
"""


def guarded(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    for name in ("kept.txt", "gone.txt"):
        (folder / name).write_text(name)
    (folder / "test_x.py").write_text(code)
    return subprocess.run([sys.executable, "-c", RUN, str(folder)], capture_output=True, text=True)


def test_a_run_whose_tests_leave_the_checkout_alone_passes(tmp_path: Path) -> None:
    done = guarded(tmp_path, CLEAN)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


def test_a_run_whose_tests_touch_the_checkout_fails_and_names_the_files(tmp_path: Path) -> None:
    done = guarded(tmp_path, DIRTY)
    assert "3 passed" in done.stdout
    assert done.returncode == 1
    for line in ("created made.txt", "changed kept.txt", "deleted gone.txt"):
        assert line in done.stdout
    assert "test_x.py" not in done.stdout.partition("the checkout changed")[2]


# --- the README's commands -------------------------------------------------------------------------------------------


def test_the_readmes_steps_come_in_its_order() -> None:
    text = "```bash\nmake demo  # first\n\npip install .\n```\nwords\n```python\nx = 1\n```\n"
    text += "```bash\n# only\nkvprobe tasks\n```\n"
    assert [(s.language, s.text) for s in readme.steps(text)] == [
        ("bash", "make demo  # first"),
        ("bash", "pip install ."),
        ("python", "x = 1\n"),
        ("bash", "kvprobe tasks"),
    ]
    found = readme.steps((ROOT / "README.md").read_text(encoding="utf-8"))
    assert [step.text for step in found[:2]] == ["make demo", "pip install ."]
    assert sum(step.language == "python" for step in found) >= 2


FAKE = """#!/bin/sh
echo "$(basename "$0") $1 n=$DEMO_N $(basename "$PIP_CONSTRAINT")" >> "$LOG"
[ "$(basename "$0") $1" != "$FAILS" ]
"""


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with the README and what runs its commands, and commands that only write down that they were run."""
    root = tmp_path / "clone"
    for name in (".ci/readme.py", "tests/readme.py", "README.md"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    for name in ("make", "pip", "kvprobe", "python"):
        path = root / ".venv" / "bin" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(FAKE)
        path.chmod(0o755)
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    for words in (["init", "-q"], ["add", "-f", "."], [*identity, "commit", "-q", "-m", "x"]):
        subprocess.run(["git", *words], cwd=root, check=True, capture_output=True)
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    monkeypatch.setenv("FAILS", "")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    return root


def typed(clone: Path) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    done = subprocess.run([sys.executable, str(clone / ".ci" / "readme.py")], capture_output=True, text=True)
    return done, (clone.parent / "log").read_text().splitlines()


def test_every_command_is_run_in_order_with_the_pinned_versions(clone: Path) -> None:
    done, log = typed(clone)
    assert done.returncode == 0, done.stderr
    assert "every command ran" in done.stdout
    assert [line.split()[0] for line in log[:4]] == ["make", "pip", "python", "kvprobe"]
    told = readme.commands((ROOT / "README.md").read_text(encoding="utf-8"))
    assert [line.split()[:2] for line in log if line[:6] != "python"] == [words[:2] for words in told]
    assert all(line.endswith("n=2 constraints.txt") for line in log)
    assert done.stdout.count("\n# ") == len(log)  # each with its time


def test_the_first_command_that_fails_stops_it(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAILS", "kvprobe patch")
    done, log = typed(clone)
    assert done.returncode == 1
    assert "'kvprobe patch --task pronoun" in done.stderr
    assert len(log) == 4


def test_files_that_git_would_add_fail_it(clone: Path) -> None:
    (clone / ".venv" / "bin" / "pip").write_text(FAKE + "touch left.txt\n")
    done, _ = typed(clone)
    assert done.returncode == 1
    assert "left.txt" in done.stderr


def test_continuous_integration_runs_them_before_the_tests() -> None:
    lines = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line and line[0] != "#"]
    assert [line.split()[-1] for line in lines if "readme.py" in line or line.startswith("make")] == [
        ".ci/readme.py",
        "check",
        "test",
    ]


def test_the_makefile_puts_the_link_to_the_checkout_back() -> None:
    """`pip install .` leaves a copy; what runs or tests the checkout must not use it."""
    rules = (ROOT / "Makefile").read_text(encoding="utf-8").split("\n\n")
    for target in ("demo", "test", "figures", "bench"):
        rule = next(rule for rule in rules if rule.startswith(f"{target}:") or f"\n{target}:" in rule)
        assert "@$(LINK)" in rule, target
