"""Where compact slots come from: the regions of the prompt that feed them, and the attention they draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvnotes_interp import engine
from kvnotes_interp.cache import KVCache
from kvnotes_interp.compact import CompactCache
from kvnotes_interp.operators.eviction.compacted import Sliding, budget_of
from kvnotes_interp.probes.compaction.points import Point

if TYPE_CHECKING:
    from kvnotes_interp.model import Model
    from kvnotes_interp.operators.still import Still

Origin = Float[Tensor, "kv_head slot region"]
TAIL = "tail"


@dataclass(frozen=True)
class Origins:
    """The share of every region in every compact slot.

    A slot that was copied, or lends its key, comes from one token. What a Still compactor wrote is shared out by its
    attribution, which is approximate (see `operators.still.attribution`). Other written slots have no origin.
    """

    model: Model
    sliding: Sliding
    _stills: dict[str, Still] = field(default_factory=dict)

    def __call__(
        self, point: Point | None, source: KVCache, compact: CompactCache, regions: Sequence[int], n: int
    ) -> tuple[Origin, ...] | None:
        """Per layer, rows that sum to 1; `regions` gives the number (below `n`) of each slot of the source.

        None where a layer holds slots of unknown origin.
        """
        each = torch.eye(n)[list(regions)]  # [source region]
        written = None
        found = []
        for layer, sources in enumerate(compact.sources):
            if bool((sources >= 0).all()):
                found.append(each[sources])
                continue
            if written is None:
                written = self._attributed(point, source)
            shares = None if written is None else written[layer]
            if shares is None:
                return None
            found.append(shares.cpu() @ each[-shares.shape[-1] :])  # a window reaches the last sources only
        return tuple(found)

    def _attributed(self, point: Point | None, source: KVCache) -> tuple[Tensor | None, ...] | None:
        folder = None if point is None else point.compactor.options.get("adapter")
        if point is None or folder is None:
            return None
        from kvnotes_interp.operators.still import Still, attribution

        name = point.compactor.name
        if name not in self._stills:
            self._stills[name] = Still.load(Path(folder), self.model)
        budget = budget_of(source, point.ratio)
        return attribution(self._stills[name], self.model, source, budget=budget, sliding=self.sliding)


def origin_rows(
    model: Model, origins: Sequence[Origin], compact: CompactCache, tail: Sequence[int], regions: Sequence[int],
    names: Sequence[str],
) -> list[dict[str, Any]]:  # fmt: skip
    """Per region: its share of the slots of compacted layers, its enrichment, and the decision's attention to it.

    "share" and "enrichment" (share over the region's share of the source's slots) are of the view "slots", "attention"
    is the mean over layers and heads of the last token's mass; the region "tail" is what it gives to the tail itself.
    """
    n, counts = len(regions), torch.bincount(torch.tensor(list(regions)), minlength=len(names)).double()
    lossy = [o for o in origins if o.shape[1] < n] or list(origins)
    share = torch.stack([o.double().mean(dim=(0, 1)) for o in lossy]).mean(dim=0)
    mass = torch.zeros(len(names), dtype=torch.float64)
    for layer, rows in enumerate(engine.attention_by_layer(model, compact, tail)):
        slots = origins[layer].shape[1]
        groups = rows.shape[0] // compact.n_kv_heads
        grouped = rows[:, 0, :slots].double().unflatten(0, (compact.n_kv_heads, groups)).sum(1)  # [kv_head slot]
        mass += torch.einsum("hs,hsr->r", grouped, origins[layer].double()) / (rows.shape[0] * compact.n_layers)
    out = []
    for i, region in enumerate(names):
        about = {"region": region, "size": int(counts[i])}
        out += [
            {**about, "view": "slots", "readout": "share", "value": float(share[i])},
            {**about, "view": "slots", "readout": "enrichment", "value": float(share[i] * n / counts[i])},
            {**about, "view": "attention", "readout": "attention", "value": float(mass[i])},
        ]
    own = {"region": TAIL, "size": len(tail), "view": "attention", "readout": "attention"}
    return [*out, {**own, "value": float(1 - mass.sum())}]
