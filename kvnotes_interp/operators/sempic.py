"""SemPIC: chunks compiled with a trained adapter, read by the model without it. (SemPIC, arXiv 2607.28069.)"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvnotes_interp.operators.blocks import Blocks
from kvnotes_interp.operators.learned import Adapter, join_written
from kvnotes_interp.operators.made import Compiled, Made

if TYPE_CHECKING:
    from kvnotes_interp.model import Model


def sempic(model: Model, blocks: Blocks, *, adapter: Adapter, compiled: Compiled | None = None) -> Made:
    """Join the chunks as the adapted model compiled them; keys moved into place, nothing recomputed.

    Args:
        adapter: a folder that `kvprobe train sempic` wrote, or a live `Writer`.
        compiled: caches made beforehand by this operator's `precompile`; None makes them here.

    What this does not prove: that the caches hold what full recompute would write. They were trained for its answers.

    Raises InputError when the folder holds no whole Writer of this kind and model.
    """
    return join_written(model, blocks, adapter=adapter, kind="sempic", compiled=compiled)
