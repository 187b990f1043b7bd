"""Local patching: is the decision read from the field, or from notes written after it?

Old and new prompt differ only in the field. The old cache is patched from the new one at a site, the decision token is
run again, and recovery says how much of the change in the answer that site carries.
(Notes, arXiv 2606.17107, "Locality".)

What this does not prove: that a site *stores* a conclusion in a readable form (see linear probes), or which heads wrote
it. Field and downstream are patched together only as a control: that is the whole difference between the two prompts,
so it must recover 1.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import pandas as pd

from kvnotes_interp.errors import InputError, nearest
from kvnotes_interp.metrics import Competence
from kvnotes_interp.probes.estimates import Estimates
from kvnotes_interp.probes.making import PREFILL, Making
from kvnotes_interp.probes.measure import (
    Case,
    Cell,
    check_parts,
    downstream_of,
    field_of,
    identity_controls,
)
from kvnotes_interp.probes.request import pairs_of, request_of, verb
from kvnotes_interp.probes.run import Session
from kvnotes_interp.results import Result, Summary
from kvnotes_interp.sites import Part, Site
from kvnotes_interp.tasks import EncodedPair, Pair

if TYPE_CHECKING:
    from pathlib import Path

    from kvnotes_interp.model import Model

VIEWS = ("position", "layer", "layer_position", "region", "random")
STATES = ("field_only", "downstream_only", "field_and_downstream")


@verb
def local_patching(
    model: Model,
    pairs: Iterable[Pair] | Pair,
    *,
    parts: Sequence[Part] = ("kv", "k", "v"),
    views: Sequence[str] = VIEWS,
    draws: int = 8,
    map_pairs: int = 8,
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
    """Patch the field, everything after it, and every position, layer and region between, one at a time.

    Args:
        pairs: counterfactual pairs, as `tasks.load` gives them.
        parts: which of keys and values to patch, together ("kv", always measured) and apart ("k", "v").
        views: beside the four cache states: "position", "layer", "layer_position", "region", "random".
        draws: random sites of the field's size per pair (the random-site control).
        map_pairs: how many pairs, from the first, get the layer x position map; it holds most of the cells.
        operator, blocks, tail: make both caches by an operator instead of one prefill, where to cut for it, and what
            is run on top; see `probes.making.Making`. `position` then counts slots of the cache.
        seed: of the random sites and of the bootstrap.
        min_gap, min_gap_noise: see `metrics.Competence`.
        out: run folder; with `resume` a killed run goes on where it stopped.
        memory_budget: bytes for the rows in flight; a quarter of what is free by default.
        path: "auto", "shared" or "plain", see `engine.sweep`.

    Returns a Result whose summary holds `field_only`, `downstream_only`, `field_and_downstream`, `interaction`,
    `random_site` and, per part, their split, with 95 % intervals from a bootstrap over contents; with an operator also
    `region_<name>`, what each region recovers alone.

    Raises ControlError when an identity control fails, InputError on wrong options.
    """
    parts, views = check_parts(parts), _check_views(views)
    pairs = pairs_of("local_patching", pairs)
    competence, making = Competence(min_gap, min_gap_noise), Making(operator, blocks, tail)
    options = {
        "parts": list(parts),
        "views": list(views),
        "draws": draws,
        "map_pairs": map_pairs,
        "seed": seed,
        "path": path,
        **making.request,
    }

    mapped = {pair.key for pair in pairs[:map_pairs]}

    def cells(pair: EncodedPair) -> list[Cell]:
        chosen = views if pair.pair.key in mapped else tuple(v for v in views if v != "layer_position")
        return list(cells_of(pair, model.shape.n_layers, parts=parts, views=chosen, draws=draws, seed=seed))

    def measure(case: Case) -> pd.DataFrame:
        return pd.concat([identity_controls(case), ends(case), case.rows(cells(case.pair))], ignore_index=True)

    with Session(
        model,
        request_of("local_patching", model, pairs, {**options, **vars(competence)}),
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
        frame, tried = session.run("cells", measure, cost=lambda pair: len(cells(pair)))
        return session.finish(
            frame,
            tried,
            summarise(frame, tried, model=model.name, seed=seed, n_layers=model.shape.n_layers, making=making),
        )


def cells_of(
    pair: EncodedPair,
    n_layers: int,
    *,
    parts: Sequence[Part] = ("kv", "k", "v"),
    views: Sequence[str] = VIEWS,
    draws: int = 8,
    seed: int = 0,
) -> Iterable[Cell]:
    """Every site patched for this pair, with its description; needs no model, so a dry run can count them."""
    field, downstream = field_of(pair), downstream_of(pair)
    every = field + downstream
    at = {p: Case.at_pair(pair, p) for p in every}
    for part in check_parts(parts):
        for name, where in zip(STATES, (field, downstream, every), strict=True):
            yield {"view": "state", "site": name}, Site(where, part=part)
        if "position" in views:
            for p in every:
                yield {"view": "position", "site": "position", **at[p]}, Site((p,), part=part)
    if "layer" in views:
        for layer in range(n_layers):
            for name, where in (("field", field), ("downstream", downstream)):
                yield {"view": "layer", "site": name, "layer": layer}, Site(where, layers=(layer,))
    if "layer_position" in views:
        for layer in range(n_layers):
            for p in every:
                about = {"view": "layer_position", "site": "cell", "layer": layer, **at[p]}
                yield about, Site((p,), layers=(layer,))
    if "region" in views:
        for region in dict.fromkeys(pair.regions[p] for p in every):
            where = tuple(p for p in every if pair.regions[p] == region)
            yield {"view": "region", "site": region, "region": region}, Site(where)
    if "random" in views:
        # Equal size, drawn from the positions after the field; string seeds are stable across processes.
        rng = random.Random(f"{seed}:{pair.pair.key}")
        for draw in range(draws):
            where = tuple(rng.sample(downstream, min(len(field), len(downstream))))
            yield {"view": "random", "site": "random_site", "draw": draw}, Site(where)


def ends(case: Case) -> pd.DataFrame:
    """The two ends of the scale, stale and oracle, as rows like the others."""
    rows = [
        {
            "view": "state",
            "site": site,
            "part": "kv",
            "size": 0,
            "readout": readout,
            "value": value,
            **case.names,
        }
        for site, score, share in (("stale", case.old, 0.0), ("oracle", case.new, 1.0))
        for readout, value in (("logit_diff", score), ("recovery", share))
    ]
    return pd.DataFrame(rows)


def summarise(
    frame: pd.DataFrame,
    tried: pd.DataFrame,
    *,
    model: str,
    seed: int,
    n_layers: int,
    making: Making = PREFILL,
) -> Summary:
    """Means over competent pairs with intervals from a bootstrap over contents."""
    good = frame[frame["readout"] == "recovery"]
    found = Estimates(seed=seed)
    add = found.add
    state = good[good["view"] == "state"]
    for part in dict.fromkeys(state["part"]):
        here = state[state["part"] == part]
        suffix = "" if part == "kv" else f"_{part}"
        for site in STATES:
            note = "control: must be 1" if site == "field_and_downstream" and part == "kv" else ""
            add(f"{site}{suffix}", here[here["site"] == site], note)
        add(f"interaction{suffix}", _interaction(here), "joint - field - downstream")
    draws = good[good["view"] == "random"]
    add(
        "random_site",
        draws.groupby(["pair", "content"], as_index=False)[["value"]].mean(),
        "as many tokens as the field",
    )
    if making.operator is not None:
        for region, rows in good[good["view"] == "region"].groupby("site", sort=False):
            add(f"region_{region}", rows, "patched alone")
    for name, values in _enrichment(good).items():
        add(name, values, "share of recovery / share of positions")
    depth = _depth(good, n_layers)
    add("note_depth", depth, "mean layer of downstream recovery, 0 to 1")
    found.require(*STATES, "interaction")
    return found.summary(f"local patching on {model}{making.words}", frame, tried)


def _interaction(state: pd.DataFrame) -> pd.DataFrame:
    wide = state.pivot_table(index=["pair", "content"], columns="site", values="value", aggfunc="first")
    if not set(STATES) <= set(wide.columns):
        return pd.DataFrame()
    wide["value"] = wide["field_and_downstream"] - wide["field_only"] - wide["downstream_only"]
    return wide.reset_index()[["pair", "content", "value"]]


def _enrichment(good: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Per pair and region: its share of the positive single-position recovery over its share of positions.

    1 is what positions picked blindly would carry. The decision prompt and the chat template's tail are groups of their
    own, so that punctuation is not credited with what the last tokens do.
    """
    here = good[(good["view"] == "position") & (good["part"] == "kv")]
    if here.empty:
        return {}
    here = here.assign(gain=here["value"].clip(lower=0.0), one=1.0)
    total = here.groupby("pair")[["gain", "one"]].transform("sum")
    here = here[total["gain"] > 0].assign(gain=here["gain"] / total["gain"], one=here["one"] / total["one"])
    grouped = here.groupby(["region", "pair", "content"], as_index=False)[["gain", "one"]].sum()
    grouped["value"] = grouped["gain"] / grouped["one"]
    return {f"enrichment_{region}": rows for region, rows in grouped.groupby("region")}


def _depth(good: pd.DataFrame, n_layers: int) -> pd.DataFrame:
    """Per pair: the centre of mass, over layers, of what patching all downstream slots of one layer recovers."""
    here = good[(good["view"] == "layer") & (good["site"] == "downstream")]
    if here.empty or n_layers < 2:
        return pd.DataFrame()
    gain = here["value"].clip(lower=0.0)
    here = here.assign(gain=gain, moment=gain * here["layer"].astype(float) / (n_layers - 1))
    sums = here.groupby(["pair", "content"], as_index=False)[["gain", "moment"]].sum()
    sums = sums[sums["gain"] > 0]
    return sums.assign(value=sums["moment"] / sums["gain"])


def _check_views(views: Sequence[str]) -> tuple[str, ...]:
    for view in views:
        if view not in VIEWS:
            raise InputError(f"views holds {view!r}; choose from {', '.join(VIEWS)}.{nearest(view, VIEWS)}")
    return tuple(dict.fromkeys(views))
