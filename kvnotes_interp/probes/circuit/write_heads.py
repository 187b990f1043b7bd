"""Write heads: which heads put the conclusion into the note, and how much of it is attention's work?

The aggregators are the downstream positions that carry the decision (ranked on the other half of the pairs). Heads are
ranked by how much their contribution there changes between the two prompts: the norm of the change of what the head
adds to the residual stream, over the norm of that stream, mean over the aggregators. The ranking is confirmed by *path
patching at prefill*: the old prompt is run with the outputs of the top k heads at the aggregators replaced by those of
the new run (resample ablation), and the decision is read from the cache that comes of it, in two ways:

- recomputed: the whole cache. Later layers of the aggregators, and everything that reads them, follow.
- frozen: only the keys and values of the aggregators themselves are taken over into the old cache; all other positions
  stay old. Later layers of the aggregators still follow.

With every head replaced, the frozen cache is exactly the old cache patched at the aggregators: their tokens are the
same in both prompts, and their MLPs follow from what their heads brought. Attention's share replaces the writes of one
kind and holds those of the other at the old run. (Notes, arXiv 2606.17107, circuit.)

What this does not prove: that a head outside the top k does not write. Where many heads write a little, no small set
recovers much, and that is the finding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd
import torch

from kvnotes_interp import engine
from kvnotes_interp.engine import Captured, Edits, WritePatch
from kvnotes_interp.probes.circuit import attribution
from kvnotes_interp.probes.circuit.attribution import record
from kvnotes_interp.probes.circuit.decide import (
    Head,
    batches,
    control_rows,
    frame,
    head_patch,
    row_of,
    run,
    scores,
    table,
)
from kvnotes_interp.probes.circuit.read_heads import every_head, head_sets
from kvnotes_interp.probes.measure import Case
from kvnotes_interp.sites import Site

PARTS: tuple[Literal["attention", "mlp"], ...] = ("attention", "mlp")
MODES = ("recomputed", "frozen")


@dataclass(frozen=True)
class Writers:
    """The aggregators of one pair and what both runs did there."""

    slots: tuple[int, ...]
    old: Captured
    new: Captured


def run_both(case: Case, slots: Sequence[int]) -> Writers:
    """Both prompts, up to the decision token, with everything recorded at the aggregators."""
    slots = tuple(sorted(slots))
    ids = [list(case.pair.old_ids[:-1]), list(case.pair.new_ids[:-1])]
    runs = engine.capture(case.model, None, ids, slots=slots, want=attribution.WANT)
    return Writers(slots, row_of(runs, 0), row_of(runs, 1))


def contributions(case: Case, runs: Writers) -> pd.DataFrame:
    """One row per head: the size of its change at the aggregators, relative to the residual stream that it joins."""
    rows = []
    for layer in range(case.model.shape.n_layers):
        before, _ = attribution.attention_parts(case.model, runs.old, layer)
        after, _ = attribution.attention_parts(case.model, runs.new, layer)
        stream = record(runs.old.residual)[layer + 1, 0].norm(dim=-1)
        change = ((after - before).norm(dim=-1) / stream).mean(-1)
        rows += [
            {
                **case.names,
                "view": "write_head",
                "site": "head",
                "layer": layer,
                "head": head,
                "size": len(runs.slots),
                "readout": "change",
                "value": float(value),
            }
            for head, value in enumerate(change)
        ]
    return frame(rows)


def stream_shares(case: Case, runs: Writers) -> pd.DataFrame:
    """Per layer: attention's share of the change that has come into the aggregators' residual stream so far.

    The change at the output of layer l is the sum of what attention and MLPs up to l changed; each is projected on the
    whole, so that the two shares sum to 1. A share is about size and direction, not about what is read from it.
    """
    rows = []
    written = (record(runs.new.attention) - record(runs.old.attention))[:, 0].cumsum(0)
    whole = (record(runs.new.residual) - record(runs.old.residual))[1:, 0]
    for layer in range(case.model.shape.n_layers):
        size = float((whole[layer] ** 2).sum())
        if size > 0:
            share = float((written[layer] * whole[layer]).sum()) / size
            about = {"view": "stream", "site": "attention", "layer": layer, "size": len(runs.slots)}
            rows.append({**case.names, **about, "readout": "share", "value": share})
    return frame(rows)


def head_prefills(case: Case, runs: Writers, sets: Sequence[Sequence[Head]]) -> list[tuple[float, float]]:
    """`s` (recomputed, frozen) with the aggregator outputs of each set of heads from the new run; sets are rows."""
    theirs = record(runs.new.heads)[:, 0]
    out: list[tuple[float, float]] = []
    for chunk in batches(case, sets, n_pos=runs.slots[0], n_tail=case.pair.length - runs.slots[0]):
        edits = Edits(heads=head_patch(runs.slots, [theirs] * len(chunk), chunk))
        out += prefill(case, runs, edits, len(chunk))
    return out


def prefill(case: Case, runs: Writers, edits: Edits, rows: int) -> list[tuple[float, float]]:
    """`s` (recomputed, frozen) of the old prompt with `rows` rows of edits at the aggregators.

    It is run from the first aggregator on: what stands before it is not touched by an edit.
    """
    start, n = runs.slots[0], len(case.base)
    before = case.base[:start].repeat(batch=rows)
    made = engine.capture(case.model, before, case.pair.old_ids[start:], slots=(), want=(), edits=edits)
    patched = case.base.repeat(batch=rows).patched(Site(runs.slots), made.cache[:n])
    return list(zip(scores(case, made), scores(case, run(case, patched)), strict=True))


def measure_curve(
    case: Case, slots: Sequence[int], changes: pd.DataFrame, *, ks: Sequence[int], draws: int, seed: int
) -> pd.DataFrame:
    """Top k write heads under every ranking, by both ways of reading, with the identities that hold them."""
    runs = run_both(case, slots)
    every = every_head(case)
    sets = head_sets(case, changes, ks=ks, draws=draws, seed=seed, name="write")
    found = head_prefills(case, runs, [[], every, *(heads for _, heads in sets)])
    patched = case.scores([Site(runs.slots)])[0]
    out = [controls(case, runs, none=found[0], every=found[1], patched=patched)]
    all_heads = {"ranking": "all", "k": len(every), "size": len(every)}
    cells: list[tuple[dict[str, Any], float]] = []
    for (about, _), both in zip([(all_heads, every), *sets], found[1:], strict=True):
        cells += [({**about, "view": "write_curve", "site": m}, s) for m, s in zip(MODES, both, strict=True)]
    return pd.concat([*out, table(case, cells)], ignore_index=True)


def controls(
    case: Case, runs: Writers, *, none: tuple[float, float], every: tuple[float, float], patched: float
) -> pd.DataFrame:
    """No head replaced is the old prompt, either way; all heads, frozen, are the cache patched at the aggregators."""
    gaps = {
        "write_nothing": max((s - case.old for s in none), key=abs),
        "write_all_heads": every[1] - patched,
    }
    return control_rows(
        case,
        gaps,
        blame={"write_all_heads": _worst_layer(case, runs)} if abs(gaps["write_all_heads"]) > case.tolerance else None,
    )


def _worst_layer(case: Case, runs: Writers) -> str:
    """The layer at which an all-heads prefill is furthest from the new run's residual stream at the aggregators."""
    start = runs.slots[0]
    edits = Edits(heads=head_patch(runs.slots, [record(runs.new.heads)[:, 0]], [every_head(case)]))
    made = engine.capture(case.model, case.base[:start], case.pair.old_ids[start:], slots=runs.slots, edits=edits)
    gaps = (record(made.residual) - record(runs.new.residual))[:, 0].abs().amax(dim=(-1, -2))
    layer = int(gaps.argmax())
    return f"the residual stream entering layer {layer} is furthest from the new run's ({float(gaps[layer]):.3g})"


def measure_share(case: Case, runs: Writers) -> pd.DataFrame:
    """Writes of attention alone, of the MLPs alone, and of both, from the new run, the other kind held at the old."""
    arms = {"attention": (1, 0), "mlp": (0, 1), "both": (1, 1), "neither": (0, 0)}  # 1: from the new run
    writes = []
    for place, part in enumerate(PARTS):
        sides = [record(getattr(side, part)) for side in (runs.old, runs.new)]
        rows = torch.cat([sides[arm[place]] for arm in arms.values()], dim=1)  # [layer arm slot d_model]
        writes.append(WritePatch(part, runs.slots, dict(enumerate(rows))))
    found = dict(zip(arms, prefill(case, runs, Edits(writes=writes), len(arms)), strict=True))
    patched = case.scores([Site(runs.slots)])[0]
    gaps = {
        "writes_of_itself": max((s - case.old for s in found["neither"]), key=abs),
        "writes_all": found["both"][1] - patched,
    }
    cells = [
        ({"view": "write_share", "site": arm, "band": mode, "size": len(runs.slots)}, score)
        for arm in ("attention", "mlp", "both")
        for mode, score in zip(MODES, found[arm], strict=True)
    ]
    return pd.concat([control_rows(case, gaps), table(case, cells), stream_shares(case, runs)], ignore_index=True)
