"""Recomputing the field and a few positions behind it; and the upper bound that copies them instead.

Two names that must not be confused. `patch_top_k` copies K and V out of a full prefill of the new prompt: it needs
the pass that was to be saved, and is charged for it. `recompute_top_k` runs the chosen tokens again on the mixed
cache, as a serving engine would. (Notes, arXiv 2606.17107, field + top-K, reports the first; CacheBlend, arXiv
2405.16444.)
"""

from __future__ import annotations

from collections.abc import Sequence

from kvnotes_interp import engine
from kvnotes_interp.errors import InputError
from kvnotes_interp.operators.edits.rankings import rank
from kvnotes_interp.operators.edits.setting import Setting
from kvnotes_interp.operators.made import Made
from kvnotes_interp.sites import Site


def patch_top_k(
    setting: Setting, *, k: int, ranking: str = "attention", order: Sequence[int] | None = None, seed: int = 0
) -> Made:
    """K and V of the field and the top `k` positions behind it copied from a full prefill of the new prompt.

    An upper bound, not a saving. `order` overrides `ranking`.
    """
    chosen = setting.field + _top(setting, k, ranking, order, seed)
    cache = setting.stale.patched(Site(chosen), setting.fresh)
    return Made(cache, setting.stop, setting.stop * cache.n_layers)


def recompute_top_k(
    setting: Setting, *, k: int, ranking: str = "attention", order: Sequence[int] | None = None, seed: int = 0
) -> Made:
    """The field and the top `k` positions behind it run again, attending to the mixed cache. k=0 is `field_only`.

    What the ranking itself costs is not counted; see `rankings.py` for what each looks at.
    """
    chosen = tuple(sorted(setting.field + _top(setting, k, ranking, order, seed)))
    done = engine.recompute(setting.model, setting.stale, chosen, token_ids=setting.new_ids(chosen))
    return Made(done.cache, len(done.slots), done.layer_tokens)


def cacheblend(setting: Setting, *, share: float = 0.15) -> Made:
    """CacheBlend: all tokens from the field on through two layers, then `share` of the prompt, the most changed.

    Recomputed tokens count all that went through any layer; layer-tokens say what it really took.
    """
    if not 0 < share <= 1:
        raise InputError(f"share={share}: the share of the prompt that is recomputed lies above 0 and up to 1.")
    candidates = setting.field + setting.downstream
    keep = min(len(candidates), max(len(setting.field), round(share * setting.stop)))
    ids = setting.new_ids(candidates)
    done = engine.blend(setting.model, setting.stale, candidates, keep, token_ids=ids, always=setting.field)
    return Made(done.cache, len(candidates), done.layer_tokens)


def _top(setting: Setting, k: int, ranking: str, order: Sequence[int] | None, seed: int) -> tuple[int, ...]:
    if k < 0:
        raise InputError(f"k={k}: the number of positions behind the field is 0 or more.")
    ordered = rank(setting, ranking, seed=seed) if order is None and k else tuple(order or ())
    return ordered[:k]
