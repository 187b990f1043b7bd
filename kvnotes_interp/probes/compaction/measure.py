"""Measuring one question of a compaction-quality run: every compactor at every ratio, its time, and the controls."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Any

import pandas as pd

from kvnotes_interp import engine
from kvnotes_interp.cache import KVCache
from kvnotes_interp.compact import Cache
from kvnotes_interp.errors import ControlError
from kvnotes_interp.metrics import Competence
from kvnotes_interp.operators.eviction.compacted import Compacted, slots_of
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
from kvnotes_interp.probes.compaction.points import Compacting, Point, Streamed
from kvnotes_interp.probes.items import Item
from kvnotes_interp.tasks.documents.question import Question

if TYPE_CHECKING:
    from kvnotes_interp.model import Model

FULL, NO_CONTEXT = "full", "no_context"
VIEW = "compaction"
_REFERENCES: dict[str, dict[str, Any]] = {
    FULL: {"site": FULL, "compactor": FULL, "ratio": 1.0},
    NO_CONTEXT: {"site": NO_CONTEXT, "compactor": NO_CONTEXT, "ratio": math.nan},
}


@dataclass(frozen=True)
class Measure:
    """Everything that is measured on one question."""

    compacting: Compacting
    points: Sequence[Point]
    query_aware: bool
    max_new_tokens: int
    timing: int
    competence: Competence

    @property
    def model(self) -> Model:
        return self.compacting.model

    def __call__(self, item: Item, question: Question) -> tuple[pd.DataFrame, dict[str, Any]]:
        rivals = rivals_of(self.model, item, question)
        cache = engine.prefill(self.model, item.blocks.context)
        full = self.look(item, cache, item.blocks.suffix)
        bare, rest = self.without_documents(item)
        floor = self.look(item, bare, rest)
        made, times = self.made(item, cache)
        rows = [
            *self.rows(self.about(FULL, item), item, full, full, rivals, self.cost(cache, cache)),
            *self.rows(self.about(NO_CONTEXT, item), item, floor, full, rivals, self.cost(bare, cache)),
        ]
        for point in self.points:
            compacted = made.pop(point.name)
            arm = self.look(item, compacted.cache, item.blocks.suffix)
            peak = compacted.peak if isinstance(compacted, Streamed) else cache.nbytes
            costs = self.cost(compacted.cache, cache, compacted.layer_tokens, peak)
            rows += self.rows(self.about(point, item), item, arm, full, rivals, costs)
        controls, noise = self.controls(item, cache, full, floor)
        ahead = margin(full.logits, item.answer[0], rivals)
        answered = ahead >= max(self.competence.min_gap, self.competence.min_gap_noise * noise)
        line = question_line(item, question, full, full_margin=ahead, answered=answered, noise=noise)
        about = {
            "pair": item.key,
            "content": item.content,
            "family": item.family,
            "part": "kv",
            "size": item.blocks.n_context,
            "position": item.blocks.spans[min(question.gold)][0],
            "documents": len(item.blocks.chunks),
        }
        return pd.DataFrame([{**about, **row} for row in (*rows, *times, *controls)]), line

    @property
    def iterated(self) -> bool:
        """Whether any arm compacts its context in parts: the frame then says in how many, and what a part took."""
        return any(point.in_parts for point in self.points)

    def about(self, arm: Point | str, item: Item) -> dict[str, Any]:
        """What the frame says of an arm; where sizes are absolute, of what this context makes of them."""
        if isinstance(arm, str):
            return {**_REFERENCES[arm], **({"passes": 1} if self.iterated else {})}
        n = item.blocks.n_context
        ratio = arm.ratio if arm.slots is None else n / arm.budget(n)
        return {**arm.about, "ratio": ratio, **({"passes": len(arm.parts(item.blocks))} if self.iterated else {})}

    def cost(self, cache: Cache, full: KVCache, layer_tokens: int = 0, peak: int | None = None) -> dict[str, float]:
        """Slots per layer, bytes, their share, and layer-tokens run to observe over a prefill's.

        Where contexts are read in parts also the `peak`: bytes of the largest cache before a compaction.
        """
        slots = slots_of(cache)
        found = {
            "slots": sum(slots) / len(slots),
            "bytes": float(cache.nbytes),
            "share": cache.nbytes / full.nbytes,
            "observed": layer_tokens / (len(full) * full.n_layers),
        }
        if self.iterated:
            peak = cache.nbytes if peak is None else peak
            found |= {"peak": float(peak), "peak_share": peak / full.nbytes}
        return found

    def look(self, item: Item, cache: Cache, suffix: Sequence[int]) -> Arm:
        return answer_on(self.model, item, cache, suffix, max_new_tokens=self.max_new_tokens)

    def without_documents(self, item: Item) -> tuple[KVCache, tuple[int, ...]]:
        """(cache of the prefix alone, what is run on it); without a prefix the suffix's first token stands in."""
        blocks = item.blocks
        start = blocks.prefix or blocks.suffix[:1]
        return engine.prefill(self.model, start), blocks.suffix if blocks.prefix else blocks.suffix[1:]

    def rows(
        self,
        about: dict[str, Any],
        item: Item,
        arm: Arm,
        full: Arm,
        rivals: Sequence[int],
        costs: dict[str, float],
    ) -> list[dict[str, Any]]:
        paid = [{"view": "cost", "readout": name, "value": value} for name, value in costs.items()]
        answers = [{**row, "view": VIEW} for row in quality(item, arm, full, rivals)]
        return [{**about, **row} for row in (*answers, *paid)]

    def compact(self, point: Point, item: Item, cache: KVCache) -> Compacted | Streamed:
        """The context compacted: `cache` at once, or the context part by part."""
        observe = list(item.blocks.suffix) if self.query_aware else None
        if point.in_parts:
            return self.compacting.in_parts(point, item.blocks, key=item.key, observe=observe)
        return self.compacting(point.compactor, cache, point.ratio, key=item.key, observe=observe)

    def made(self, item: Item, cache: KVCache) -> tuple[dict[str, Compacted | Streamed], list[dict[str, Any]]]:
        """(every compact cache by its name, rows of their median times and of the prefill's, in random order)."""
        found: dict[str, Compacted | Streamed] = {}
        taken: dict[str, list[float]] = {}
        by_name: dict[str, Point | None] = {FULL: None, **{point.name: point for point in self.points}}
        for turn in range(max(1, self.timing)):
            names = Random(f"{self.compacting.seed}|{item.key}|{turn}").sample(sorted(by_name), len(by_name))
            for name in names:
                point = by_name[name]
                wait(self.model.device)
                start = time.perf_counter()
                compacted = None
                if point is None:
                    engine.prefill(self.model, item.blocks.context)
                else:
                    compacted = self.compact(point, item, cache)
                    found.setdefault(name, compacted)
                wait(self.model.device)
                seconds = time.perf_counter() - start
                # Running the parts is the prefill of this arm, and not a part of compacting.
                taken.setdefault(name, []).append(compacted.seconds if isinstance(compacted, Streamed) else seconds)
        if not self.timing:
            return found, []
        medians = {name: statistics.median(seconds) for name, seconds in taken.items()}
        rows = []
        for name, point in by_name.items():
            about = {"view": "time", **self.about(FULL if point is None else point, item)}
            rows.append({**about, "readout": "seconds", "value": medians[name]})
            rows.append({**about, "readout": "prefills", "value": medians[name] / medians[FULL]})
        return found, rows

    def controls(self, item: Item, cache: KVCache, full: Arm, floor: Arm) -> tuple[list[dict[str, Any]], float]:
        """Rows of the controls, and the noise floor in logits. Raises ControlError on the first that fails."""

        def gap(other: Cache) -> float:
            return float((logits_on(self.model, other, item.blocks.suffix) - full.logits).abs().max())

        noise, astray = gap(in_two_passes(self.model, item.blocks)), float((floor.logits - full.logits).abs().max())
        compactors = {point.compactor.name: point.compactor for point in self.points}
        whole = {name: gap(self.compact(Point(one, 1.0), item, cache).cache) for name, one in compactors.items()}
        worst = max(whole, key=whole.__getitem__)
        gaps = {
            "documents_matter": noise / astray if astray else math.inf,
            "full_twice": noise,
            "ratio_1": whole[worst],
        }
        allowed = rounding(self.model, full, astray=astray)
        same = min(max(8 * noise, allowed), 0.5 * astray)
        limits = {"documents_matter": 0.1, "full_twice": allowed, "ratio_1": same}
        what = {
            "documents_matter": "the noise over the effect of leaving the documents out",
            "full_twice": "the largest logit gap of one pass against two",
            "ratio_1": f"the largest logit gap of a budget of all slots ({worst})",
        }
        if self.iterated:
            most = max((point for point in self.points if point.in_parts), key=lambda point: point.passes)
            all_slots = replace(most, ratio=1.0, slots=None if most.slots is None else item.blocks.n_context)
            whole = {
                name: gap(self.compact(replace(all_slots, compactor=one), item, cache).cache)
                for name, one in compactors.items()
            }
            worst = max(whole, key=whole.__getitem__)
            gaps["ratio_1_in_parts"], limits["ratio_1_in_parts"] = whole[worst], same
            n = len(all_slots.parts(item.blocks))
            what["ratio_1_in_parts"] = f"the largest logit gap of a budget of all slots in {n} passes ({worst})"
        for name, value in gaps.items():
            if not value <= limits[name]:
                raise ControlError(
                    f"control {name!r} failed on {self.model.name} ({self.model.dtype}), question {item.key}: "
                    f"{what[name]} is {value:.3g}, limit {limits[name]:.3g} (without the documents: {astray:.3g}). "
                    "Nothing measured on this model can be trusted; run `kvprobe check`."
                )
        rows = [
            {"view": "control", "site": name, "readout": readout, "value": value}
            for name, own in gaps.items()
            for readout, value in (("gap", own), ("tolerance", limits[name]))
        ]
        return [*rows, {"view": "control", "site": "noise_floor", "readout": "gap", "value": noise}], noise
