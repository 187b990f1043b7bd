"""The examples of a Markdown page, for the tests and for continuous integration. Standard library only."""

from __future__ import annotations

import re
import shlex
from typing import NamedTuple


class Step(NamedTuple):
    """A line of a bash block, or a whole python block."""

    language: str
    text: str


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of one language, in order."""
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def commands(text: str) -> list[list[str]]:
    """The commands of all bash blocks as words, comments left out."""
    lines = [line for block in blocks(text, "bash") for line in block.splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def steps(text: str) -> list[Step]:
    """Commands and python blocks in the order of the page."""
    found = []
    for language, block in re.findall(r"```(bash|python)\n(.*?)```", text, flags=re.DOTALL):
        if language == "python":
            found.append(Step("python", block))
        else:
            lines = block.splitlines()
            found += [Step("bash", line) for line in lines if shlex.split(line, comments=True)]
    return found
