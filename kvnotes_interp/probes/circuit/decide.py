"""Many edited decisions as rows of few batches, and the rows of a table that they become.

Every edit here is made in the forward pass of the decision token, or of the prompt, and leaves the cache it starts from
as it was. Batches are cut to the memory budget, as the plain path of a sweep is.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import pandas as pd
import torch
from torch import Tensor

from kvnotes_interp import engine
from kvnotes_interp.cache import KVCache
from kvnotes_interp.engine import Captured, Cut, Edits, HeadPatch
from kvnotes_interp.errors import ControlError
from kvnotes_interp.metrics import recovery
from kvnotes_interp.probes.measure import Case
from kvnotes_interp.results.tables import FRAME_COLUMNS
from kvnotes_interp.sites import Site

Head = tuple[int, int]
"""A layer and a query head of it."""

_Item = TypeVar("_Item")
Scored = tuple[Mapping[str, Any], float]
"""What the frame says of a cell, and its score `s`."""

READOUTS = ("logit_diff", "recovery", "p_new", "flip")
COLUMNS = {
    **FRAME_COLUMNS,
    "head": "int64",  # query head, beside `layer`
    "share": "float64",  # of the downstream positions
    "base": "string",  # the cache that an edit starts from
    "band": "string",  # layers that an edit reaches
    "ablation": "string",  # what stands in for what was taken out
}
"""The columns of a result, and those that only circuit ablation has."""


def table(case: Case, cells: Iterable[Scored], *, toward: str = "new") -> pd.DataFrame:
    """Tidy rows for scored cells: one per (cell, readout).

    Readouts: `logit_diff` (s), `recovery`, `p_new` (probability of the new answer among the two), `flip` (1 where the
    new answer wins). With `toward="old"` the new run is the start and the old answer the aim: recovery and flip are
    counted that way round, and `p_new` is still the new answer's.
    """
    rows = []
    start, aim = (case.old, case.new) if toward == "new" else (case.new, case.old)
    for about, score in cells:
        followed = score > 0 if toward == "new" else score < 0
        values = (score, recovery(score, old=start, new=aim), _sigmoid(score), float(followed))
        row = {**case.names, "part": "kv", **about}
        rows += [{**row, "readout": name, "value": value} for name, value in zip(READOUTS, values, strict=True)]
    return frame(rows)


def frame(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Rows with the columns of circuit ablation."""
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


@dataclass(frozen=True)
class Row:
    """One edited decision: a cache of batch 1, edges cut, and heads whose outputs at the decision token are replaced.

    `patch` is a site of the cache and the donor it is copied from; `outputs` `[layer 1 head d_head]` hold what the
    heads of `heads` take.
    """

    cache: KVCache
    patch: tuple[Site, KVCache] | None = None
    cuts: tuple[Cut, ...] = ()
    heads: Collection[Head] = ()
    outputs: Tensor | None = None


def decide(case: Case, rows: Sequence[Row]) -> list[float]:
    """`s` of the decision token under each row's edits; rows of any kind share batches. Caches have one length."""
    out: list[float] = []
    for chunk in batches(case, rows, n_pos=max((len(r.cache) for r in rows), default=0)):
        # Patched copies live only as long as their batch.
        cache = stacked([r.cache if r.patch is None else r.cache.patched(*r.patch) for r in chunk])
        cuts = [r.cuts for r in chunk] if any(r.cuts for r in chunk) else ()
        heads = head_patch((len(cache),), [r.outputs for r in chunk], [r.heads for r in chunk])
        out += scores(case, run(case, cache, Edits(cuts=cuts, heads=heads)))
    return out


def stacked(caches: Sequence[KVCache]) -> KVCache:
    """Caches of batch 1 and one length as the rows of one; a view where all are the same cache."""
    first = caches[0]
    if all(cache is first for cache in caches):
        return first.repeat(batch=len(caches))

    def rows(tensors: Iterable[Tensor]) -> Tensor:
        return torch.cat(list(tensors))

    return replace(
        first,
        keys=tuple(rows(c.keys[i] for c in caches) for i in range(first.n_layers)),
        values=tuple(rows(c.values[i] for c in caches) for i in range(first.n_layers)),
        token_ids=rows(c.token_ids for c in caches),
    )


def cache_row(cache: KVCache, row: int) -> KVCache:
    """One row of a cache, with a batch of 1."""
    keep = slice(row, row + 1)
    return replace(
        cache,
        keys=tuple(k[keep] for k in cache.keys),
        values=tuple(v[keep] for v in cache.values),
        token_ids=cache.token_ids[keep],
    )


def run(case: Case, cache: KVCache, edits: Edits | None = None, *, want: Sequence[str] = ()) -> Captured:
    """The decision token on top of a cache, recording `want` for its slot."""
    return engine.capture(case.model, cache, case.tail, want=want, edits=edits)


def scores(case: Case, captured: Captured) -> list[float]:
    """`s` at the last new token, per row."""
    logits = engine.answer_logits(case.model, captured, case.answers)
    return (logits[:, 1] - logits[:, 0]).tolist()


def row_of(captured: Captured, row: int) -> Captured:
    """One row of a capture, with a batch of 1."""
    keep = slice(row, row + 1)
    names = ("residual", "attention", "mlp", "heads", "patterns", "queries")
    parts = {name: None if (t := getattr(captured, name)) is None else t[:, keep] for name in names}
    return replace(captured, hidden=captured.hidden[keep], **parts)


def head_patch(
    slots: Sequence[int], outputs: Sequence[Tensor | None], sets: Sequence[Collection[Head]]
) -> HeadPatch | None:
    """The patch in which row i takes `outputs[i]` `[layer slot head d_head]` for the heads of `sets[i]`, at all slots.

    None where no row replaces anything.
    """
    layers = sorted({layer for heads in sets for layer, _ in heads})
    given = [o for o, heads in zip(outputs, sets, strict=True) if heads and o is not None]
    if not layers:
        return None
    shape = given[0].shape
    take = {layer: torch.zeros(len(sets), len(slots), shape[2], dtype=torch.bool) for layer in layers}
    for row, heads in enumerate(sets):
        for layer, head in heads:
            take[layer][row, :, head] = True
    if all(o is given[0] for o in given):
        return HeadPatch(tuple(slots), {layer: given[0][layer][None] for layer in layers}, take)
    filled = [given[0] if o is None else o for o in outputs]
    return HeadPatch(tuple(slots), {layer: torch.stack([o[layer] for o in filled]) for layer in layers}, take)


def batches(case: Case, rows: Sequence[_Item], *, n_pos: int, n_tail: int = 1) -> Iterator[Sequence[_Item]]:
    """`rows` in pieces that fit the memory budget, for a cache of `n_pos` slots and `n_tail` new tokens per row."""
    if not rows:
        return
    plan = engine.plan_sweep(
        case.model, len(rows), n_pos, n_tail, memory_budget=case.sweeper.memory_budget, path="plain"
    )
    for start in range(0, len(rows), plan.batch_rows):
        chunk = rows[start : start + plan.batch_rows]
        yield chunk
        if case.sweeper.progress is not None:
            case.sweeper.progress(len(chunk))


def control_rows(case: Case, gaps: Mapping[str, float], *, blame: Mapping[str, str] | None = None) -> pd.DataFrame:
    """Rows for identities that were measured on this pair: `gaps` in logits. Raises ControlError on one that fails.

    `blame` says, per control, where to look.
    """
    for name, gap in gaps.items():
        if not abs(gap) <= case.tolerance:
            where = f"; {blame[name]}" if blame and blame.get(name) else ""
            raise ControlError(
                f"control {name!r} failed on {case.model.name} ({case.model.dtype}), pair {case.pair.pair.key}: off by "
                f"{abs(gap):.3g} logits, tolerance {case.tolerance:.3g} (noise floor {case.noise:.3g}){where}. Nothing "
                "that this analysis measures on this model can be trusted."
            )
    return frame(
        [
            {**case.names, "view": "control", "site": name, "readout": readout, "value": value}
            for name, gap in gaps.items()
            for readout, value in (("gap", abs(gap)), ("tolerance", case.tolerance))
        ]
    )
