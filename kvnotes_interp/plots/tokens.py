"""Tokens as text that can be read in a figure."""

from __future__ import annotations

import unicodedata
from html import escape

_MARKS = {"\n": "⏎", "\r": "␍", "\t": "⇥", " ": "·"}


def visible(token: str) -> str:
    """The token with newline as ⏎, tab as ⇥ and every space as ·; other control characters as \\x1b."""
    shown = "".join(
        _MARKS.get(c) or (c if c.isprintable() else f"\\x{ord(c):02x}" if ord(c) < 256 else f"\\u{ord(c):04x}")
        for c in token
    )
    return shown or "∅"


def label(token: str, *, limit: int = 14) -> str:
    """`visible`, cut to `limit` characters and safe inside plotly's HTML-like text."""
    text = visible(token)
    if len(text) > limit:
        text = text[: limit - 1] + "…"
    return escape(text, quote=False)


def cells(text: str) -> int:
    """Width of `text` in monospace cells: East Asian wide characters take two, combining marks none."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)
