"""KV Packet: chunks compiled by the plain model between trained vectors. (KV Packet, arXiv 2604.13226.)"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvnotes_interp.operators.blocks import Blocks
from kvnotes_interp.operators.learned import Adapter, join_written
from kvnotes_interp.operators.made import Compiled, Made

if TYPE_CHECKING:
    from kvnotes_interp.model import Model


def packet(model: Model, blocks: Blocks, *, adapter: Adapter, compiled: Compiled | None = None) -> Made:
    """Join the chunks, each compiled between the trained header and trailer; keys moved into place, nothing recomputed.

    Args:
        adapter: a folder that `kvprobe train packet` wrote, or a live `Writer`.
        compiled: caches made beforehand by this operator's `precompile`; None makes them here.

    Wrapper slots stay in the cache and take positions; `Made.token_slots` says where the tokens are.

    Raises InputError when the folder holds no whole Writer of this kind and model.
    """
    return join_written(model, blocks, adapter=adapter, kind="packet", compiled=compiled)
