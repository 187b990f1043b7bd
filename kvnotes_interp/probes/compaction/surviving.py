"""Measuring one pair of a survival run: decisions from compact caches, edits of them, and where slots come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from kvnotes_interp import engine, metrics
from kvnotes_interp.cache import KVCache
from kvnotes_interp.compact import Cache, CompactCache
from kvnotes_interp.errors import ControlError
from kvnotes_interp.operators.edits import states
from kvnotes_interp.operators.edits.erratum import text_ids
from kvnotes_interp.operators.edits.setting import Setting
from kvnotes_interp.probes.compaction.origins import Origins, origin_rows
from kvnotes_interp.probes.compaction.points import Compacting, Point
from kvnotes_interp.probes.measure import Case, identity_controls
from kvnotes_interp.results.tables import FRAME_COLUMNS

if TYPE_CHECKING:
    from kvnotes_interp.model import Model

FULL = "full"
EDITS = ("erratum", "field_edited", "field_patched")
COLUMNS = [*FRAME_COLUMNS, "compactor", "ratio", "edit"]


@dataclass(frozen=True)
class Surviving:
    """Everything that is measured on one pair."""

    compacting: Compacting
    points: Sequence[Point]
    wording: str
    origins: Origins

    @property
    def model(self) -> Model:
        return self.compacting.model

    def __call__(self, case: Case) -> tuple[pd.DataFrame, Mapping[str, Float[Tensor, "side d_model"]]]:
        """(rows, hidden states of the decision token on every arm's old and new cache)."""
        setting = Setting(case.model, case.pair, case.base, case.donor)
        edited = states.field_only(setting).cache
        said = text_ids(setting, self.wording, case.pair.pair.field_new)
        rows: list[dict[str, Any]] = self.control(case)
        hidden: dict[str, Tensor] = {}
        for point in (None, *self.points):
            about = {"site": FULL, "compactor": FULL, "ratio": 1.0} if point is None else point.about
            old, new, field = (self.compact(case, point, cache) for cache in (case.base, case.donor, edited))
            (s_old, h_old), (s_new, h_new) = self.decide(case, old), self.decide(case, new)
            hidden[about["site"]] = torch.stack((h_old, h_new))
            found = {
                "s_old": s_old,
                "s_new": s_new,
                "decided": float(s_old < 0 < s_new),
                "decided_new": float(s_new > 0),
                "gap": (s_new - s_old) / (case.new - case.old),
            }
            own = [{"view": "survival", "readout": name, "value": value} for name, value in found.items()]
            corrected = engine.extend(self.model, old, said)[0]
            edits: dict[str, Cache] = {"erratum": corrected, "field_edited": field}
            if (patched := field_patched(case, old)) is not None:
                edits["field_patched"] = patched
            for name, cache in edits.items():
                score, _ = self.decide(case, cache)
                for readout, value in (
                    ("recovery", metrics.recovery(score, old=case.old, new=case.new)),
                    ("effect", (score - s_old) / (case.new - case.old)),
                    ("correct", float(score > 0)),
                ):
                    own.append({"view": "compact_edit", "edit": name, "readout": readout, "value": value})
            own += self.regions(case, point, new)
            rows += [{**case.names, "part": "kv", **about, **row} for row in own]
        return pd.concat([identity_controls(case), pd.DataFrame(rows)])[COLUMNS].reset_index(drop=True), hidden

    def compact(self, case: Case, point: Point | None, cache: KVCache) -> CompactCache:
        if point is None:
            return CompactCache.of(cache)
        return self.compacting(point.compactor, cache, point.ratio, key=case.pair.pair.key).cache

    def decide(self, case: Case, cache: Cache) -> tuple[float, Float[Tensor, " d_model"]]:
        """Score, and the final hidden state of the decision token."""
        _, hidden = engine.extend(self.model, cache, case.tail)
        logits = engine.logits_of(self.model, hidden[:, -1], case.answers)[0]
        return float(logits[1] - logits[0]), hidden[0, -1].float().cpu()

    def regions(self, case: Case, point: Point | None, new: CompactCache) -> list[dict[str, Any]]:
        here = case.pair.regions[: len(case.donor)]
        names = list(dict.fromkeys(here))
        numbers = [names.index(region) for region in here]
        found = self.origins(point, case.donor, new, numbers, len(names))
        return [] if found is None else origin_rows(self.model, found, new, case.tail, numbers, names)

    def control(self, case: Case) -> list[dict[str, Any]]:
        """A budget of all slots decides as the full cache does. Raises ControlError for the compactor that does not."""
        gaps = {}
        for name, compactor in {point.compactor.name: point.compactor for point in self.points}.items():
            sides = ((case.base, case.old), (case.donor, case.new))
            whole = [self.compact(case, Point(compactor, 1.0), cache) for cache, _ in sides]
            gaps[name] = max(
                abs(self.decide(case, cache)[0] - score) for cache, (_, score) in zip(whole, sides, strict=True)
            )
        worst = max(gaps, key=gaps.__getitem__)
        # The compact path has an attention of its own, and each side has an answer of its own to round.
        tolerance = min(8 * case.tolerance, 0.1 * abs(case.new - case.old))
        if not gaps[worst] <= tolerance:
            raise ControlError(
                f"control 'ratio_1' failed on {self.model.name} ({self.model.dtype}), pair {case.pair.pair.key}: with "
                f"a budget of all slots {worst} is {gaps[worst]:.3g} logits off the full cache's decision, tolerance "
                f"{tolerance:.3g}. Nothing measured on this model can be trusted; run `kvprobe check`."
            )
        about = {**case.names, "view": "control", "site": "ratio_1"}
        return [{**about, "readout": k, "value": v} for k, v in (("gap", gaps[worst]), ("tolerance", tolerance))]


def field_patched(case: Case, old: CompactCache) -> CompactCache | None:
    """The compacted old cache with those of its slots that hold the field taken from the new run.

    None where slots are not copies: fitted values, biases, slots that were written or updated. Where no slot of the
    field was kept nothing changes.
    """
    if old.bias is not None or any(bool((sources < 0).any()) for sources in old.sources):
        return None
    copies = CompactCache.of(case.base).kept(old.sources)
    if not all(map(torch.equal, old.keys + old.values, copies.keys + copies.values)):
        return None  # kept, and changed: a trained scorer may update its slots
    new = CompactCache.of(case.donor).kept(old.sources)
    start, stop = case.pair.field
    inside = [((s >= start) & (s < stop))[None, :, :, None].to(old.device) for s in old.sources]
    keys, values = (
        tuple(torch.where(m, a, b) for m, a, b in zip(inside, getattr(new, part), getattr(old, part), strict=True))
        for part in ("keys", "values")
    )
    return replace(old, keys=keys, values=values)
