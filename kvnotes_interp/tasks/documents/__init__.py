"""Document QA: several documents, one question, a known answer.

    from kvnotes_interp.tasks import documents
    questions = documents.load("biography", n=64, seed=0, documents=5, split="test")
    questions[0].text + questions[0].answer

One fact is looked up in `biography`, `needle`, `multikey` (among needles of the same form) and `choices` (the answer is
a letter); `gated` asks for a conclusion, `tracking` follows a chain of sentences, `aggregation` counts over all of the
text.

A task is one module with a function of the task's name that gives `Question`s; add it to `_MODULES`. Nothing here
imports torch or transformers.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from kvnotes_interp.errors import InputError, nearest
from kvnotes_interp.tasks.documents.question import Question
from kvnotes_interp.tasks.pair import Split

__all__ = ["Question", "about", "load", "names", "names_from_files", "options"]

# task -> module of this package that makes it
_MODULES = {
    "aggregation": "aggregation",
    "biography": "biography",
    "biography_cut": "biography_cut",
    "choices": "choices",
    "gated": "gated",
    "multikey": "multikey",
    "needle": "needle",
    "tracking": "tracking",
}
_FROM_FILES = {"hotpotqa": "hotpotqa", "musique": "musique"}  # the same, for tasks that read a published file


def names() -> tuple[str, ...]:
    """Names of the document tasks that are made on the spot."""
    return tuple(sorted(_MODULES))


def names_from_files() -> tuple[str, ...]:
    """Names of the tasks that read a published file: `load(name, file="...")`, or the hub's without it."""
    return tuple(sorted(_FROM_FILES))


def load(name: str, *, n: int = 64, seed: int = 0, split: Split | None = None, **options: Any) -> list[Question]:
    """Draw `n` distinct questions of a task.

    Args:
        name: one of `names()` or `names_from_files()`.
        n: number of questions. Contents are spread: none is used twice before all were used.
        seed: the same seed gives the same questions on every machine; a smaller `n` gives a prefix.
        split: "train", "test" or None for both in turn. No content is in both, whatever the seed.
        options: of the task, see `options(name)` and the task's docstring.

    Raises:
        InputError: unknown task or option, or a value out of range.
    """
    known = _parameters(name)
    for option in options:
        if option not in known:
            raise InputError(
                f'Document task "{name}" has no option "{option}".{nearest(option, known)} Its options: '
                f"{', '.join(known)} (besides n, seed and split)."
            )
    return _maker(name)(n=n, seed=seed, split=split, **options)


def about(name: str) -> str:
    """What a task is, in one sentence: the first one of its module."""
    module = inspect.getmodule(_maker(name))
    return " ".join((inspect.getdoc(module) or "").partition("\n\n")[0].split())


def options(name: str) -> dict[str, Any]:
    """Options of a task with their defaults, without n, seed and split."""
    return {key: parameter.default for key, parameter in _parameters(name).items()}


def _parameters(name: str) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(_maker(name)).parameters
    return {key: value for key, value in parameters.items() if key not in ("n", "seed", "split")}


def _maker(name: str) -> Any:
    modules = _MODULES | _FROM_FILES
    if name not in modules:
        raise InputError(
            f'There is no document task "{name}".{nearest(name, modules)} Document tasks: {", ".join(names())}; from '
            f"published files: {', '.join(names_from_files())}."
        )
    return getattr(importlib.import_module(f"{__name__}.{modules[name]}"), name)
