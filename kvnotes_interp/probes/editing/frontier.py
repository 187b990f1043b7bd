"""The editing frontier: what each edit of the cache costs, and what it does to the decision.

The old prompt's cache is at hand and the field has changed. Every edit makes a cache, the decision token is run on it,
and the outcome is held against the oracle's, a prefill of the new prompt: recovery, the right answer of the two, KL and
cosine of the whole next-token row, the same first token, tokens and layer-tokens run, arithmetic, and wall time up to
the first logit. (Notes, arXiv 2606.17107, editing.)

What this does not prove: that a cheap edit that decides rightly has made the *cache* consistent; it answers for this
one decision. Wall times are those of this run on this machine, with whatever else ran there; compare layer-tokens.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from torch import Tensor

from kvnotes_interp import attention, engine, metrics
from kvnotes_interp.errors import ControlError, InputError
from kvnotes_interp.metrics import Competence
from kvnotes_interp.operators import edits as library
from kvnotes_interp.operators.made import Made
from kvnotes_interp.probes.editing.horizon import horizon_rows
from kvnotes_interp.probes.editing.thought import thought_rows
from kvnotes_interp.probes.estimates import Estimates
from kvnotes_interp.probes.measure import Case, identity_controls
from kvnotes_interp.probes.request import pairs_of, request_of, verb
from kvnotes_interp.probes.run import Session
from kvnotes_interp.results import Result, Summary
from kvnotes_interp.tasks import EncodedPair, Pair

if TYPE_CHECKING:
    from pathlib import Path

    from kvnotes_interp.model import Model

PROFILED = "profiled"
"""The ranking by causal effect found with another pair's value (see `edits.profiled_on`)."""
RANKINGS = (*library.RANKINGS, PROFILED)
PLAIN = ("stale", "field_only", "full_downstream", "oracle", "hoist", "erratum", "field_erratum")
CONTROLS = tuple(name for name, edit in library.EDITS.items() if edit.control)


@dataclass(frozen=True)
class Arm:
    """One edit with its options, as a row of the table."""

    edit: str
    option: str = ""
    ranking: str = ""
    k: int | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """How the summary calls it: `recompute_top_8_attention`, `cacheblend_0.15`."""
        base = self.edit if self.k is None else self.edit.replace("_k", f"_{self.k}")
        return "_".join(part for part in (base, self.ranking, self.option) if part)


def arms_of(
    *, ks: Sequence[int], rankings: Sequence[str], wordings: Sequence[str], shares: Sequence[float]
) -> list[Arm]:
    """Every edit that is run, in the order of the table. The first wording is the default one and has no suffix."""
    arms = [Arm(name) for name in PLAIN[:5]]
    for place, wording in enumerate(wordings):
        option = "" if place == 0 else wording
        arms += [Arm(name, option, options={"wording": wording}) for name in ("erratum", "field_erratum")]
    arms += [Arm(name) for name in CONTROLS]
    arms += [Arm("cacheblend", f"{share:g}", options={"share": share}) for share in shares]
    for ranking in rankings:
        arms += [Arm("recompute_top_k", ranking=ranking, k=k) for k in ks]
    arms += [Arm("patch_top_k", ranking="causal", k=k) for k in ks if "causal" in rankings]
    return arms


@verb
def edit_frontier(
    model: Model,
    pairs: Iterable[Pair] | Pair,
    *,
    ks: Sequence[int] = (1, 2, 4, 8, 16),
    rankings: Sequence[str] = ("attention", "causal", "kv_change", PROFILED, "random"),
    wordings: Sequence[str] = ("override", "bare", "tagged", "aggressive"),
    shares: Sequence[float] = (0.15, 0.5),
    thought_tokens: int = 0,
    temperature: float = 0.0,
    turns: int = 0,
    seed: int = 0,
    min_gap: float = 0.25,
    min_gap_noise: float = 50.0,
    out: str | Path | None = None,
    resume: bool = False,
    memory_budget: int | None = None,
    progress: bool = True,
) -> Result:
    """Run every edit on every competent pair.

    Args:
        ks: how many positions behind the field are recomputed with it, under each ranking.
        rankings: of RANKINGS; those that look at the new run show what a choice could reach, not what it would save.
        wordings: of the erratum; the first is the one of the frontier, the others are compared with it.
        shares: of the prompt, for CacheBlend.
        thought_tokens, temperature: also decide after a chain of thought of up to so many tokens, greedy at
            temperature 0 (see `thought.py`); 0 leaves that out.
        turns: also let the field toggle so many times, with errata alone (see `horizon.py`).
        seed: of random rankings, drawn tokens and the bootstrap.
        out, resume, memory_budget, min_gap, min_gap_noise: as in `local_patching`.

    Raises ControlError when recomputing everything behind the field is not the oracle, InputError on wrong options.
    """
    for ranking in rankings:
        if ranking not in RANKINGS:
            raise InputError(f"rankings holds {ranking!r}; choose from {', '.join(RANKINGS)}.")
    if not wordings:
        raise InputError("wordings is empty: give at least one, such as 'override'.")
    arms = arms_of(ks=ks, rankings=rankings, wordings=wordings, shares=shares)
    pairs = pairs_of("edit_frontier", pairs)
    attention.require(model.hf)
    competence = Competence(min_gap, min_gap_noise)
    options = {
        "ks": list(ks),
        "rankings": list(rankings),
        "wordings": list(wordings),
        "shares": list(shares),
        "thought_tokens": thought_tokens,
        "temperature": temperature,
        "turns": turns,
        "seed": seed,
    }
    with Session(
        model,
        request_of("edit_frontier", model, pairs, {**options, **vars(competence)}),
        pairs,
        competence=competence,
        out=out,
        resume=resume,
        memory_budget=memory_budget,
        path="auto",
        progress=progress,
    ) as session:
        if session.folder.complete:
            return session.folder.result()
        others = session.encoded

        def measure(case: Case) -> pd.DataFrame:
            setting = library.Setting(case.model, case.pair, case.base, case.donor)
            rows = _rows(case, setting, arms, others, seed)
            if thought_tokens:
                rows += thought_rows(
                    case, setting, budget=thought_tokens, wording=wordings[0], temperature=temperature, seed=seed
                )
            if turns:
                rows += horizon_rows(case, setting, turns=turns, wording=wordings[0])
            return pd.concat([identity_controls(case), pd.DataFrame(rows)], ignore_index=True)

        frame, tried = session.run("edits", measure, cost=lambda _: len(arms))
        return session.finish(frame, tried, summarise(frame, tried, arms, model=model.name, seed=seed))


def _rows(
    case: Case, setting: library.Setting, arms: Sequence[Arm], others: Sequence[EncodedPair], seed: int
) -> list[dict[str, Any]]:
    orders = {r: _order(setting, r, others, seed) for r in dict.fromkeys(arm.ranking for arm in arms if arm.ranking)}
    oracle = _decision(case, library.find("oracle")(setting))  # run once beforehand: also warms up what it times
    whole = setting.stop * case.base.n_layers
    out: list[dict[str, Any]] = []
    for arm in arms:
        if arm.ranking and orders[arm.ranking] is None:
            continue  # nothing to rank by: no row, rather than the field alone under this arm's name
        made, row, seconds = _timed(case, setting, arm, orders)
        if arm.edit == "full_downstream":
            _require_equal(case, row, oracle)
        score = float(row[case.answers[1]] - row[case.answers[0]])
        values = {
            "logit_diff": score,
            "recovery": metrics.recovery(score, old=case.old, new=case.new),
            "correct": float(score > 0),
            "agreement": float(metrics.agreement(oracle, row)),
            "kl": float(metrics.kl_divergence(oracle, row)),
            "logit_cosine": float(metrics.logit_cosine(oracle, row)),
            "tokens": float(made.recomputed_tokens),
            "layer_tokens": float(made.layer_tokens),
            "share": made.layer_tokens / whole,
            "flops": made.layer_tokens * flops_per_layer_token(case.model, setting.stop),
            "seconds": seconds,
        }
        about = {"view": "edit", "site": arm.edit, "ranking": arm.ranking, "option": arm.option, "part": "kv"}
        about |= {"arm": arm.name, "k": arm.k, "size": made.recomputed_tokens}
        out += [{**case.names, **about, "readout": name, "value": value} for name, value in values.items()]
        if case.sweeper.progress is not None:
            case.sweeper.progress(1)
    return out


def _order(setting: library.Setting, ranking: str, others: Sequence[EncodedPair], seed: int) -> tuple[int, ...] | None:
    if ranking != PROFILED:
        return library.rank(setting, ranking, seed=seed)
    for other in others:
        mine = setting.pair
        if (
            other.answer_new_id == mine.answer_old_id
            or other.new_ids[slice(*other.field)] == mine.new_ids[slice(*mine.field)]
        ):
            continue
        if other.field[1] - other.field[0] == len(setting.field):
            return library.profiled_on(setting, other)
    return None  # no other pair of this run has a value of this length that asks for another answer


def _timed(
    case: Case, setting: library.Setting, arm: Arm, orders: dict[str, tuple[int, ...] | None]
) -> tuple[Made, Tensor, float]:
    options = dict(arm.options)
    if arm.k is not None:
        options |= {"k": arm.k, "order": orders[arm.ranking]}
    start = time.perf_counter()
    made = library.find(arm.edit)(setting, **options)
    row = _decision(case, made)
    return made, row, time.perf_counter() - start


def _decision(case: Case, made: Made) -> Tensor:
    """Logits of the whole vocabulary after the decision token, on the CPU."""
    return engine.decide(case.model, made.cache, case.tail)[0].cpu()


def _require_equal(case: Case, row: Tensor, oracle: Tensor) -> None:
    gap = float((row - oracle).abs().max())
    limit = max(case.tolerance, 64 * torch.finfo(case.model.dtype).eps * float(oracle.abs().max()))
    if not gap <= limit:
        raise ControlError(
            f"control 'full_downstream = oracle' failed on {case.model.name} ({case.model.dtype}), pair "
            f"{case.pair.pair.key}: off by {gap:.3g} logits, limit {limit:.3g}. A recompute on the mixed cache is not "
            "a prefill on this model; nothing measured by recomputing can be trusted."
        )


def flops_per_layer_token(model: Model, context: int) -> float:
    """Floating-point operations of one token in one layer: projections, MLP, and attention over `context` keys."""
    shape = model.shape
    projections = shape.d_model * shape.d_head * (2 * shape.n_heads + 2 * shape.n_kv_heads)
    return 2.0 * (projections + 3 * shape.d_model * shape.d_mlp + 2 * shape.n_heads * shape.d_head * context)


def summarise(frame: pd.DataFrame, tried: pd.DataFrame, arms: Sequence[Arm], *, model: str, seed: int) -> Summary:
    """One row per edit: recovery with its interval, and in words how often it is right and what it runs."""
    found = Estimates(seed=seed)
    rows = frame[frame["view"] == "edit"]
    for arm in arms:
        here = rows[rows["arm"] == arm.name] if len(rows) else rows
        wide = {name: here.loc[here["readout"] == name, "value"].mean() for name in ("correct", "share", "kl")}
        note = f"right {wide['correct']:.2f}, runs {wide['share']:.0%}, KL {wide['kl']:.2g}"
        if library.find(arm.edit).control:
            note = f"control: should be 0; {note}"
        if arm.edit == "full_downstream":
            note = f"control: must be 1; {note}"
        found.add(arm.name, here[here["readout"] == "recovery"], note)
    found.require("stale", "field_only", "oracle", "erratum")
    thought = frame[frame["view"] == "thought"]
    for name in dict.fromkeys(thought["site"]):
        here = thought[thought["site"] == name]
        wide = {r: here.loc[here["readout"] == r, "value"].mean() for r in ("correct", "thought_tokens")}
        note = f"right {wide['correct']:.2f}, {wide['thought_tokens']:.0f} tokens written"
        found.add(f"{name}_thought", here[here["readout"] == "recovery"], note)
    horizon = frame[(frame["view"] == "horizon") & (frame["readout"] == "correct")]
    if len(horizon):
        half = int(horizon["k"].max()) // 2
        for name, here in (("first", horizon[horizon["k"] <= half]), ("second", horizon[horizon["k"] > half])):
            if len(here):
                mean = here.groupby(["pair", "content"], as_index=False)[["value"]].mean()
                found.add(f"horizon_{name}_half", mean, "share of turns decided rightly, errata alone")
    return found.summary(f"editing frontier on {model}", frame, tried)
