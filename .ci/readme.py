"""Run what README.md tells a new user to type, in its order, in this one clone: `python3 .ci/readme.py`.

Standard library only. Stops at the first command that fails, and fails when a command leaves files that git would add.
`DEMO_N` makes the demo smaller. Examples of `kvnotes_interp.adapters` need optional packages, which `make test` has:
tests/test_readme.py runs them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from tests.readme import Step, steps  # noqa: E402


def environment() -> dict[str, str]:
    """The virtual environment of `make` comes first, as if it had been activated, with the pinned versions."""
    venv = ROOT / os.environ.get("VENV", ".venv")
    return {
        **os.environ,
        "PATH": os.pathsep.join([str(venv / "bin"), os.environ["PATH"]]),
        "VIRTUAL_ENV": str(venv),
        "PIP_CONSTRAINT": str(ROOT / "constraints.txt"),
        "DEMO_N": os.environ.get("DEMO_N", "2"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def untracked() -> str:
    """What `git status` lists."""
    return subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def program(found: list[Step]) -> list[Step]:
    """The python blocks share their names: they become one program, where the first of them stands."""
    python = [step for step in found if step.language == "python" and "adapters" not in step.text]
    whole = Step("python", "\n".join(step.text for step in python))
    return [whole if step is python[0] else step for step in found if step.language == "bash" or step is python[0]]


def main() -> int:
    """0, or the exit status of the command that failed."""
    before, began = untracked(), time.monotonic()
    for step in program(steps((ROOT / "README.md").read_text(encoding="utf-8"))):
        shown = step.text if step.language == "bash" else "python  # the tour"
        print(f"$ {shown}", flush=True)
        command = ["bash", "-c", step.text] if step.language == "bash" else ["python", "-c", step.text]
        start = time.monotonic()
        status = subprocess.run(command, cwd=ROOT, env=environment()).returncode
        print(f"# {time.monotonic() - start:.0f} s", flush=True)
        if status:
            print(f"README.md: {shown!r} ended with exit status {status}.", file=sys.stderr)
            return status
    if untracked() != before:
        print(f"README.md: its commands left files that git does not ignore:\n{untracked()}", file=sys.stderr)
        return 1
    print(f"README.md: every command ran, in {time.monotonic() - began:.0f} s.", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
