"""Pairs opened through nnsight, so that a probe's cells, controls and summaries are those of this package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvnotes_interp.adapters import parity as checking
from kvnotes_interp.adapters.traces import HeadEdit, Look, Traced
from kvnotes_interp.metrics import Competence
from kvnotes_interp.probes.measure import Case, Sweeper
from kvnotes_interp.probes.request import request_of
from kvnotes_interp.probes.run import Session
from kvnotes_interp.sites import Site
from kvnotes_interp.tasks import EncodedPair, Pair


@dataclass(frozen=True)
class _Prompt:
    """Stands where a Case holds a cache: the prompt that it would be of. Nothing else of a cache is asked for."""

    ids: tuple[int, ...]
    n_layers: int

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class TracedCase(Case):
    """A pair whose decisions are read through nnsight."""

    traced: Traced
    look_old: Look
    look_new: Look

    def scores(self, sites: Sequence[Site], *, donor: Any = None, base: Any = None) -> list[float]:
        base, donor = self.base if base is None else base, self.donor if donor is None else donor
        return self._scores(base, donor, sites, ())

    def edited(self, base: Any, edits: Sequence[HeadEdit | None]) -> list[float]:
        """`s` of the decision token on top of a prompt's cache with head outputs replaced, one edit per row."""
        return self._scores(base, base, [Site(())] * len(edits), edits)

    def _scores(self, base: Any, donor: Any, sites: Sequence[Site], heads: Sequence[HeadEdit | None]) -> list[float]:
        found = self.traced.decide(base.ids, donor.ids, self.tail[0], sites, self.answers, heads=heads)
        if self.sweeper.progress is not None:
            self.sweeper.progress(len(sites))
        return (found[:, 1] - found[:, 0]).tolist()


class TracedSession(Session):
    """A probe's run with pairs opened through nnsight."""

    def __init__(
        self,
        probe: str,
        traced: Traced,
        pairs: Sequence[Pair],
        options: dict[str, Any],
        competence: Competence,
        *,
        out: Any,
        resume: bool,
        progress: bool,
    ) -> None:
        engine_options = {"engine": checking.versions("nnsight"), "remote": traced.remote, "rows": traced.rows}
        request = request_of(probe, traced.model, pairs, {**options, **vars(competence), **engine_options})
        super().__init__(
            traced.model,
            request,
            pairs,
            competence=competence,
            out=out,
            resume=resume,
            memory_budget=None,
            path="nnsight",
            progress=progress,
        )
        self.traced = traced

    def _announce(self, costs: dict[str, int]) -> None:
        """No plan to announce: batches are `rows` caches each."""

    def open_case(self, pair: EncodedPair, sweeper: Sweeper) -> Case:
        return open_traced(self.traced, pair, competence=self.competence, sweeper=sweeper)


def open_traced(traced: Traced, pair: EncodedPair, *, competence: Competence, sweeper: Sweeper) -> TracedCase:
    """Score both prompts of a pair through nnsight; noise and tolerance are found as `probes.measure` finds them."""
    *old, last = pair.old_ids
    *new, _ = pair.new_ids
    answers = (pair.answer_old_id, pair.answer_new_id)
    nothing = Site(())
    alone = traced.decide(old, old, last, [nothing], answers)
    theirs = traced.decide(new, new, last, [nothing], answers)
    wide = Traced(traced.nn, traced.model, remote=traced.remote, rows=7).decide(old, old, last, [nothing] * 7, answers)
    look_old, look_new = (traced.look(ids, answers) for ids in (pair.old_ids, pair.new_ids))
    s_old, s_new, plain = (float(x[1] - x[0]) for x in (alone[0], theirs[0], look_old.logits))
    noise = float((wide - alone).abs().max())
    # A remote model's dtype is that of what it sends back.
    eps = torch.finfo(look_old.heads.dtype).eps
    rounding = 32 * eps * max(1.0, float(alone.abs().max()))
    tolerance = max(8 * noise, min(rounding, 0.1 * abs(s_new - s_old)))
    reason = competence.reason(old=s_old, new=s_new, noise=noise, control=pair.pair.kind == "control")
    n_layers = traced.model.shape.n_layers
    base, donor = (_Prompt(tuple(ids), n_layers) for ids in (old, new))
    return TracedCase(
        model=traced.model,
        pair=pair,
        base=base,  # type: ignore[arg-type]
        donor=donor,  # type: ignore[arg-type]
        old=s_old,
        new=s_new,
        plain=plain,
        noise=noise,
        tolerance=tolerance,
        reason=reason,
        path="nnsight",
        sweeper=sweeper,
        traced=traced,
        look_old=look_old,
        look_new=look_new,
    )
