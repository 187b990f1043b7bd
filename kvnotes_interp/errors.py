"""Every error a user can meet, and the exit code that `kvprobe` gives for it.

A message names the thing, its value, and what to do about it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class KVNotesError(Exception):
    """Base of all errors raised on purpose by this package."""

    exit_code = 2


class InputError(KVNotesError, ValueError):
    """The caller asked for something that does not exist or does not fit together."""


class TokenLengthError(InputError):
    """Two prompts that must align token by token do not."""


class UnsupportedError(KVNotesError):
    """A model, cache or rotary type is refused by name because its numbers would be wrong."""


NOT_FINITE = "not finite"  # how the reason of every NotFiniteError begins


class NotFiniteError(UnsupportedError):
    """A pass gave NaN or infinity where a number was asked for. `reason` is short and can be counted."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ControlError(KVNotesError):
    """A control failed, so the numbers it guards mean nothing."""

    exit_code = 1


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return `' Did you mean "x"?'` for the closest choice, or an empty string."""
    close = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return f' Did you mean "{close[0]}"?' if close else ""
