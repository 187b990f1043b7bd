"""Tiny models whose answer is known, so that a probe can be seen to tell the truth: `kv.load("organism:notes")`.

`notes`, `direct`, `mixed` and `null` hold by construction (`structural.py`); `trained` is a small Llama trained from
scratch on four tasks, whose mechanism nobody chose (`trained.py`). All are plain Llamas, built or read offline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvnotes_interp.errors import InputError, nearest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PREFIX = "organism:"
NAMES = ("notes", "direct", "mixed", "null", "trained")

__all__ = ["NAMES", "PREFIX", "build", "check_name"]


def check_name(name: str) -> str:
    """The organism that `organism:NAME` means. Raises InputError with the nearest name."""
    short = name.lower().removeprefix(PREFIX)
    if short not in NAMES:
        choices = [PREFIX + n for n in NAMES]
        raise InputError(f'There is no organism "{short}".{nearest(PREFIX + short, choices)} Use {", ".join(choices)}.')
    return short


def build(name: str) -> tuple[PreTrainedModel, Any, str]:
    """An organism in float32 on the CPU: the model, its tokenizer, and in words what it is.

    Raises InputError for a name that is none of NAMES.
    """
    short = check_name(name)
    if short == "trained":
        from kvnotes_interp.organisms import trained

        return *trained.build(), "trained from scratch; see experiments/organisms"
    from kvnotes_interp.organisms import structural

    return *structural.build(short), f"random weights, wired so that {structural.ABOUT[short]}; seed 0"
