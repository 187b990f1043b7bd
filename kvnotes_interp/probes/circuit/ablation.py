"""Circuit ablation: which heads write the note and which read it, and is it the note that decides?

Each analysis is one file and says there what it measures and what it does not prove:

- knockout (`knockout.py`): edges from the decision token cut, by rank, by layer, by target, by head;
- read_heads (`read_heads.py`): heads at the decision token, ranked by direct logit attribution, patched and ablated;
- write_heads (`write_heads.py`): heads at the aggregators, ranked by contribution change, path-patched at prefill;
- mlp_share (`write_heads.py`): attention against MLP in what is written at the aggregators;
- scrub, dose (`scrub.py`): notes exchanged between prompts of the same or the opposite conclusion.

Three stages: what a pair tells alone; what needs the other half's ranking of positions and of read heads; what needs
its ranking of write heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd

from kvnotes_interp import attention
from kvnotes_interp.errors import InputError, nearest
from kvnotes_interp.metrics import Competence
from kvnotes_interp.probes.circuit import knockout, ranking, read_heads, scrub, write_heads
from kvnotes_interp.probes.circuit.decide import COLUMNS, table
from kvnotes_interp.probes.circuit.decide import frame as empty_frame
from kvnotes_interp.probes.circuit.report import summarise
from kvnotes_interp.probes.measure import Case, downstream_of, field_of, identity_controls
from kvnotes_interp.probes.patching import ends
from kvnotes_interp.probes.request import pairs_of, request_of, verb
from kvnotes_interp.probes.run import Session
from kvnotes_interp.results import Result
from kvnotes_interp.sites import Site
from kvnotes_interp.tasks import EncodedPair, Pair

if TYPE_CHECKING:
    from pathlib import Path

    from kvnotes_interp.model import Model

ANALYSES = ("knockout", "read_heads", "write_heads", "mlp_share", "scrub", "dose")
_NEED_NOTES = {"write_heads", "mlp_share", "scrub", "dose"}


@dataclass(frozen=True)
class _Plan:
    """The options that decide which cells a pair has."""

    analyses: tuple[str, ...]
    ks: tuple[int, ...]
    notes: int
    draws: int
    donors: int
    ablations: tuple[str, ...]
    seed: int

    @property
    def ranks_positions(self) -> bool:
        """Whether single positions must be measured, to rank them."""
        return bool(_NEED_NOTES & set(self.analyses))


@verb
def circuit_ablation(
    model: Model,
    pairs: Iterable[Pair] | Pair,
    *,
    analyses: Sequence[str] = ANALYSES,
    ks: Sequence[int] = read_heads.KS,
    notes: int = 8,
    draws: int = 5,
    donors: int = 2,
    ablations: Sequence[str] = ("resample",),
    grid_pairs: int = 4,
    seed: int = 0,
    min_gap: float = 0.25,
    min_gap_noise: float = 50.0,
    out: str | Path | None = None,
    resume: bool = False,
    memory_budget: int | None = None,
    path: str = "auto",
    progress: bool = True,
) -> Result:
    """Find the heads that write and read the note, by ranking on one half of the pairs and patching on the other.

    Args:
        pairs: counterfactual pairs; those of two contents or more, or nothing can be ranked on other pairs.
        analyses: any of "knockout", "read_heads", "write_heads", "mlp_share", "scrub", "dose".
        ks: how many heads the cumulative curves patch.
        notes: how many top downstream positions make the note (and the aggregators).
        draws: random sets per size (heads, positions, keys).
        donors: other pairs that lend their note, per arm of the scrubbing.
        ablations: of the read heads in the new run: any of "resample" (the default), "mean", "zero".
        grid_pairs: how many pairs, from the first, get every single head patched and cut; they hold most of the cells.

    Other arguments as in `local_patching`. Returns a Result whose views are `state`, `position`, `knockout`, `edge`,
    `edge_head`, `attention`, `read_head`, `attribution`, `read_curve`, `write_head`, `write_curve`, `write_share`,
    `stream`, `scrub`, `dose` and `control`. Rows of a head carry `layer` and `head`.

    Raises ControlError when an identity fails (it names the layer and the gap), InputError on wrong options.
    """
    plan = _Plan(
        _check("analyses", analyses, ANALYSES),
        tuple(sorted({int(k) for k in ks})),
        notes,
        draws,
        donors,
        _check("ablations", ablations, read_heads.ABLATIONS),
        seed,
    )
    if not plan.ks or plan.ks[0] < 1:
        raise InputError(f"ks={tuple(ks)!r}: give numbers of heads, each at least 1.")
    if notes < 1:
        raise InputError(f"notes={notes!r}: a note has at least one position.")
    pairs = pairs_of("circuit_ablation", pairs)
    attention.require(model.hf)
    competence = Competence(min_gap, min_gap_noise)
    options = {**{name: _plain(value) for name, value in vars(plan).items()}, "grid_pairs": grid_pairs, "path": path}
    grid = {pair.key for pair in pairs[:grid_pairs]}
    shape = model.shape

    with Session(
        model,
        request_of("circuit_ablation", model, pairs, {**options, **vars(competence)}),
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

        def cost(stage: str) -> Callable[[EncodedPair], int]:
            def of(pair: EncodedPair) -> int:
                return planned(pair, shape.n_layers, shape.n_heads, plan=plan, grid=pair.pair.key in grid)[stage]

            return of

        first, tried = session.run(
            "alone", lambda case: _alone(case, plan, grid=case.pair.pair.key in grid), cost=cost("alone")
        )
        competent = set(tried.loc[tried["competent"].astype(bool), "pair"])
        others = [pair for pair in session.encoded if pair.pair.key in competent]
        second = third = first.iloc[:0]
        if set(plan.analyses) - {"knockout"}:
            second, _ = session.run("ranked", lambda case: _ranked(case, plan, first, others), cost=cost("ranked"))
        if "write_heads" in plan.analyses:
            third, _ = session.run("write", lambda case: _write(case, plan, first, second), cost=cost("write"))
        kept = first[first["view"] != "outputs"].drop(columns="z", errors="ignore")
        frame = pd.concat([kept, second, third], ignore_index=True)
        # Where no pair was competent nothing gave the columns of this probe's own.
        frame = frame.reindex(columns=[*frame.columns, *(c for c in COLUMNS if c not in frame)])
        frame, tried = session.settled(frame, tried)
        summary = summarise(frame, tried, model=model.name, seed=seed, ks=plan.ks, analyses=plan.analyses)
        return session.finish(frame, tried, summary)


def _alone(case: Case, plan: _Plan, *, grid: bool) -> pd.DataFrame:
    """What needs no other pair."""
    field, after = field_of(case.pair), downstream_of(case.pair)
    cells = [
        ({"view": "state", "site": "field_only", "size": len(field)}, field),
        ({"view": "state", "site": "downstream_only", "size": len(after)}, after),
        ({"view": "state", "site": "field_and_downstream", "size": len(field + after)}, field + after),
    ]
    if plan.ranks_positions:
        about = {"view": "position", "site": "position", "size": 1}
        cells += [({**about, **Case.at_pair(case.pair, p)}, (p,)) for p in after]
    found = case.scores([Site(where) for _, where in cells])
    scored = [(about, score) for (about, _), score in zip(cells, found, strict=True)]
    out = [identity_controls(case), ends(case), table(case, scored)]
    if "knockout" in plan.analyses:
        out.append(knockout.measure(case, draws=plan.draws, seed=plan.seed, grid=grid))
    if "read_heads" in plan.analyses:
        out.append(read_heads.attribute(case, grid=grid, keep_outputs="mean" in plan.ablations))
    return pd.concat(out, ignore_index=True)


def _ranked(case: Case, plan: _Plan, first: pd.DataFrame, others: Sequence[EncodedPair]) -> pd.DataFrame:
    """What needs the other half's ranking of positions, or of read heads."""
    out = [empty_frame([])]
    if "read_heads" in plan.analyses:
        shares = first[(first["view"] == "read_head") & (first["readout"] == "dla_share")]
        out.append(
            read_heads.curves(
                case,
                shares,
                ks=plan.ks,
                draws=plan.draws,
                seed=plan.seed,
                ablations=plan.ablations,
                outputs=first[first["view"] == "outputs"] if "mean" in plan.ablations else None,
            )
        )
    ranked = _positions(case, first) if plan.ranks_positions else []
    if not ranked:  # one content alone: there is no other half to rank on
        return pd.concat(out, ignore_index=True)
    if {"write_heads", "mlp_share"} & set(plan.analyses):
        runs = write_heads.run_both(case, ranked[: plan.notes])
        if "write_heads" in plan.analyses:
            out.append(write_heads.contributions(case, runs))
        if "mlp_share" in plan.analyses:
            out.append(write_heads.measure_share(case, runs))
    if "scrub" in plan.analyses:
        out.append(
            scrub.measure_scrub(
                case, ranked, others, k=plan.notes, donors=plan.donors, draws=plan.draws, seed=plan.seed
            )
        )
    if "dose" in plan.analyses:
        out.append(scrub.measure_dose(case, ranked, draws=plan.draws, seed=plan.seed))
    return pd.concat(out, ignore_index=True)


def _write(case: Case, plan: _Plan, first: pd.DataFrame, second: pd.DataFrame) -> pd.DataFrame:
    """What needs the other half's ranking of write heads."""
    ranked = _positions(case, first)
    if not ranked:
        return empty_frame([])
    changes = second[(second["view"] == "write_head") & (second["readout"] == "change")]
    return write_heads.measure_curve(
        case, ranked[: plan.notes], changes, ks=plan.ks, draws=min(plan.draws, 2), seed=plan.seed
    )


def _positions(case: Case, first: pd.DataFrame) -> list[int]:
    effects = first[(first["view"] == "position") & (first["readout"] == "recovery")]
    return ranking.rank_positions(effects, case.pair)


def planned_rows(
    pair: EncodedPair,
    n_layers: int,
    n_heads: int,
    *,
    analyses: Sequence[str] = ANALYSES,
    ks: Sequence[int] = read_heads.KS,
    draws: int = 5,
    donors: int = 2,
    ablations: Sequence[str] = ("resample",),
    grid: bool = False,
) -> int:
    """How many decisions one pair takes, `grid` with every single head; needs no model, so a dry run can count them."""
    plan = _Plan(tuple(analyses), tuple(ks), 1, draws, donors, tuple(ablations), 0)
    return sum(planned(pair, n_layers, n_heads, plan=plan, grid=grid).values())


def planned(pair: EncodedPair, n_layers: int, n_heads: int, *, plan: _Plan, grid: bool) -> dict[str, int]:
    """Passes of the decision token (or, for write heads, of the prompt) per stage for this pair; needs no model."""
    n, chosen = len(downstream_of(pair)), set(plan.analyses)
    alone = 3 + (n if plan.ranks_positions else 0)
    if "knockout" in chosen:
        alone += knockout.count(pair, n_layers, n_heads, draws=plan.draws, grid=grid)
    if "read_heads" in chosen:
        alone += 4 + (n_layers * n_heads if grid else 0)
    sets = len(plan.ks) * (2 + plan.draws)
    ranked = sets * (1 + len(plan.ablations)) if "read_heads" in chosen else 0
    scrubbed, dosed = scrub.count(n, donors=plan.donors, draws=plan.draws)
    ranked += (scrubbed if "scrub" in chosen else 0) + (dosed if "dose" in chosen else 0)
    write = 2 + len(plan.ks) * (2 + min(plan.draws, 2)) if "write_heads" in chosen else 0
    return {"alone": alone, "ranked": ranked, "write": write}


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _check(name: str, given: Sequence[str], choices: Sequence[str]) -> tuple[str, ...]:
    given = (given,) if isinstance(given, str) else tuple(given)
    for one in given:
        if one not in choices:
            raise InputError(f"{name} holds {one!r}; choose from {', '.join(choices)}.{nearest(one, choices)}")
    if not given and name == "analyses":
        raise InputError(f"analyses is empty; choose from {', '.join(choices)}.")
    return tuple(c for c in choices if c in given)
