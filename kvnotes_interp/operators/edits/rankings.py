"""Orders of the positions behind the field, best first: which of them are worth recomputing.

`attention`, `punctuation`, `last` and `random` need the old run alone. `causal`, `kv_change` and `hidden_change` look
at the new run, so they cannot choose for a run that is to be saved; they show how good a choice could be. A causal
order profiled on another value of the field needs no new run of this one (`profiled_on`).
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

from kvnotes_interp import engine
from kvnotes_interp.errors import InputError, nearest
from kvnotes_interp.operators.edits.setting import Setting, open_setting
from kvnotes_interp.sites import Site

if TYPE_CHECKING:
    from kvnotes_interp.tasks import EncodedPair

OLD_RUN = ("attention", "punctuation", "last", "random")
NEW_RUN = ("causal", "kv_change", "hidden_change")
RANKINGS = (*NEW_RUN, *OLD_RUN)


def rank(setting: Setting, ranking: str, *, seed: int = 0) -> tuple[int, ...]:
    """All slots behind the field in the order of `ranking`, one of RANKINGS. Ties go to the later slot."""
    if ranking not in RANKINGS:
        raise InputError(f"ranking={ranking!r}: choose from {', '.join(RANKINGS)}.{nearest(ranking, RANKINGS)}")
    slots = setting.downstream
    if ranking == "random":
        return tuple(random.Random(f"{seed}:{setting.pair.pair.key}").sample(slots, len(slots)))
    value = {
        "causal": _causal,
        "kv_change": _kv_change,
        "hidden_change": _hidden_change,
        "attention": _attention,
        "punctuation": lambda s: [float(s.pair.delimiter[p]) for p in slots],
        "last": lambda s: [0.0 for _ in slots],
    }[ranking](setting)
    return tuple(sorted(slots, key=lambda p: (-value[p - slots[0]], -p)))


def profiled_on(setting: Setting, other: EncodedPair) -> tuple[int, ...]:
    """The causal order found with another pair's new value in this pair's old prompt.

    Raises InputError when that value has another number of tokens, or asks for the same answer as the old one.
    """
    pair = setting.pair
    theirs = other.new_ids[slice(*other.field)]
    if len(theirs) != len(setting.field) or other.answer_new_id == pair.answer_old_id:
        raise InputError(
            f'Pair "{other.pair.key}" cannot profile pair "{pair.pair.key}": its new value has {len(theirs)} tokens '
            f"(the field {len(setting.field)}), and its answer must differ from the old one."
        )
    ids = (*pair.new_ids[: pair.field[0]], *theirs, *pair.new_ids[pair.field[1] :])
    profile = replace(pair, new_ids=ids, answer_new_id=other.answer_new_id)
    return rank(open_setting(setting.model, profile), "causal")


def _causal(setting: Setting) -> list[float]:
    """How far patching a slot alone from the new run moves the decision toward the new answer."""
    pair = setting.pair
    sites = [Site((slot,)) for slot in setting.downstream]
    answers = (pair.answer_old_id, pair.answer_new_id)
    tail = [pair.old_ids[-1]]
    return engine.sweep(setting.model, setting.stale, setting.fresh, sites, tail, answers).difference.tolist()


def _kv_change(setting: Setting) -> list[float]:
    """Norm of the change of K and V together, over all layers."""
    total = sum(
        (new.double() - old.double()).square().sum((0, 1, 3)).cpu()
        for olds, news in ((setting.stale.keys, setting.fresh.keys), (setting.stale.values, setting.fresh.values))
        for old, new in zip(olds, news, strict=True)
    )
    return total.sqrt()[setting.downstream[0] :].tolist()  # type: ignore[union-attr]


def _hidden_change(setting: Setting) -> list[float]:
    """Norm of the change of what the layers read, relative to the old run's, mean over layers."""
    runs = [
        engine.capture(setting.model, None, list(ids[: setting.stop]), slots=setting.downstream).residual
        for ids in (setting.pair.old_ids, setting.pair.new_ids)
    ]
    old, new = (run[:, 0].double() for run in runs if run is not None)
    return ((new - old).norm(dim=-1) / old.norm(dim=-1)).mean(0).tolist()


def _attention(setting: Setting) -> list[float]:
    """Attention of the decision token in the old run, mean over layers and heads."""
    rows = engine.attention_rows(setting.model, setting.stale, [setting.pair.old_ids[-1]])
    mean = rows.mean((0, 1))[0]
    return mean[setting.downstream[0] : setting.stop].tolist()
