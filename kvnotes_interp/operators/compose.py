"""Composing a cache from pieces: the two ends of the scale, full recompute and the bare join.

Chunks are prefilled alone at positions 0, 1, ...; the join turns their keys once, in float32, to where they stand and
leaves values as they are. (SemPIC, arXiv 2607.28069, "no recompute"; Notes, arXiv 2606.17107, splice.)

What the join does not do: a chunk has seen neither the prefix nor its neighbours, so its keys and values are those of
other hidden states, whatever their positions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from kvnotes_interp import engine
from kvnotes_interp.cache import join
from kvnotes_interp.operators.blocks import Blocks
from kvnotes_interp.operators.made import Compiled, Made

if TYPE_CHECKING:
    from kvnotes_interp.model import Model


def precompile(model: Model, blocks: Blocks) -> Compiled:
    """Prefill the prefix in its place and every chunk alone, each from position 0."""
    prefix = engine.prefill(model, blocks.prefix) if blocks.prefix else None
    return Compiled(prefix, tuple(engine.prefill(model, chunk) for chunk in blocks.chunks))


def full_recompute(model: Model, blocks: Blocks) -> Made:
    """Prefill prefix and chunks together: the reference, at the full cost (a cached prefix is not deducted)."""
    cache = engine.prefill(model, blocks.context)
    return Made(cache, len(cache), len(cache) * cache.n_layers)


def no_recompute(model: Model, blocks: Blocks, *, move_keys: bool = True, compiled: Compiled | None = None) -> Made:
    """Join the prefix and the chunks as they were prefilled alone; nothing is recomputed.

    Args:
        move_keys: turn each chunk's keys to the positions where it stands. Off: the naive join, keys stay at 0, 1, ...
        compiled: caches made beforehand by `precompile`; None makes them here and counts them as compiled.

    The suffix goes on behind the last token in both cases.
    """
    if compiled is not None:
        compiled.check(blocks)
    ready = precompile(model, blocks) if compiled is None else compiled
    cache, start = None, 0
    for part in ready.parts:
        if move_keys:
            part = part.placed(torch.arange(start, start + len(part)))
        cache = part if cache is None else join(cache, part, overlap=not move_keys)
        start += len(part)
    assert cache is not None  # blocks hold at least one chunk
    # Keys that were not moved stand at low positions; the suffix still comes behind all of the tokens.
    cache = replace(cache, end=start)
    slots = (cache.token_ids[0] >= 0).nonzero()[:, 0].tolist()
    token_slots = None if len(slots) == len(cache) else tuple(slots)
    return Made(cache, 0, 0, 0 if compiled is not None else ready.layer_tokens, token_slots)
