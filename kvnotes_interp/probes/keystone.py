"""The keystone: does an edit inside a spliced skill do what it does inside a recomputed one?

The part of a pair's prompt that holds the field is the skill. It stands behind a prefix in two ways: prefilled with it
("recomputed"), and compiled alone and spliced ("spliced"). In each of the two worlds the field, and the k positions
behind it that the old run attends to most, are patched from the same world's new run, and the decision text is run on
top. The recoveries of both worlds stand side by side, each measured between its own stale cache and its own oracle.
(Notes, arXiv 2606.17107, "edit inside a spliced skill".)

What this does not prove: that the two worlds decide alike; recovery is relative to each. `same_decision` says that.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from kvnotes_interp import attention, engine
from kvnotes_interp.cache import KVCache
from kvnotes_interp.errors import ControlError, InputError
from kvnotes_interp.metrics import Competence, recovery
from kvnotes_interp.operators.blocks import cut_pair
from kvnotes_interp.operators.splice import SeamRepair, attach
from kvnotes_interp.probes.estimates import Estimates
from kvnotes_interp.probes.request import TOO_LONG, machine_of, pairs_of, request_of, verb, with_items
from kvnotes_interp.probes.run import run_items
from kvnotes_interp.results import Result, Run, Summary
from kvnotes_interp.sites import Site
from kvnotes_interp.tasks import EncodedPair, Pair, encode_all

if TYPE_CHECKING:
    from kvnotes_interp.model import Model

BEFORE = "This is one of several short texts.\n"
WORLDS = ("recomputed", "spliced")
MERGES = "prefix merges with the prompt"
_APART = 1e-4  # least relative gap of values between the two worlds: else nothing was compared


@dataclass(frozen=True)
class Skill:
    """A pair's prompt as prefix, skill (old and new) and suffix; `field` and `behind` are slots of the whole."""

    pair: EncodedPair
    prefix: tuple[int, ...]
    old: tuple[int, ...]
    new: tuple[int, ...]
    suffix: tuple[int, ...]
    field: tuple[int, ...]
    behind: tuple[int, ...]


@dataclass(frozen=True)
class World:
    """The old and the new cache of prefix and skill, made in one of the two ways, and their scores."""

    old: KVCache
    new: KVCache
    s_old: float
    s_new: float
    noise: float
    tolerance: float
    reason: str


@verb
def edit_in_splice(
    model: Model,
    pairs: Iterable[Pair] | Pair,
    *,
    before: str = BEFORE,
    ks: Sequence[int] = (8, 32),
    draws: int = 3,
    seam_repair: SeamRepair = 0,
    seed: int = 0,
    min_gap: float = 0.25,
    min_gap_noise: float = 50.0,
    out: str | Path | None = None,
    resume: bool = False,
    memory_budget: int | None = None,
    path: str = "auto",
    progress: bool = True,
) -> Result:
    """Patch the field inside a spliced and inside a recomputed skill.

    Args:
        before: put in front of prompts that begin with the field's sentence; others have a prefix of their own.
        ks: how many positions behind the field are patched with it, those of the old run's highest attention, and as
            many random ones, `draws` times. A k beyond the skill's positions is left out.
        seam_repair: first tokens of the spliced skill that are recomputed; "all" makes both worlds the same.
        Other arguments as in `local_patching`. A pair counts if the model changes its answer in both worlds.

    The frame has the view "keystone" and the column `world`; sites "field_only", "behind_only", "field_and_top" and
    "field_and_random". `difference` is spliced minus recomputed.

    Controls, per pair and world: no patch, and everything patched, give the known scores; the two worlds' values differ
    (unless all was repaired).

    Raises:
        InputError: a wrong option. ControlError: a control failed.
    """
    if any(k < 1 for k in ks) or draws < 1:
        raise InputError(f"ks={tuple(ks)}, draws={draws}: numbers of positions and draws start at 1.")
    if model.tokenizer is None:
        raise InputError(f"{model.name} was loaded without a tokenizer; pass kv.load(..., tokenizer=...).")
    pairs = pairs_of("edit_in_splice", pairs)
    attention.require(model.hf)
    competence = Competence(min_gap, min_gap_noise)
    own = {"before": before, "ks": list(ks), "draws": draws, "seam_repair": seam_repair, "seed": seed, "path": path}
    encoded, refused = encode_all(model.tokenizer, pairs)
    skills, aside = _skills(model, encoded, before)
    aside += [{"pair": a.key, "content": a.content, "family": pairs[0].family, "reason": a.reason} for a in refused]
    fit = [skill for skill in skills if len(skill.prefix) + skill.pair.length <= (model.n_positions or math.inf)]
    aside += [
        {"pair": s.pair.pair.key, "content": s.pair.pair.content, "family": s.pair.pair.family, "reason": TOO_LONG}
        for s in skills
        if s not in fit
    ]
    measure = _Measure(model, tuple(ks), draws, seam_repair, seed, competence, memory_budget, path)
    request = request_of("edit_in_splice", model, pairs, {**own, **vars(competence)})
    request = with_items(request, [skill.pair for skill in fit], aside)
    with Run.open(out, request=request, extra={"machine": machine_of(model)}, resume=resume) as run:
        if run.complete:
            return run.result()
        frame, tried = run_items(
            run,
            fit,
            measure,
            key=lambda skill: skill.pair.pair,
            aside=aside,
            description="keystone",
            progress=progress,
        )
        summary = summarise(frame, tried, model=model.name, ks=ks, seed=seed)
        return run.finish(frame=frame, pairs=tried, summary=summary)


def _skills(model: Model, encoded: Iterable[EncodedPair], before: str) -> tuple[list[Skill], list[dict[str, Any]]]:
    """(pairs cut into prefix, skill and suffix; lines of those whose prefix does not fit)."""
    ahead = tuple(int(i) for i in model.tokenizer(before, add_special_tokens=False)["input_ids"]) if before else ()
    out: list[Skill] = []
    aside: list[dict[str, Any]] = []
    for pair in encoded:
        cut = cut_pair(pair)
        lead = sum(anchor.startswith("special:") for anchor in pair.anchors[: len(cut.prefix)])
        start, stop = len(cut.prefix), cut.n_context
        prefix = cut.prefix if start > lead else cut.prefix + ahead
        if start == lead:
            joint = model.tokenizer(before + model.tokenizer.decode(pair.old_ids[lead:]), add_special_tokens=False)
            if [int(i) for i in joint["input_ids"]] != [*ahead, *pair.old_ids[lead:]] or not prefix:
                line = {"pair": pair.pair.key, "content": pair.pair.content, "family": pair.pair.family}
                aside.append({**line, "kind": pair.pair.kind, "split": pair.pair.split, "reason": MERGES})
                continue
        shift = len(prefix) - start
        field = tuple(range(pair.field[0] + shift, pair.field[1] + shift))
        behind = tuple(range(pair.field[1] + shift, stop + shift))
        old, new = pair.old_ids[start:stop], pair.new_ids[start:stop]
        out.append(Skill(pair, prefix, old, new, pair.old_ids[stop:], field, behind))
    return out, aside


@dataclass(frozen=True)
class _Measure:
    """Everything that is measured on one pair."""

    model: Model
    ks: tuple[int, ...]
    draws: int
    seam_repair: SeamRepair
    seed: int
    competence: Competence
    memory_budget: int | None
    path: str

    def __call__(self, skill: Skill) -> tuple[pd.DataFrame, dict[str, Any]]:
        prefix = engine.prefill(self.model, skill.prefix)
        whole = [engine.prefill(self.model, (*skill.prefix, *ids)) for ids in (skill.old, skill.new)]
        joined = [
            attach(self.model, prefix, engine.prefill(self.model, ids), seam_repair=self.seam_repair).cache
            for ids in (skill.old, skill.new)
        ]
        worlds: dict[str, World] = {
            "recomputed": self.world(skill, *whole),
            "spliced": self.world(skill, *joined),
        }
        reason = next((f"{name}: {world.reason}" for name, world in worlds.items() if world.reason), "")
        line = self.line(skill, worlds, reason)
        if reason:
            return pd.DataFrame(), line
        cells = list(self.cells(skill, worlds["recomputed"]))
        rows = self.controls(skill, worlds)
        scores = {name: self.scores(skill, world, [site for _, site in cells]) for name, world in worlds.items()}
        for index, (about, site) in enumerate(cells):
            at = {"view": "keystone", "size": len(site.positions), **about}
            found = {
                name: recovery(scores[name][index], old=world.s_old, new=world.s_new) for name, world in worlds.items()
            }
            rows += [{**at, "world": name, "readout": "recovery", "value": value} for name, value in found.items()]
            same = (scores["spliced"][index] > 0) == (scores["recomputed"][index] > 0)
            rows.append({**at, "readout": "difference", "value": found["spliced"] - found["recomputed"]})
            rows.append({**at, "readout": "same_decision", "value": float(same)})
        pair = skill.pair.pair
        names = {"pair": pair.key, "content": pair.content, "family": pair.family, "part": "kv"}
        return pd.DataFrame([{**names, "world": "", **row} for row in rows]), line

    def world(self, skill: Skill, old: KVCache, new: KVCache) -> World:
        """Scores of a world's two caches, by the path that reads the patches."""
        answers = self._answers(skill)
        (s_old,), (s_new,) = (self._sweep(skill, cache, cache, [Site(())]) for cache in (old, new))
        plain = engine.decide(self.model, old, skill.suffix, answers)[0]
        noise = engine.noise_floor(self.model, old, skill.suffix, answers, alone=plain)
        # As in `measure.open_case`, with room for a tail of several tokens.
        rounding = 256 * torch.finfo(self.model.dtype).eps * max(1.0, float(plain.abs().max()))
        tolerance = max(8 * noise, min(rounding, 0.1 * abs(s_new - s_old)))
        control = skill.pair.pair.kind == "control"
        reason = self.competence.reason(old=s_old, new=s_new, noise=noise, control=control)
        return World(old, new, s_old, s_new, noise, tolerance, reason)

    def cells(self, skill: Skill, world: World) -> Iterable[tuple[dict[str, Any], Site]]:
        """Sites by slot, the same in both worlds; ranked by the recomputed world's old run."""
        yield {"site": "field_only"}, Site(skill.field)
        yield {"site": "behind_only"}, Site(skill.behind)
        rows = engine.attention_rows(self.model, world.old, skill.suffix).mean(dim=(0, 1))[0]
        best = sorted(skill.behind, key=lambda slot: (-float(rows[slot]), slot))
        for k in (k for k in self.ks if k <= len(best)):
            about = {"site": "field_and_top", "ranking": "attention", "k": k}
            yield about, Site((*skill.field, *best[:k]))
        for draw in range(self.draws):
            order = list(skill.behind)
            random.Random(f"keystone|{self.seed}|{draw}|{skill.pair.pair.key}").shuffle(order)
            for k in (k for k in self.ks if k <= len(order)):
                about = {"site": "field_and_random", "ranking": "random", "k": k, "draw": draw}
                yield about, Site((*skill.field, *order[:k]))

    def scores(self, skill: Skill, world: World, sites: Sequence[Site]) -> list[float]:
        return self._sweep(skill, world.old, world.new, sites)

    def controls(self, skill: Skill, worlds: dict[str, World]) -> list[dict[str, Any]]:
        """Rows of the controls. Raises ControlError on the first that fails."""
        found: list[tuple[str, float, float]] = []
        for name, world in worlds.items():
            plain = engine.decide(self.model, world.old, skill.suffix, self._answers(skill))[0]
            nothing, all_ = self.scores(skill, world, [Site(()), Site((*skill.field, *skill.behind))])
            found.append((f"no_patch_{name}", abs(nothing - float(plain[1] - plain[0])), world.tolerance))
            found.append((f"everything_{name}", abs(all_ - world.s_new), world.tolerance))
        if self.seam_repair != "all":
            a, b = (worlds[name].old for name in WORLDS)
            skipped = len(skill.prefix)
            apart = max(
                float((x[:, :, skipped:] - y[:, :, skipped:]).norm() / x[:, :, skipped:].norm())
                for x, y in zip(a.values, b.values, strict=True)
            )
            found.append(("worlds_differ", _APART / max(apart, 1e-300), 1.0))
        for name, gap, limit in found:
            if not gap <= limit:
                raise ControlError(
                    f"control {name!r} failed on {self.model.name} ({self.model.dtype}), pair {skill.pair.pair.key}: "
                    f"{gap:.3g}, limit {limit:.3g}. Nothing measured on this model can be trusted; run `kvprobe check`."
                )
        return [
            {"view": "control", "site": name, "readout": readout, "value": value}
            for name, gap, limit in found
            for readout, value in (("gap", gap), ("tolerance", limit))
        ]

    def line(self, skill: Skill, worlds: dict[str, World], reason: str) -> dict[str, Any]:
        pair = skill.pair
        out = {
            "pair": pair.pair.key,
            "content": pair.pair.content,
            "family": pair.pair.family,
            "kind": pair.pair.kind,
            "split": pair.pair.split,
            "competent": not reason,
            "reason": reason,
            "length": len(skill.prefix) + len(skill.old) + len(skill.suffix),
            "field_start": skill.field[0],
            "field_stop": skill.field[-1] + 1,
            "answer_old": pair.pair.answer_old,
            "answer_new": pair.pair.answer_new,
            "s_old": worlds["recomputed"].s_old,
            "s_new": worlds["recomputed"].s_new,
            "prefix_tokens": len(skill.prefix),
        }
        return out | {f"{side}_spliced": getattr(worlds["spliced"], side) for side in ("s_old", "s_new")}

    def _answers(self, skill: Skill) -> tuple[int, int]:
        return skill.pair.answer_old_id, skill.pair.answer_new_id

    def _sweep(self, skill: Skill, base: KVCache, donor: KVCache, sites: Sequence[Site]) -> list[float]:
        done = engine.sweep(
            self.model,
            base,
            donor,
            sites,
            list(skill.suffix),
            self._answers(skill),
            memory_budget=self.memory_budget,
            path=self.path,  # type: ignore[arg-type]
        )
        return done.difference.tolist()


def summarise(frame: pd.DataFrame, tried: pd.DataFrame, *, model: str, ks: Sequence[int], seed: int) -> Summary:
    """Recoveries in both worlds and their difference, per site and k."""
    found = Estimates(seed=seed)
    rows = frame[frame["view"] == "keystone"].reindex(columns=[*frame.columns.union(["world"])])
    sites: list[tuple[str, int | None]] = [("field_only", None), ("behind_only", None)]
    sites += [(site, k) for site in ("field_and_top", "field_and_random") for k in ks]
    for site, k in sites:
        here = rows[(rows["site"] == site) & (True if k is None else (rows["k"] == k).fillna(False))]
        label = site if k is None else f"{site}{k}"
        for world in WORLDS:
            found.add(f"{label}_{world}", _per_pair(here[(here["readout"] == "recovery") & (here["world"] == world)]))
        found.add(f"{label}_difference", _per_pair(here[here["readout"] == "difference"]), "spliced - recomputed")
        found.add(f"{label}_same_decision", _per_pair(here[here["readout"] == "same_decision"]))
    found.require("field_only_recomputed", "field_only_spliced", "field_only_difference")
    return found.summary(f"edit in a spliced skill on {model}", frame, tried)


def _per_pair(rows: pd.DataFrame) -> pd.DataFrame:
    """Mean over draws, so that every pair counts once."""
    if rows.empty:
        return rows
    return rows.groupby(["pair", "content"], sort=False)["value"].mean().reset_index()
