"""Random tokens recomputed: what any choice at the same budget must beat. (A baseline of SemPIC, arXiv 2607.28069.)"""

from __future__ import annotations

import hashlib
from random import Random
from typing import TYPE_CHECKING

from kvnotes_interp.operators.blocks import Blocks
from kvnotes_interp.operators.made import Compiled, Made
from kvnotes_interp.operators.seams import count_of, repaired, stale_slots

if TYPE_CHECKING:
    from kvnotes_interp.model import Model


def random_recompute(
    model: Model, blocks: Blocks, *, share: float = 0.15, seed: int = 0, compiled: Compiled | None = None
) -> Made:
    """Join, then recompute `share` of the chunks' tokens, drawn at random.

    The draw depends on `seed` and the prompt alone, and a smaller share is part of a larger one.

    Raises InputError when `share` is not between 0 and 1.
    """
    candidates = stale_slots(blocks)
    prompt = hashlib.sha256(repr(blocks.context).encode()).hexdigest()
    order = Random(f"random_recompute|{seed}|{prompt}").sample(candidates, len(candidates))
    return repaired(model, blocks, order[: count_of(share, len(candidates))], compiled)
