"""CacheBlend: the tokens whose keys and values change most in an early layer. (CacheBlend, arXiv 2405.16444.)"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvnotes_interp import engine
from kvnotes_interp.operators.blocks import Blocks
from kvnotes_interp.operators.compose import no_recompute
from kvnotes_interp.operators.made import Compiled, Made
from kvnotes_interp.operators.seams import count_of, refuse_wrappers, stale_slots

if TYPE_CHECKING:
    from kvnotes_interp.model import Model


def cacheblend(
    model: Model,
    blocks: Blocks,
    *,
    share: float = 0.15,
    check_layer: int = 1,
    compiled: Compiled | None = None,
) -> Made:
    """Join, run all chunk tokens through layers 0 to `check_layer`, and the most changed `share` through the rest.

    At one share it costs more layer-tokens than `epic` or `random_recompute`: all tokens pass the first layers. Compare
    by `layer_tokens`. `recomputed_tokens` counts every token that went through any layer, so it is all of them.

    Raises InputError when `share` is not between 0 and 1, or there is no such layer.
    """
    made = no_recompute(model, blocks, compiled=compiled)
    candidates = stale_slots(blocks)
    refuse_wrappers(made, candidates)
    keep = count_of(share, len(candidates))
    done = engine.blend(model, made.cache, candidates, keep, check_layer=check_layer)
    return replace(made, cache=done.cache, recomputed_tokens=len(candidates), layer_tokens=done.layer_tokens)
