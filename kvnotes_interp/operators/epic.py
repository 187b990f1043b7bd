"""EPIC: the first tokens of every chunk are recomputed. (EPIC, arXiv 2410.15332; the baseline of SemPIC.)"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvnotes_interp.operators.blocks import Blocks
from kvnotes_interp.operators.made import Compiled, Made
from kvnotes_interp.operators.seams import count_of, repaired, stale, stale_slots

if TYPE_CHECKING:
    from kvnotes_interp.model import Model


def epic(model: Model, blocks: Blocks, *, share: float = 0.15, compiled: Compiled | None = None) -> Made:
    """Join, then recompute the first tokens of every chunk, `share` of all chunks' tokens in total.

    Every chunk gets the same number of tokens; one that is shorter leaves its rest to the others, and tokens left over
    go to the first chunks. So the total is exactly what `random_recompute` and `cacheblend` keep at this share.
    (EPIC itself fixes a number of tokens per chunk: that is `splice(..., seam_repair=n)`.)

    Raises InputError when `share` is not between 0 and 1.
    """
    chunks = stale(blocks)
    counts = _spread(count_of(share, len(stale_slots(blocks))), [len(chunk) for chunk in chunks])
    slots = [slot for chunk, count in zip(chunks, counts, strict=True) for slot in chunk[:count]]
    return repaired(model, blocks, slots, compiled)


def _spread(total: int, sizes: list[int]) -> list[int]:
    """`total` over chunks of these sizes, as evenly as they allow; a remainder goes to the first that have room."""
    counts = [0] * len(sizes)
    while total > 0 and (open_ := [i for i, size in enumerate(sizes) if counts[i] < size]):
        each = max(1, min(total // len(open_), min(sizes[i] - counts[i] for i in open_)))
        for i in open_[: total // each]:
            counts[i] += each
            total -= each
    return counts
