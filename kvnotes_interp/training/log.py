"""metrics.jsonl: one line per step and per validation, written as they happen."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from kvnotes_interp.files import entry, read_json_lines, replacing
from kvnotes_interp.results.manifest import json_safe


class MetricsLog:
    """Appends lines; opened at a step, it first drops every line behind that step, whole or torn."""

    def __init__(self, path: Path, *, step: int) -> None:
        kept = [line for line in read(path) if line["step"] <= step]
        with replacing(path) as temporary:
            temporary.write_text("".join(map(_line, kept)), encoding="utf-8")
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()

    def append(self, line: dict[str, Any]) -> None:
        """Write one line. Another process sees it at once."""
        self._file.write(_line(line))
        self._file.flush()

    def sync(self) -> None:
        """Make what was written safe against a power cut; called before a checkpoint that counts on it."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """No more lines."""
        self._file.close()


def read(path: Path) -> list[dict[str, Any]]:
    """All whole lines; what a kill tore off at the end is left out. Raises InputError for a line that is not one."""
    if not path.is_file():
        return []
    lines = read_json_lines(path, "metrics", of=dict, torn=True)
    for number, line in enumerate(lines, 1):
        for name, kind in (("kind", str), ("step", int)):
            entry(line, name, kind, f'metrics "{path}", line {number}')
    return lines


def _line(line: dict[str, Any]) -> str:
    return json.dumps(json_safe(line), allow_nan=False) + "\n"
