"""Attention knock-out: which keys does the decision token have to see?

Edges (queries x keys x layers x heads) are cut before the softmax, so the attention that is left is renormalised: this
is neither a zero- nor a mean-ablation of what was read. The decision token alone is cut off; the cache stays.

The curve starts from the *field-only* cache, whose field is new and whose notes are old: it decides as the notes say.
Cutting the notes away leaves the field, so recovery rises where notes were what was read. (Notes, arXiv 2606.17107,
"Knock-out and dose-response".) Downstream positions are ranked by the decision token's own attention, mean over layers
and heads, in the unedited pass; beside every cut stands one of as many random positions.

What this does not prove: that the cut positions held a note. A token that gets attention and holds nothing (a sink)
also changes what is left when it is cut; the random sets and the cut of the first positions show by how much.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float
from torch import Tensor

from kvnotes_interp import engine
from kvnotes_interp.cache import KVCache
from kvnotes_interp.engine import Cut
from kvnotes_interp.probes.circuit.attribution import record
from kvnotes_interp.probes.circuit.decide import Row, control_rows, decide, frame, run, scores, stacked, table
from kvnotes_interp.probes.measure import Case, downstream_of, field_of
from kvnotes_interp.sites import Site
from kvnotes_interp.tasks import EncodedPair

SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)
BAND_SHARES = (0.25, 1.0)
BANDS = ("early", "mid", "late")
BASES = ("field_only", "oracle")
SINK = 4  # the first positions of a prompt, which hold much attention and little text

Knock = tuple[dict[str, Any], tuple[Cut, ...]]
"""What the frame says of a cut, and the edges."""


def targets(pair: EncodedPair) -> dict[str, tuple[int, ...]]:
    """The three sets of keys that are cut whole. The sink is the first four positions, those of the field left out."""
    field = field_of(pair)
    sink = tuple(p for p in range(min(SINK, pair.length - 1)) if p not in field)
    return {"field": field, "downstream": downstream_of(pair), "sink": sink}


def bands(n_layers: int) -> dict[str, tuple[int, ...]]:
    """Thirds of the layers, as `np.array_split` cuts them; empty ones are left out."""
    thirds = np.array_split(np.arange(n_layers), 3)
    return {name: tuple(t.tolist()) for name, t in zip(BANDS, thirds, strict=True) if len(t)}


def graded(pair: EncodedPair, ranked: Sequence[int], n_layers: int, *, draws: int, seed: int) -> Iterator[Knock]:
    """The decision token cut off from the top share of `ranked`, in all layers and in thirds, and random controls.

    A share of all positions has no random control: it would be the same set.
    """
    n = len(ranked)
    for share in SHARES:
        k = round(share * n)
        about = {"view": "knockout", "base": "field_only", "site": "top_share", "share": share, "k": k, "size": k}
        layers = {"all": None} | (bands(n_layers) if share in BAND_SHARES else {})
        for band, where in layers.items():
            here = {**about, "band": band}
            yield {**here, "ranking": "attention"}, _cut(tuple(ranked[:k]), where)
            for draw in range(draws if 0 < k < n else 0):
                # One shuffle per draw: larger shares hold the smaller ones, as the ranked sets do.
                order = sorted(ranked)
                random.Random(f"{seed}:{draw}:{pair.pair.key}").shuffle(order)
                yield {**here, "ranking": "random", "draw": draw}, _cut(tuple(order[:k]), where)


def edges(pair: EncodedPair, *, draws: int, seed: int) -> Iterator[Knock]:
    """The decision token cut off from the field, from everything after it, and from the first four positions.

    The random control takes as many of the other positions before the decision; where there are not as many, none.
    """
    for name, keys in targets(pair).items():
        about = {"view": "edge", "site": name, "band": "all", "k": len(keys), "size": len(keys)}
        if not keys:
            continue
        yield {**about, "ranking": "chosen"}, _cut(keys, None)
        others = [p for p in range(pair.length - 1) if p not in keys]
        rng = random.Random(f"{seed}:{name}:{pair.pair.key}")
        for draw in range(draws if len(others) >= len(keys) else 0):
            yield {**about, "ranking": "random", "draw": draw}, _cut(tuple(sorted(rng.sample(others, len(keys)))), None)


def _cut(keys: tuple[int, ...], layers: tuple[int, ...] | None) -> tuple[Cut, ...]:
    return (Cut(keys, layers=layers),) if keys else ()


def bases_of(case: Case) -> dict[str, KVCache]:
    """The caches that edges are cut on: the field alone new, and everything new."""
    return {"field_only": case.base.patched(Site(field_of(case.pair)), case.donor), "oracle": case.donor}


def by_head(pair: EncodedPair, n_layers: int, n_heads: int) -> Iterator[Knock]:
    """One head at a time of the decision token cut off from the field, or from everything after it."""
    for name in ("field", "downstream"):
        keys = targets(pair)[name]
        for layer in range(n_layers if keys else 0):
            for head in range(n_heads):
                about = {"view": "edge_head", "site": name, "layer": layer, "head": head, "size": len(keys)}
                yield about, (Cut(keys, layers=(layer,), heads=(head,)),)


def measure(case: Case, *, draws: int, seed: int, grid: bool) -> pd.DataFrame:
    """All cuts of one pair, the decision token's attention to each target, and the identities that hold the cuts.

    `grid` adds every head alone, on the oracle's cache.
    """
    shape = case.model.shape
    bases = bases_of(case)
    rows = attention(case, tuple(bases.values()))
    seen = dict(zip(bases, rows, strict=True))
    ranked = sorted(downstream_of(case.pair), key=lambda p: (-float(seen["field_only"][p]), p))
    knocks = list(graded(case.pair, ranked, shape.n_layers, draws=draws, seed=seed))
    for base in bases:
        knocks.append(({"view": "edge", "site": "none", "base": base, "k": 0, "size": 0}, ()))
        knocks += [({**about, "base": base}, cut) for about, cut in edges(case.pair, draws=draws, seed=seed)]
    if grid:
        knocks += [({**a, "base": "oracle"}, cut) for a, cut in by_head(case.pair, shape.n_layers, shape.n_heads)]
    found = decide(case, [Row(bases[about["base"]], cuts=cut) for about, cut in knocks])
    cells = [(about, score) for (about, _), score in zip(knocks, found, strict=True)]
    return pd.concat([controls(case, bases["field_only"]), _masses(case, seen), table(case, cells)], ignore_index=True)


def attention(case: Case, caches: Sequence[KVCache]) -> Float[Tensor, "cache key"]:
    """Attention of the decision token to every slot, itself last, mean over layers and heads, per cache."""
    return record(run(case, stacked(caches), want=("patterns",)).patterns)[:, :, :, 0].mean(dim=(0, 2))


def controls(case: Case, cache: KVCache) -> pd.DataFrame:
    """Cutting nothing is the cache as a sweep reads it; cutting every key leaves the decision token alone in the world.

    The second is measured against the same token run at the same position on no cache at all.
    """
    nothing, everything = decide(case, [Row(cache), Row(cache, cuts=_cut(tuple(range(len(cache))), None))])
    read = case.scores([Site(field_of(case.pair))])[0]
    alone = engine.capture(case.model, None, case.tail, positions=[cache.end], slots=(), want=())
    return control_rows(case, {"cut_nothing": nothing - read, "cut_everything": everything - scores(case, alone)[0]})


def _masses(case: Case, seen: Mapping[str, Tensor]) -> pd.DataFrame:
    """Share of the decision token's attention that each target gets; the targets overlap where the prompt is short."""
    rows = []
    for base, weights in seen.items():
        groups = {**targets(case.pair), "itself": (case.pair.length - 1,)}
        for name, keys in groups.items():
            about = {"view": "attention", "site": name, "base": base, "size": len(keys)}
            value = float(weights[list(keys)].sum()) if keys else 0.0
            rows.append({**case.names, **about, "readout": "mass", "value": value})
    return frame(rows)


def count(pair: EncodedPair, n_layers: int, n_heads: int, *, draws: int, grid: bool) -> int:
    """Decisions that `measure` reads for this pair; needs no model."""
    knocks = sum(1 for _ in graded(pair, downstream_of(pair), n_layers, draws=draws, seed=0))
    knocks += sum(1 for _ in by_head(pair, n_layers, n_heads)) if grid else 0
    return knocks + len(BASES) * (1 + sum(1 for _ in edges(pair, draws=draws, seed=0))) + 2
