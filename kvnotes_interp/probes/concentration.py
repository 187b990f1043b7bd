"""Suffix concentration: how few positions after the field carry the decision?

Downstream positions are ranked by their own recovery and patched cumulatively. A ranking that has seen the pair it is
scored on is an upper bound, so the curve that counts is ranked on *other* pairs of the family (other contents), or by
the old run's own attention, and stands beside random sets of the same size. (Notes, arXiv 2606.17107, "Suffix
concentration"; PAPERS: ranking and scoring on one pair is a fault of the released code.)

What this does not prove: that the top positions are *needed*; other sets may carry the same decision.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from kvnotes_interp import attention, engine
from kvnotes_interp.metrics import Competence
from kvnotes_interp.probes.estimates import Estimates
from kvnotes_interp.probes.making import PREFILL, Making
from kvnotes_interp.probes.measure import Case, Cell, downstream_of, identity_controls
from kvnotes_interp.probes.request import pairs_of, request_of, verb
from kvnotes_interp.probes.run import Session
from kvnotes_interp.results import Result, Summary
from kvnotes_interp.sites import Site
from kvnotes_interp.tasks import EncodedPair, Pair

if TYPE_CHECKING:
    from pathlib import Path

    from kvnotes_interp.model import Model

RANKINGS = ("other_pairs", "attention", "same_pair", "bottom", "random")
WINDOWS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0)
THIRDS = ("early", "mid", "late")


@verb
def suffix_concentration(
    model: Model,
    pairs: Iterable[Pair] | Pair,
    *,
    draws: int = 5,
    operator: str | None = None,
    blocks: str = "sentences",
    tail: str = "last",
    seed: int = 0,
    min_gap: float = 0.25,
    min_gap_noise: float = 50.0,
    out: str | Path | None = None,
    resume: bool = False,
    memory_budget: int | None = None,
    path: str = "auto",
    progress: bool = True,
) -> Result:
    """Patch the top k downstream positions under several rankings, windows that grow from either end, and layer thirds.

    Rankings: "other_pairs" (mean recovery at the same place of the template, over pairs of other contents),
    "attention" (the old run's attention from the decision token, no new run needed), "same_pair" (this pair's own
    effects: an upper bound), "bottom" (other_pairs from the other end), "random" (`draws` sets per k).

    Other arguments as in `local_patching`. The summary gives recovery at k = 8, and the k that reaches
    50 % and 90 % of what all downstream positions carry together.
    """
    pairs = pairs_of("suffix_concentration", pairs)
    attention.require(model.hf)
    competence, making = Competence(min_gap, min_gap_noise), Making(operator, blocks, tail)
    options = {"draws": draws, "seed": seed, "path": path, **making.request}

    def alone(case: Case) -> pd.DataFrame:
        cells = [*individual(case.pair), *windows(case.pair), *thirds(case.pair, model.shape.n_layers)]
        return pd.concat([identity_controls(case), case.rows(cells)], ignore_index=True)

    with Session(
        model,
        request_of("suffix_concentration", model, pairs, {**options, **vars(competence)}),
        pairs,
        competence=competence,
        out=out,
        resume=resume,
        memory_budget=memory_budget,
        path=path,
        progress=progress,
        making=making,
    ) as session:
        if session.folder.complete:
            return session.folder.result()
        first, tried = session.run(
            "alone", alone, cost=lambda pair: len(downstream_of(pair)) + 2 * len(WINDOWS) + len(THIRDS)
        )
        effects = first[(first["view"] == "position") & (first["readout"] == "recovery")]

        def cumulative(case: Case) -> pd.DataFrame:
            return case.rows(cumulative_cells(case.pair, rankings_of(case, effects), draws=draws, seed=seed))

        second, _ = session.run(
            "cumulative",
            cumulative,
            cost=lambda pair: len(grid(len(downstream_of(pair)))) * (len(RANKINGS) - 1 + draws),
        )
        frame, tried = session.settled(pd.concat([first, second], ignore_index=True), tried)
        return session.finish(frame, tried, summarise(frame, tried, model=model.name, seed=seed, making=making))


def individual(pair: EncodedPair) -> Iterable[Cell]:
    """Each downstream position alone, all layers."""
    for p in downstream_of(pair):
        yield {"view": "position", "site": "position", **Case.at_pair(pair, p)}, Site((p,))


def windows(pair: EncodedPair) -> Iterable[Cell]:
    """Nested windows: the last, or the first, x % of the downstream positions."""
    where = downstream_of(pair)
    for share in WINDOWS if where else ():
        k = max(1, round(share * len(where)))
        for side, part in (("from_end", where[-k:]), ("from_field", where[:k])):
            yield {"view": "window", "site": f"{side}:{share:.0%}", "k": k}, Site(part)


def thirds(pair: EncodedPair, n_layers: int) -> Iterable[Cell]:
    """All downstream positions, in the early, middle or late third of the layers only."""
    for name, layers in zip(THIRDS, np.array_split(np.arange(n_layers), 3), strict=True):
        if len(layers):
            yield {"view": "thirds", "site": name}, Site(downstream_of(pair), layers=tuple(layers.tolist()))


def grid(n: int) -> list[int]:
    """The k at which curves are measured: every k up to 12, then steps of about a fifth, and n itself."""
    out = list(range(1, min(n, 12) + 1))
    while out and out[-1] < n:
        out.append(min(n, max(out[-1] + 1, round(out[-1] * 1.2))))
    return out


def rankings_of(case: Case, effects: pd.DataFrame) -> dict[str, list[int]]:
    """Downstream positions of this pair, best first, under every ranking but the random one."""
    pair = case.pair
    where = downstream_of(pair)
    own = effects[effects["pair"] == pair.pair.key].set_index("position")["value"]
    others = effects[effects["content"] != pair.pair.content].groupby("anchor")["value"].mean()
    attention = engine.attention_rows(case.model, case.base, case.tail).mean(dim=(0, 1))[-1]

    def best(score: Mapping[int, float]) -> list[int]:
        # Ties and unseen places go by position, so that a ranking is the same on every machine.
        return sorted(where, key=lambda p: (-score[p], p))

    by_others = {p: float(others.get(pair.anchors[p], -np.inf)) for p in where}
    top = best(by_others)
    known = [p for p in top if by_others[p] > -np.inf]
    rankings = {
        "attention": best({p: float(attention[p]) for p in where}),
        "same_pair": best({p: float(own[p]) for p in where}),
    }
    if known:  # else no pair of another content could be measured, and there is nothing to rank by
        rankings["other_pairs"] = top
        rankings["bottom"] = [*reversed(known), *(p for p in top if p not in set(known))]
    return rankings


def cumulative_cells(
    pair: EncodedPair, rankings: Mapping[str, Sequence[int]], *, draws: int, seed: int
) -> Iterable[Cell]:
    """Top k of every ranking, and `draws` random sets per k."""
    where = downstream_of(pair)
    ks = grid(len(where))
    for ranking, order in rankings.items():
        for k in ks:
            yield {"view": "cumulative", "site": "top_k", "ranking": ranking, "k": k}, Site(tuple(order[:k]))
    for draw in range(draws):
        # One shuffle per draw: its prefixes are nested, as the ranked sets are.
        order = list(where)
        random.Random(f"{seed}:{draw}:{pair.pair.key}").shuffle(order)
        for k in ks:
            about = {"view": "cumulative", "site": "top_k", "ranking": "random", "k": k, "draw": draw}
            yield about, Site(tuple(order[:k]))


def all_cells(pair: EncodedPair, n_layers: int, *, draws: int = 5, seed: int = 0) -> Iterable[Cell]:
    """Every cell of both stages, with positions in place of the rankings: for counting before a run."""
    yield from individual(pair)
    yield from windows(pair)
    yield from thirds(pair, n_layers)
    yield from cumulative_cells(pair, {r: downstream_of(pair) for r in RANKINGS[:-1]}, draws=draws, seed=seed)


def summarise(frame: pd.DataFrame, tried: pd.DataFrame, *, model: str, seed: int, making: Making = PREFILL) -> Summary:
    """Recovery at k = 8, k for 50 % and 90 %, windows and thirds, with intervals over contents."""
    good = frame[frame["readout"] == "recovery"]
    curves = (
        good[good["view"] == "cumulative"].groupby(["ranking", "pair", "content", "k"], as_index=False)["value"].mean()
    )
    found = Estimates(seed=seed)
    add = found.add
    notes = {"same_pair": "upper bound: ranked on itself", "random": "matched size"}
    for ranking in RANKINGS:
        here = curves[curves["ranking"] == ranking]
        add(f"top8_{ranking}", _at(here, 8), notes.get(ranking, ""))
    for ranking in ("other_pairs", "attention", "same_pair", "random"):
        here = curves[curves["ranking"] == ranking]
        for share in (0.5, 0.9):
            add(f"k{share:.0%}_{ranking}".replace("%", ""), _first_k(here, share), "of what all downstream carry")
    for site in ("from_end:10%", "from_field:10%"):
        add(site.replace(":", "_").replace("%", ""), good[(good["view"] == "window") & (good["site"] == site)])
    for site in THIRDS:
        here = good[(good["view"] == "thirds") & (good["site"] == site)]
        add(f"layers_{site}", here, "all downstream, this third of the layers")
    found.require("top8_other_pairs", "top8_random")
    return found.summary(f"suffix concentration on {model}{making.words}", frame, tried)


def _at(curve: pd.DataFrame, k: int) -> pd.DataFrame:
    """Each pair's recovery at k, or at its last k where the prompt has fewer positions."""
    capped = curve[curve["k"] <= k]
    return capped.loc[capped.groupby("pair")["k"].idxmax()] if not capped.empty else capped


def _first_k(curve: pd.DataFrame, share: float) -> pd.DataFrame:
    """Each pair's smallest measured k that recovers `share` of what all its downstream positions recover together.

    Against the whole of the effect instead, pairs whose field carries a part of it would never get there, and a mean
    over those that do would flatter. Pairs whose downstream positions carry less than a tenth are left out (`n` shows
    how many are left): a share of next to nothing is reached anywhere.
    """
    if curve.empty:
        return curve
    whole = curve.loc[curve.groupby("pair")["k"].idxmax()].set_index("pair")["value"]
    whole = whole[whole >= 0.1]
    curve = curve[curve["pair"].isin(whole.index)]
    if curve.empty:
        return curve
    reached = curve[curve["value"] >= share * curve["pair"].map(whole)]
    first = reached.loc[reached.groupby("pair")["k"].idxmin()]
    return first.assign(value=first["k"].astype(float))
