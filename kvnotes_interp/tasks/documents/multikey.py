"""Many needles of the same form with different keys; one of them is asked for.

After the multi-key retrieval of RULER (Hsieh et al. 2024, arXiv 2404.06654): what must survive is not that something
stands out from the filler but which key it belongs to. Texts, contents and splits are those of the task `needle` with
`others`; nothing is drawn here.
"""

from __future__ import annotations

from dataclasses import replace

from kvnotes_interp.tasks.documents.needle import PLACES, needle
from kvnotes_interp.tasks.documents.question import Question, make_key, whole_number
from kvnotes_interp.tasks.pair import Split


def multikey(
    *,
    n: int = 64,
    seed: int = 0,
    split: Split | None = None,
    keys: int = 8,
    length: int | None = 200,
    depth: float | None = None,
    documents: int = 1,
) -> list[Question]:
    """Questions for one of `keys` code words, each of a place of its own.

    Args:
        keys: number of needles, 2 to 24; no place and no code word comes twice.
        length: words of the haystack, needles included; None for needles alone, without filler.
        depth, documents: as in `needle`; depth is that of the needle asked for.

    Raises:
        InputError: a value is out of range, or `length` is too short for the needles and documents asked for.
    """
    whole_number("keys", keys, least=2, most=len(PLACES))
    length = 8 * keys if length is None else length
    drawn = needle(n=n, seed=seed, split=split, length=length, depth=depth, documents=documents, others=keys - 1)
    return [
        replace(
            one,
            family="multikey",
            key=make_key("multikey", *one.documents, one.suffix),
            content=one.content.replace("needle", "multikey", 1),
            details=(*one.details, ("keys", keys)),
        )
        for one in drawn
    ]
