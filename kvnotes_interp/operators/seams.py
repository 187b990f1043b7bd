"""Which slots of a join are stale, and choosing some of them: shared by splice and by the recompute baselines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvnotes_interp import engine
from kvnotes_interp.errors import InputError
from kvnotes_interp.operators.blocks import Blocks
from kvnotes_interp.operators.compose import no_recompute
from kvnotes_interp.operators.made import Compiled, Made

if TYPE_CHECKING:
    from kvnotes_interp.model import Model


def stale(blocks: Blocks) -> tuple[range, ...]:
    """Slots of every chunk that stands behind something. A chunk at slot 0 is exact as it was compiled: left out."""
    return tuple(range(start, stop) for start, stop in blocks.spans if start > 0)


def stale_slots(blocks: Blocks) -> tuple[int, ...]:
    """All of them, rising: the candidates of every recompute baseline."""
    return tuple(slot for chunk in stale(blocks) for slot in chunk)


def count_of(share: float, n: int) -> int:
    """Tokens that `share` of `n` stands for, at least one if both are positive. Raises InputError outside 0 to 1."""
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise InputError(f"share={share!r}: the part of the chunks' tokens to recompute lies between 0 and 1.")
    return min(n, max(1, math.floor(share * n + 0.5))) if share > 0 else 0


def refuse_wrappers(made: Made, slots: Sequence[int]) -> None:
    """Raise InputError when `slots`, counted in tokens, would be recomputed in a cache that holds wrapper slots too."""
    if slots and made.token_slots is not None:
        raise InputError(
            f"{len(slots)} tokens to recompute in a cache with {len(made.cache) - len(made.token_slots)} wrapper slots "
            "(a packet's): seams are repaired in caches that the plain model or a sempic Writer compiled."
        )


def repaired(model: Model, blocks: Blocks, slots: Sequence[int], compiled: Compiled | None) -> Made:
    """The join with `slots` truly recomputed on the mixed cache, and its cost."""
    made = no_recompute(model, blocks, compiled=compiled)
    refuse_wrappers(made, slots)
    done = engine.recompute(model, made.cache, slots)
    return replace(made, cache=done.cache, recomputed_tokens=len(done.slots), layer_tokens=done.layer_tokens)
