"""Dissociation: the field stays, one token of the rule changes, and the conclusion with it.

A family for this probe has its `{field}` in the *rule*: what changes between the two prompts is the rule's trigger, and
the record that the rule is applied to is the same, letter by letter. If the conclusion is computed when it is asked
for, the trigger must carry it; if it was noted, what stands after it does. Beside the trigger alone (`trigger_only`)
and everything after it (`all_notes`) stand the top k positions, ranked on the other half of the pairs (`top_notes`),
and random positions of either size. Trigger and notes together are all that differs, and must give 1: a control.
(Notes, arXiv 2606.17107, "dissociation".)

What this does not prove: which token of what follows holds the note.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from kvnotes_interp import attention
from kvnotes_interp.metrics import Competence
from kvnotes_interp.probes.circuit.decide import Scored, table
from kvnotes_interp.probes.circuit.ranking import random_positions, rank_positions
from kvnotes_interp.probes.estimates import Estimates
from kvnotes_interp.probes.measure import Case, downstream_of, field_of, identity_controls
from kvnotes_interp.probes.request import pairs_of, request_of, verb
from kvnotes_interp.probes.run import Session
from kvnotes_interp.results import Result, Summary
from kvnotes_interp.sites import Site
from kvnotes_interp.tasks import Pair

if TYPE_CHECKING:
    from pathlib import Path

    from kvnotes_interp.model import Model

ARMS = ("trigger_only", "all_notes", "trigger_and_notes")


@verb
def dissociation(
    model: Model,
    pairs: Iterable[Pair] | Pair,
    *,
    notes: int = 8,
    draws: int = 5,
    seed: int = 0,
    min_gap: float = 0.25,
    min_gap_noise: float = 50.0,
    out: str | Path | None = None,
    resume: bool = False,
    memory_budget: int | None = None,
    path: str = "auto",
    progress: bool = True,
) -> Result:
    """Patch the changed rule token, or what was written after it.

    Args:
        pairs: of a family whose `{field}` is the rule's trigger, such as `tasks.trigger(n=32)`.
        notes: how many top downstream positions make `top_notes`.
        draws: random sets per pair and size.

    Other arguments as in `local_patching`. The summary holds `trigger_only`, `all_notes`, `top_notes`, and for each a
    random set of its size. Raises ControlError when an identity control fails.
    """
    pairs = pairs_of("dissociation", pairs)
    attention.require(model.hf)
    competence = Competence(min_gap, min_gap_noise)
    options = {"notes": notes, "draws": draws, "seed": seed, "path": path}

    def arms(case: Case) -> pd.DataFrame:
        trigger, after = field_of(case.pair), downstream_of(case.pair)
        sites = [Site(trigger), Site(after), Site(trigger + after)]
        cells: list[dict[str, Any]] = [
            {"view": "dissociation", "site": name, "size": len(s.positions)}
            for name, s in zip(ARMS, sites, strict=True)
        ]
        for draw in range(draws):
            where = random_positions(after, key=f"{seed}:trigger:{draw}:{case.pair.pair.key}")[: len(trigger)]
            cells.append({"view": "dissociation", "site": "random_trigger_size", "draw": draw, "size": len(where)})
            sites.append(Site(tuple(where)))
        cells += [{"view": "position", "site": "position", **Case.at_pair(case.pair, p), "size": 1} for p in after]
        sites += [Site((p,)) for p in after]
        return pd.concat([identity_controls(case), _scored(case, cells, sites)], ignore_index=True)

    with Session(
        model,
        request_of("dissociation", model, pairs, {**options, **vars(competence)}),
        pairs,
        competence=competence,
        out=out,
        resume=resume,
        memory_budget=memory_budget,
        path=path,
        progress=progress,
    ) as session:
        if session.folder.complete:
            return session.folder.result()
        first, tried = session.run("arms", arms, cost=lambda p: 3 + draws + len(downstream_of(p)))
        effects = first[(first["view"] == "position") & (first["readout"] == "recovery")]

        def top(case: Case) -> pd.DataFrame:
            ranked, after = rank_positions(effects, case.pair), downstream_of(case.pair)
            sets = [("top_notes", 0, ranked[:notes])] if ranked else []
            for draw in range(draws):
                order = random_positions(after, key=f"{seed}:top:{draw}:{case.pair.pair.key}")
                sets.append(("random_notes", draw, order[:notes]))
            cells = [{"view": "dissociation", "site": s, "draw": d, "size": len(w)} for s, d, w in sets]
            return _scored(case, cells, [Site(tuple(w)) for _, _, w in sets])

        second, _ = session.run("top", top, cost=lambda _: 1 + draws)
        frame, tried = session.settled(pd.concat([first, second], ignore_index=True), tried)
        return session.finish(frame, tried, summarise(frame, tried, model=model.name, seed=seed))


def _scored(case: Case, cells: Sequence[dict[str, Any]], sites: Sequence[Site]) -> pd.DataFrame:
    scored: list[Scored] = list(zip(cells, case.scores(sites), strict=True))
    return table(case, scored)


def summarise(frame: pd.DataFrame, tried: pd.DataFrame, *, model: str, seed: int) -> Summary:
    """Means over competent pairs, draws averaged first, with intervals over contents."""
    found = Estimates(seed=seed)
    good = frame[(frame["view"] == "dissociation") & (frame["readout"] == "recovery")]
    mean = good.groupby(["site", "pair", "content"], as_index=False)["value"].mean()
    sites = {
        "trigger_only": "the changed rule token",
        "random_trigger_size": "as many random tokens after it",
        "all_notes": "everything after it",
        "top_notes": "top positions, ranked on the other half",
        "random_notes": "as many random positions",
        "trigger_and_notes": "control: must be 1",
    }
    for site, note in sites.items():
        found.add(site, mean[mean["site"] == site], note)
    found.require(*sites)
    return found.summary(f"dissociation on {model}", frame, tried)
