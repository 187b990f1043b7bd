"""SemPIC and KV Packet together: an adapted model and trained vectors around each chunk. (SemPIC, arXiv 2607.28069.)"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvnotes_interp.operators.blocks import Blocks
from kvnotes_interp.operators.learned import Adapter, join_written
from kvnotes_interp.operators.made import Compiled, Made

if TYPE_CHECKING:
    from kvnotes_interp.model import Model


def joint(model: Model, blocks: Blocks, *, adapter: Adapter, compiled: Compiled | None = None) -> Made:
    """Join the chunks as the adapted model compiled them between the trained header and trailer; nothing recomputed.

    Args:
        adapter: a folder that `kvprobe train joint` wrote, or a live `Writer`.
        compiled: caches made beforehand by this operator's `precompile`; None makes them here.

    Wrapper slots stay in the cache and take positions; `Made.token_slots` says where the tokens are.

    Raises InputError when the folder holds no whole Writer of this kind and model.
    """
    return join_written(model, blocks, adapter=adapter, kind="joint", compiled=compiled)
