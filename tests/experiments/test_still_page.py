"""experiments/still: the page holds the kept numbers, and the commands that it names are commands."""

from __future__ import annotations

from pathlib import Path

from experiments.still import collect
from kvnotes_interp.cli.probes import COMMANDS


def test_the_page_agrees_with_the_kept_summaries() -> None:
    assert collect.main(["--check"]) == 0


def test_another_number_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    text = collect.README.read_text(encoding="utf-8")
    assert "| SnapKV | 0.02 |" in text
    page.write_text(text.replace("| SnapKV | 0.02 |", "| SnapKV | 0.12 |"), encoding="utf-8")
    assert collect.main(["--check", "--readme", str(page)]) == 1


def test_commands_are_those_of_the_probes() -> None:
    assert {line.split()[1] for line in collect.commands()} <= {*COMMANDS, "train"}
