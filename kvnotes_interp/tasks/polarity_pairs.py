"""The 2 x 2 design: field x polarity of the rule, so that field and conclusion say nothing of each other.

A family with a slot `polarity` of two entries words its rule in two ways that send the same field to opposite answers.
Its pairs are drawn here in squares: two pairs alike in everything but the polarity, and so four prompts.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from kvnotes_interp.errors import InputError
from kvnotes_interp.tasks.family import find
from kvnotes_interp.tasks.pair import Pair, Split
from kvnotes_interp.tasks.sampling import default_options, sample

SLOT = "polarity"


def polarity_pairs(
    name_or_path: str | Path = "polarity", *, n: int = 64, seed: int = 0, split: Split | None = None, **options: object
) -> list[Pair]:
    """`n` pairs in `n / 2` squares; the two pairs of a square follow each other and share their content.

    Field old and new are the same in both pairs of a square, their answers are exchanged.

    Raises InputError for an odd `n`, or for a family without a slot `polarity` of two entries.
    """
    file = find(name_or_path)
    entries = file.spec.slots.get(SLOT, [])
    if len(entries) != 2:
        raise InputError(
            f'family "{file.name}" has {len(entries)} entries in a slot "{SLOT}"; the 2 x 2 design needs two, which '
            "send the same field to opposite answers (see families/polarity.yaml)."
        )
    if n < 2 or n % 2:
        raise InputError(f"n is {n!r}; pairs come in squares of two, so give an even number.")
    halves = []
    for entry in entries:
        # With one entry the slot takes no part in the draw: both halves draw the same other slots, line by line.
        spec = file.spec.model_copy(update={"slots": {**file.spec.slots, SLOT: [entry]}})
        one = dataclasses.replace(file, spec=spec)
        halves.append(sample(one, n=n // 2, seed=seed, split=split, options={**default_options(one), **options}))
    return [pair for square in zip(*halves, strict=True) for pair in _aligned(*square)]


def _aligned(first: Pair, second: Pair) -> tuple[Pair, Pair]:
    """The second pair with old and new in the first one's order of field values (it was drawn by its answers)."""
    if second.field_old != first.field_old:
        second = dataclasses.replace(
            second,
            old=second.new,
            new=second.old,
            answer_old=second.answer_new,
            answer_new=second.answer_old,
            outcome_old=second.outcome_new,
            outcome_new=second.outcome_old,
        )
    return first, second
