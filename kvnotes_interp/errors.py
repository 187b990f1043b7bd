"""Every error a user can meet, and the exit code that `kvprobe` gives for it.

A message names the thing, its value, and what to do about it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


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


def whole_numbers(name: str, values: Any) -> tuple[int, ...]:
    """The values as plain ints: a number alone, a sequence, a range, a generator, an array or a tensor of them.

    Raises InputError for a mask of True and False, a fraction, a text, or anything else: each would be taken for other
    places than those that were meant.
    """
    if isinstance(values, str | bytes) or not hasattr(values, "__iter__"):
        raise InputError(f"{name}={values!r}: give whole numbers, such as (3, 4).")
    listed = values.tolist() if hasattr(values, "tolist") else list(values)
    out = []
    for value in listed if isinstance(listed, list) else [listed]:
        value = value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            kind = (
                "a mask of True and False; give the indices, mask.nonzero()" if isinstance(value, bool) else "no index"
            )
            raise InputError(f"{name} holds {value!r}, which is {kind}.")
        out.append(value.__index__())
    return tuple(out)


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return `' Did you mean "x"?'` for the closest choice, or an empty string."""
    close = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return f' Did you mean "{close[0]}"?' if close else ""
