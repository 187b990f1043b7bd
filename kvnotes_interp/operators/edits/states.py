"""The cache states between which every edit stands, and the prompt that has its field last.

(Notes, arXiv 2606.17107, "Locality" and the editing frontier.)
"""

from __future__ import annotations

from kvnotes_interp import engine
from kvnotes_interp.operators.blocks import cut_pair
from kvnotes_interp.operators.edits.setting import Setting
from kvnotes_interp.operators.made import Made


def stale(setting: Setting) -> Made:
    """The old cache as it is; costs nothing."""
    return Made(setting.stale, 0, 0)


def field_only(setting: Setting) -> Made:
    """The field's tokens recomputed with the new value, everything after them left old: an edit in place."""
    done = engine.recompute(setting.model, setting.stale, setting.field, token_ids=setting.new_ids(setting.field))
    return Made(done.cache, len(done.slots), done.layer_tokens)


def full_downstream(setting: Setting) -> Made:
    """The field and everything after it recomputed. Equal to the oracle: before the field nothing differs."""
    slots = setting.field + setting.downstream
    done = engine.recompute(setting.model, setting.stale, slots, token_ids=setting.new_ids(slots))
    return Made(done.cache, len(done.slots), done.layer_tokens)


def oracle(setting: Setting) -> Made:
    """The new prompt prefilled from nothing."""
    cache = engine.prefill(setting.model, list(setting.pair.new_ids[: setting.stop]))
    return Made(cache, len(cache), len(cache) * cache.n_layers)


def hoist(setting: Setting) -> Made:
    """The sentence that holds the field moved behind all others, so that a change costs it and the decision text only.

    A change of the prompt, not of a cache: what stands before the moved sentence was prefilled without it, once for all
    values, and is not counted. The joined pieces are not tokenised again.
    """
    pair = setting.pair
    blocks = cut_pair(pair, side="new")
    at = next(i for i, (start, stop) in enumerate(blocks.spans) if start <= pair.field[0] < stop)
    rest = [token for i, chunk in enumerate(blocks.chunks) if i != at for token in chunk]
    kept = [*blocks.prefix, *rest]
    moved = [*blocks.chunks[at], *blocks.suffix[:-1]]
    if kept:
        cache, _ = engine.extend(setting.model, engine.prefill(setting.model, kept), moved)
    else:
        cache = engine.prefill(setting.model, moved)
    return Made(cache, len(moved), len(moved) * cache.n_layers, len(kept) * cache.n_layers)
