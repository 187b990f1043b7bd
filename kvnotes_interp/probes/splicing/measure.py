"""Measuring one question of a splice-quality run: every operator, its time, and the controls."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from kvnotes_interp import engine, operators
from kvnotes_interp.cache import KVCache
from kvnotes_interp.errors import ControlError
from kvnotes_interp.metrics import Competence
from kvnotes_interp.operators import Operator, attach
from kvnotes_interp.operators.made import Compiled, Made
from kvnotes_interp.probes.answering import (
    Arm,
    answer_on,
    in_two_passes,
    logits_on,
    margin,
    quality,
    question_line,
    rivals_of,
    rounding,
    wait,
)
from kvnotes_interp.probes.items import Item
from kvnotes_interp.tasks.documents.question import Question

if TYPE_CHECKING:
    from kvnotes_interp.model import Model

FULL, UNMOVED = "full_recompute", "no_recompute_unmoved"


@dataclass(frozen=True)
class Measure:
    """Everything that is measured on one question."""

    model: Model
    arms: dict[str, Operator]
    max_new_tokens: int
    timing: int
    seed: int
    competence: Competence

    def __call__(self, item: Item, question: Question) -> tuple[pd.DataFrame, dict[str, Any]]:
        ready = self.compiled(item)
        rivals = rivals_of(self.model, item, question)
        made = self.run(FULL, item, ready)
        full = self.look(item, made.cache)
        tables: list[pd.DataFrame] = []
        unmoved = full
        for name in self.arms:
            here = made if name == FULL else self.run(name, item, ready)
            arm = full if name == FULL else self.look(item, here.cache)
            unmoved = arm if name == UNMOVED else unmoved
            rows = [*quality(item, arm, full, rivals), *self.cost(item, here)]
            tables.append(self.named(item, question, name, rows))
        controls, noise = self.controls(item, made.cache, full, unmoved, ready[""])
        tables.append(self.named(item, question, FULL, controls).assign(site=[row["site"] for row in controls]))
        tables += [self.named(item, question, name, rows) for name, rows in self.times(item, ready).items()]
        ahead = margin(full.logits, item.answer[0], rivals)
        answered = ahead >= max(self.competence.min_gap, self.competence.min_gap_noise * noise)
        line = question_line(item, question, full, full_margin=ahead, answered=answered, noise=noise)
        return pd.concat(tables, ignore_index=True), line

    def compiled(self, item: Item) -> dict[str, Compiled]:
        """What was compiled beforehand, by who compiled it: the plain model (""), or the Writer of a folder."""
        chosen = {operator.adapter: operator for operator in self.arms.values() if operator.takes("compiled")}
        return {adapter: operator.precompile(self.model, item.blocks) for adapter, operator in chosen.items()}

    def run(self, name: str, item: Item, ready: dict[str, Compiled]) -> Made:
        """The operator's cache; chunks that were compiled beforehand are handed to those that can use them."""
        operator = self.arms[name]
        options = {"compiled": ready.get(operator.adapter), "seed": self.seed}
        return operator(self.model, item.blocks, **{k: v for k, v in options.items() if operator.takes(k)})

    def look(self, item: Item, cache: KVCache) -> Arm:
        """Run the suffix on a cache: logits at its end, and the greedy answer."""
        return answer_on(self.model, item, cache, item.blocks.suffix, max_new_tokens=self.max_new_tokens)

    def cost(self, item: Item, made: Made) -> list[dict[str, Any]]:
        whole = item.blocks.n_context * self.model.shape.n_layers
        found = {
            "recomputed_tokens": made.recomputed_tokens,
            "layer_tokens": made.layer_tokens,
            "layer_share": made.layer_tokens / whole,
        }
        return [{"view": "cost", "readout": name, "value": float(value)} for name, value in found.items()]

    def times(self, item: Item, ready: dict[str, Compiled]) -> dict[str, list[dict[str, Any]]]:
        """Median seconds from the request to the first token, per operator, and full recompute's over them."""
        if not self.timing:
            return {}
        taken: dict[str, list[float]] = {name: [] for name in self.arms}
        for turn in range(self.timing):
            rng = Random(f"{self.seed}|{item.key}|{turn}")
            for name in rng.sample(sorted(self.arms), len(self.arms)):
                wait(self.model.device)
                start = time.perf_counter()
                int(engine.decide(self.model, self.run(name, item, ready).cache, item.blocks.suffix)[0].argmax())
                taken[name].append(time.perf_counter() - start)
        medians = {name: statistics.median(seconds) for name, seconds in taken.items()}
        return {
            name: [
                {"view": "ttft", "readout": "seconds", "value": seconds},
                {"view": "ttft", "readout": "speedup", "value": medians[FULL] / seconds},
            ]
            for name, seconds in medians.items()
        }

    def controls(
        self, item: Item, cache: KVCache, full: Arm, unmoved: Arm, ready: Compiled
    ) -> tuple[list[dict[str, Any]], float]:
        """Rows of the four controls, and the noise floor in logits. Raises ControlError on the first that fails."""
        repaired = operators.find("splice@all")(self.model, item.blocks, compiled=ready).cache
        noise = self._gap(item, in_two_passes(self.model, item.blocks), full)
        astray = float((unmoved.logits - full.logits).abs().max())
        gaps = {
            "unmoved_keys_differ": noise / astray if astray else math.inf,
            "full_recompute_twice": noise,
            "all_repaired": self._gap(item, repaired, full),
            "own_place": self._gap(item, self._spliced_where_it_stood(item, cache), full),
        }
        allowed = rounding(self.model, full, astray=astray)
        limits = dict.fromkeys(gaps, min(max(8 * noise, allowed), 0.5 * astray))
        limits |= {"unmoved_keys_differ": 0.1, "full_recompute_twice": allowed}
        for name, gap in gaps.items():
            if not gap <= limits[name]:
                raise ControlError(
                    f"control {name!r} failed on {self.model.name} ({self.model.dtype}), question {item.key}: "
                    f"{_ABOUT[name]} is {gap:.3g}, limit {limits[name]:.3g} (keys unmoved: {astray:.3g}). Nothing "
                    "measured on this model can be trusted; run `kvprobe check`."
                )
        rows = [
            {"view": "control", "site": name, "readout": readout, "value": value}
            for name, gap in gaps.items()
            for readout, value in (("gap", gap), ("tolerance", limits[name]))
        ]
        rows.append({"view": "control", "site": "noise_floor", "readout": "gap", "value": noise})
        return rows, noise

    def _gap(self, item: Item, cache: KVCache, full: Arm) -> float:
        return float((logits_on(self.model, cache, item.blocks.suffix) - full.logits).abs().max())

    def _spliced_where_it_stood(self, item: Item, cache: KVCache) -> KVCache:
        """The last chunk cut out of the full cache, turned to 0, 1, ... and spliced behind its own prefix."""
        start, stop = item.blocks.spans[-1]
        chunk = cache[start:stop].placed(torch.arange(stop - start))
        return attach(self.model, cache[:start], chunk).cache

    def named(self, item: Item, question: Question, arm: str, rows: list[dict[str, Any]]) -> pd.DataFrame:
        operator = self.arms[arm]
        option = operators.setting(operator)
        share = operator.options.get("share") if option == "share" else None
        first = min(question.gold)
        about = {
            "pair": item.key,
            "content": item.content,
            "family": item.family,
            "site": arm,
            "ranking": arm,
            "part": "kv",
            "size": item.blocks.n_context,
            "position": item.blocks.spans[first][0],
            "documents": len(item.blocks.chunks),
            # Two settings of an operator are points of one curve; two trained Writers are two operators.
            "operator": arm if operator.adapter else arm.partition("@")[0],
            "share": math.nan if share is None else float(share),
        }
        return pd.DataFrame([{**about, **row} for row in rows])


_ABOUT = {
    "full_recompute_twice": "the largest logit gap of one pass against two",
    "all_repaired": "the largest logit gap of a splice with every seam token recomputed",
    "own_place": "the largest logit gap of a chunk spliced where it stood",
    "unmoved_keys_differ": "the noise over the effect of keys that were not moved",
}
