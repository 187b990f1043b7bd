"""Counterfactual pairs at text level: no tokenizer, no model.

A prompt is a row of *pieces*. The old and the new prompt have the same pieces; only the text of the one
piece in region "field" differs. Every piece carries an *anchor*, a name that is the same in every instance
of a family, so that positions can be compared between prompts that hold different words.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["derived", "verbatim", "control"]
Split = Literal["train", "test"]
Region = Literal["preamble", "field", "rule", "filler", "decision", "template", "context"]

KINDS: tuple[str, ...] = ("derived", "verbatim", "control")
WRITABLE_REGIONS: tuple[str, ...] = ("preamble", "context", "rule", "filler", "decision")
"""Regions that a family file may name; "field" and "template" are assigned by this package."""


@dataclass(frozen=True)
class Piece:
    """One stretch of prompt text.

    Args:
        text: the text itself, spaces and newlines included.
        region: what the stretch does in the prompt; "template" is text added by a chat template.
        anchor: name of the stretch, unique inside a prompt and the same in all instances of the family.
        document: number of the document that the stretch belongs to; -1 for text outside of documents.
    """

    text: str
    region: Region
    anchor: str
    document: int = field(default=-1, repr=False)  # a run's fingerprint of its pairs is made of their texts


@dataclass(frozen=True)
class Message:
    """One chat turn. A last turn with role "assistant" is the forced beginning of the answer."""

    role: str
    pieces: tuple[Piece, ...]

    @property
    def text(self) -> str:
        """The turn's text."""
        return "".join(piece.text for piece in self.pieces)


Prompt = tuple[Message, ...] | tuple[Piece, ...]


@dataclass(frozen=True)
class Pair:
    """An old and a new prompt that differ only in the field, and the answer that each should get.

    Args:
        family: name of the family.
        kind: "derived" (a conclusion), "verbatim" (a lookup) or "control" (the answer must not change).
        key: unique, stable and safe as a file name; a function of the texts alone.
        content: cluster for the bootstrap and unit of the split. Two pairs with equal content are not
            independent observations.
        split: "train" or "test".
        old, new: messages if `chat`, else pieces.
        answer_old, answer_new: what follows each prompt, leading space included. For a control the first is
            the right answer of both prompts and the second the wrong one.
        chat: whether the prompt goes through the tokenizer's chat template.
        label: the field in words, for texts that speak of it ("the order's status").
        outcome_old, outcome_new: the answers by the names that all contents of the family share, such as
            " {case.yes}" where the word itself differs by content; "" where there are none.
    """

    family: str
    kind: Kind
    key: str
    content: str
    split: Split
    old: Prompt
    new: Prompt
    answer_old: str
    answer_new: str
    chat: bool
    label: str = "the value"
    outcome_old: str = ""
    outcome_new: str = ""

    @property
    def field_old(self) -> str:
        """The field's old value."""
        return _field(self.old)

    @property
    def field_new(self) -> str:
        """The field's new value."""
        return _field(self.new)

    @property
    def text_old(self) -> str:
        """The old prompt without chat template, for display."""
        return plain_text(self.old)

    @property
    def text_new(self) -> str:
        """The new prompt without chat template, for display."""
        return plain_text(self.new)


def pieces_of(prompt: Iterable[Message | Piece]) -> Iterator[Piece]:
    """All pieces of a prompt in order, without those that a chat template would add."""
    for part in prompt:
        if isinstance(part, Message):
            yield from part.pieces
        else:
            yield part


def plain_text(prompt: Iterable[Message | Piece]) -> str:
    """The prompt as one string; chat turns are separated by a blank line."""
    parts = list(prompt)
    messages = [part.text for part in parts if isinstance(part, Message)]
    return "\n\n".join(messages) if messages else "".join(piece.text for piece in pieces_of(parts))


def _field(prompt: Prompt) -> str:
    return next(piece.text for piece in pieces_of(prompt) if piece.region == "field")
