"""What every patching probe does first: run both prompts, judge the pair, prove the controls, read patched caches.

One pair is one unit of work: it is measured alone, so that a run can be killed and resumed between pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from kvnotes_interp import engine
from kvnotes_interp.cache import KVCache
from kvnotes_interp.errors import ControlError, InputError
from kvnotes_interp.metrics import Competence, recovery
from kvnotes_interp.probes.making import PREFILL, Making, caches_of
from kvnotes_interp.results import Control
from kvnotes_interp.results.tables import FRAME_COLUMNS
from kvnotes_interp.sites import Part, Site
from kvnotes_interp.tasks import EncodedPair, SetAside

if TYPE_CHECKING:
    from kvnotes_interp.model import Model

Cell = tuple[dict[str, Any], Site]
"""A site and what the frame says of it (view, site, layer, position, ...)."""


@dataclass(frozen=True)
class Sweeper:
    """How to run sweeps: the memory they may take, the path, and whom to tell about finished rows."""

    memory_budget: int | None = None
    path: str = "auto"
    progress: Callable[[int], None] | None = None


@dataclass(frozen=True)
class Case:
    """One pair on one model: both caches up to the tail, the scores at either end, the noise.

    `old` and `new` are read by the path that reads the patches, `plain` is `old` by an independent plain forward.
    `pair` has one entry per slot; `slots` gives the slot of each token of the prompt, and differs from 0, 1, ... only
    where an operator's cache has slots without a token.
    """

    model: Model
    pair: EncodedPair
    base: KVCache
    donor: KVCache
    old: float
    new: float
    plain: float
    noise: float
    tolerance: float
    reason: str
    path: str
    sweeper: Sweeper
    slots: tuple[int, ...] = field(default=(), kw_only=True)
    making: Making = field(default=PREFILL, kw_only=True)

    @property
    def tail(self) -> list[int]:
        return list(self.pair.old_ids[-self.pair.tail :])

    @property
    def answers(self) -> tuple[int, int]:
        return self.pair.answer_old_id, self.pair.answer_new_id

    def scores(
        self, sites: Sequence[Site], *, donor: KVCache | None = None, base: KVCache | None = None
    ) -> list[float]:
        """`s` for the old cache (or `base`) patched at each site from the new cache (or `donor`)."""
        result = engine.sweep(
            self.model,
            self.base if base is None else base,
            self.donor if donor is None else donor,
            sites,
            self.tail,
            self.answers,
            memory_budget=self.sweeper.memory_budget,
            path=self.sweeper.path,  # type: ignore[arg-type]
            progress=self.sweeper.progress,
        )
        return result.difference.tolist()

    def rows(self, cells: Iterable[Cell]) -> pd.DataFrame:
        """Measure every cell and lay it out tidily: one row per (site, readout)."""
        cells = list(cells)
        scores = self.scores([site for _, site in cells])
        out = []
        for (about, site), score in zip(cells, scores, strict=True):
            row = {**self.names, "part": site.part, "size": len(site.positions), **about}
            out.append({**row, "readout": "logit_diff", "value": score})
            out.append({**row, "readout": "recovery", "value": recovery(score, old=self.old, new=self.new)})
        return pd.DataFrame(out, columns=list(FRAME_COLUMNS))

    @staticmethod
    def at_pair(pair: EncodedPair, position: int) -> dict[str, Any]:
        """What the frame says of one position."""
        return {
            "position": position,
            "token": pair.tokens_old[position],
            "region": pair.regions[position],
            "delimiter": pair.delimiter[position],
            "anchor": pair.anchors[position],
        }

    @property
    def names(self) -> dict[str, Any]:
        return {
            "pair": self.pair.pair.key,
            "content": self.pair.pair.content,
            "family": self.pair.pair.family,
        }


def open_case(
    model: Model, pair: EncodedPair, *, competence: Competence, sweeper: Sweeper, making: Making = PREFILL
) -> Case:
    """Make both caches of a pair and score them, by the same path that will score the patches."""
    pair, slots, base, donor = caches_of(model, pair, making)
    tail, answers = list(pair.old_ids[-pair.tail :]), (pair.answer_old_id, pair.answer_new_id)

    def score(cache: KVCache) -> tuple[float, str]:
        result = engine.sweep(
            model,
            cache,
            cache,
            [Site(())],
            tail,
            answers,
            memory_budget=sweeper.memory_budget,
            path=sweeper.path,  # type: ignore[arg-type]
        )
        return float(result.difference[0]), result.path

    (old, path), (new, _) = score(base), score(donor)
    logits = engine.decide(model, base, tail, answers)[0]
    noise = engine.noise_floor(model, base, tail, answers, alone=logits)
    # The noise floor is a sample and can be 0 by luck, hence a second bound from the dtype. In 16 bits that bound is
    # wide, so it never exceeds a tenth of the effect: a control that cannot fail is none.
    rounding = 32 * torch.finfo(model.dtype).eps * max(1.0, float(logits.abs().max()))
    tolerance = max(8 * noise, min(rounding, 0.1 * abs(new - old)))
    reason = competence.reason(old=old, new=new, noise=noise, control=pair.pair.kind == "control")
    plain = float(logits[1] - logits[0])
    return Case(
        model, pair, base, donor, old, new, plain, noise, tolerance, reason, path, sweeper, slots=slots, making=making
    )


def identity_controls(case: Case) -> pd.DataFrame:
    """Prove that patching is patching: four identities, each measured on this pair. Raises ControlError on failure.

    no_patch: an empty patch, against an independent plain forward on the old cache. self_patch: everything replaced by
    itself. everything: all slots from the donor, against the donor's own decision. before_field: slots that hold the
    same in both prompts.
    """
    n = len(case.base)
    whole, before = Site(tuple(range(n))), Site(tuple(range(case.pair.field[0])))
    untouched, everything, before_field = case.scores([Site(()), whole, before])
    gaps = {
        "no_patch": untouched - case.plain,
        "self_patch": case.scores([whole], donor=case.base)[0] - case.old,
        "everything": everything - case.new,
        "before_field": before_field - case.old,
    }
    for name, gap in gaps.items():
        if not abs(gap) <= case.tolerance:
            raise ControlError(
                f"control {name!r} failed on {case.model.name} ({case.model.dtype}), pair {case.pair.pair.key}: off by "
                f"{abs(gap):.3g} logits, tolerance {case.tolerance:.3g} (noise floor {case.noise:.3g}); "
                f"{_blame(case, name)}"
            )
    rows = [
        {**case.names, "view": "control", "site": name, "readout": readout, "value": value}
        for name, gap in gaps.items()
        for readout, value in (("gap", abs(gap)), ("tolerance", case.tolerance))
    ]
    rows.append({**case.names, "view": "control", "site": "noise_floor", "readout": "gap", "value": case.noise})
    return pd.DataFrame(rows, columns=list(FRAME_COLUMNS))


def _blame(case: Case, name: str) -> str:
    """What may be wrong: the operator, or the layer whose self-patch moves the score most."""
    if name == "before_field" and case.making.operator is not None:
        return (
            f"{case.making.operator} makes other slots before the field of the two prompts, as operators do that "
            "choose by the text what to recompute. Its caches cannot be patched from each other; take another operator."
        )
    n = len(case.base)
    sites = [Site(tuple(range(n)), layers=(layer,)) for layer in range(case.base.n_layers)]
    gaps = [abs(s - case.old) for s in case.scores(sites, donor=case.base)]
    worst = max(range(len(gaps)), key=gaps.__getitem__)
    return (
        f"of single-layer self-patches, layer {worst} is furthest off ({gaps[worst]:.3g}). Nothing measured on this "
        "model can be trusted; run `kvprobe check`."
    )


def controls_of(frame: pd.DataFrame) -> tuple[Control, ...]:
    """The controls of a whole run, from the rows that `identity_controls` left for each pair."""
    rows = frame[frame["view"] == "control"]
    out = []
    for name in rows["site"].drop_duplicates():
        here = rows[rows["site"] == name]
        gaps = here.loc[here["readout"] == "gap", "value"]
        limits = here.loc[here["readout"] == "tolerance", "value"]
        if limits.empty:
            continue
        passed = bool((gaps.to_numpy() <= limits.to_numpy()).all())
        out.append(Control(str(name), passed, float(gaps.max()), float(limits.min()), len(gaps), "largest gap, logits"))
    return tuple(out)


def pair_row(case: Case | None, pair: EncodedPair | SetAside) -> dict[str, Any]:
    """The line of the pairs table for a pair that was run, or one that could not be encoded."""
    if isinstance(pair, SetAside):
        return {"pair": pair.key, "content": pair.content, "competent": False, "reason": pair.reason}
    assert case is not None
    source, pair = pair.pair, case.pair
    documents = {"documents": list(pair.documents)} if any(d >= 0 for d in pair.documents) else {}
    return {
        "pair": source.key,
        "content": source.content,
        "family": source.family,
        "kind": source.kind,
        "split": source.split,
        "competent": not case.reason,
        "reason": case.reason,
        "s_old": case.old,
        "s_new": case.new,
        "noise": case.noise,
        "sweep_path": case.path,
        "length": len(pair.old_ids) - pair.tail + 1,
        "field_start": pair.field[0],
        "field_stop": pair.field[1],
        "answer_old": source.answer_old,
        "answer_new": source.answer_new,
        "tokens": list(pair.tokens_old),
        "tokens_new": list(pair.tokens_new),
        "regions": list(pair.regions),
        "anchors": list(pair.anchors),
        "delimiter": list(pair.delimiter),
        **documents,
    }


def field_of(pair: EncodedPair) -> tuple[int, ...]:
    """Slots of the field."""
    return tuple(range(*pair.field))


def downstream_of(pair: EncodedPair) -> tuple[int, ...]:
    """Slots after the field and before the tail, which is always recomputed."""
    return tuple(range(*pair.downstream))


def check_parts(parts: Sequence[str]) -> tuple[Part, ...]:
    """Validate a choice of parts; "kv" is always measured, since the controls and contrasts are stated on it."""
    bad = [p for p in parts if p not in ("kv", "k", "v")]
    if bad:
        raise InputError(f'parts={tuple(parts)!r}: {bad[0]!r} is none of "kv", "k", "v".')
    return tuple(dict.fromkeys(("kv", *parts)))  # type: ignore[return-value]
