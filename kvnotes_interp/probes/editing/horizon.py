"""A field that toggles turn after turn, with nothing but errata appended to one growing cache.

At each turn the decision is read on the cache as it has grown and held against two things. A prefill of the same tokens
from nothing: causal attention makes the two equal, so that gap is a control of the bookkeeping, not a finding. And a
prefill of the prompt that simply has the current value: whether errata keep the decision right as they pile up is the
finding. (Notes, arXiv 2606.17107, long horizon: 28 turns.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvnotes_interp import engine, metrics
from kvnotes_interp.cache import KVCache
from kvnotes_interp.errors import ControlError
from kvnotes_interp.operators import edits as library
from kvnotes_interp.operators.edits.erratum import text_ids
from kvnotes_interp.probes.measure import Case


def horizon_rows(case: Case, setting: library.Setting, *, turns: int, wording: str) -> list[dict[str, Any]]:
    """Rows of view "horizon", `k` the turn from 1. Odd turns set the new value, even ones the old one again."""
    pair, start = setting.pair, setting.decision_start
    decision = list(pair.old_ids[start:])
    ends = {True: _row(case, case.donor, case.tail), False: _row(case, case.base, case.tail)}
    cache, ids, out = setting.stale[:start], list(pair.old_ids[:start]), []
    for turn in range(1, turns + 1):
        is_new = turn % 2 == 1
        said = text_ids(setting, wording, pair.pair.field_new if is_new else pair.pair.field_old)
        cache, _ = engine.extend(case.model, cache, said)
        ids += said
        here = _row(case, cache, decision)
        again = _row(case, engine.prefill(case.model, ids), decision)
        gap = float((here - again).abs().max())
        limit = max(case.tolerance, 256 * torch.finfo(case.model.dtype).eps * float(again.abs().max()))
        if not gap <= limit:
            raise ControlError(
                f"control 'grown cache = prefill of the same tokens' failed on {case.model.name}, pair "
                f"{pair.pair.key}, turn {turn}: off by {gap:.3g} logits, limit {limit:.3g}."
            )
        score = float(here[case.answers[1]] - here[case.answers[0]])
        values = {
            "logit_diff": score,
            "correct": float((score > 0) == is_new),
            "agreement": float(metrics.agreement(ends[is_new], here)),
            "kl": float(metrics.kl_divergence(ends[is_new], here)),
            "logit_cosine": float(metrics.logit_cosine(ends[is_new], here)),
            "gap": gap,
            "length": float(len(ids)),
        }
        about = {"view": "horizon", "site": "errata", "part": "kv", "k": turn}
        out += [{**case.names, **about, "readout": readout, "value": value} for readout, value in values.items()]
    return out


def _row(case: Case, cache: KVCache, tail: list[int]) -> Tensor:
    return engine.decide(case.model, cache, tail)[0].cpu()
