"""Compactors by ratios: what both probes on compaction run, and how."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from kvnotes_interp.compact import Cache
from kvnotes_interp.errors import InputError
from kvnotes_interp.operators import eviction
from kvnotes_interp.operators.eviction import Compactor
from kvnotes_interp.operators.eviction.compacted import Compacted, Sliding, budget_of

if TYPE_CHECKING:
    from kvnotes_interp.engine.forward import TokenIds
    from kvnotes_interp.model import Model

COMPACTORS = ("random@4", "streaming", "key_norm", "h2o", "snapkv", "attention_matching")
RATIOS = (2.0, 4.0, 8.0, 16.0)
RANDOM = "random@4"
"""What is run when no random compactor is asked for: random slots that spare the attention sink."""


@dataclass(frozen=True)
class Point:
    """A compactor at a ratio: slots before over slots after, per layer and KV head."""

    compactor: Compactor
    ratio: float

    @property
    def name(self) -> str:
        """`snapkv_4x`."""
        return f"{self.compactor.name}_{self.ratio:g}x"

    @property
    def about(self) -> dict[str, Any]:
        """What the frame says of it."""
        return {"site": self.name, "compactor": self.compactor.name, "ratio": self.ratio}


@dataclass(frozen=True)
class Compacting:
    """How a probe compacts: what becomes of sliding layers, and the seed of everything that is drawn."""

    model: Model
    sliding: Sliding = "keep"
    seed: int = 0

    def __call__(
        self, compactor: Compactor, cache: Cache, ratio: float, *, key: str, observe: TokenIds | None = None
    ) -> Compacted:
        """Compact; what is drawn depends on the seed and the `key`, so that two prompts of a length differ."""
        drawn = Random(f"compaction|{self.seed}|{key}").getrandbits(31)
        options = {"seed": drawn, **({} if observe is None else {"observe": observe})}
        chosen = {name: value for name, value in options.items() if compactor.takes(name)}
        return compactor(self.model, cache, budget=budget_of(cache, ratio), sliding=self.sliding, **chosen)


def points_of(compactors: Sequence[str] = COMPACTORS, ratios: Sequence[float] = RATIOS) -> list[Point]:
    """Every compactor at every ratio, a random one always among them; needs no model.

    Raises InputError for an unknown name, none at all, and a ratio of 1 or less: that is a control, always run.
    """
    names = [compactors] if isinstance(compactors, str) else list(dict.fromkeys(compactors))
    if not names:
        raise InputError(f"no compactor was named; choose from {', '.join(eviction.names())}.")
    if not ratios or any(not 1 < ratio < math.inf for ratio in ratios):
        raise InputError(f"ratios={tuple(ratios)}: give slots before over slots after, each above 1, such as 2, 4, 8.")
    if not any(name.partition("@")[0] == "random" for name in names):
        names = [RANDOM, *names]
    chosen = [eviction.find(name) for name in names]
    return [Point(one, float(ratio)) for one in chosen for ratio in dict.fromkeys(ratios)]


def trained(points: Sequence[Point]) -> dict[str, str]:
    """The sha256 of every trained compactor's description, by its name, as manifests record it."""
    from kvnotes_interp.downloads import sha256
    from kvnotes_interp.operators.still.folder import ABOUT, read_about

    found = {}
    for compactor in {point.compactor.name: point.compactor for point in points}.values():
        folder = compactor.options.get("adapter")
        if folder is not None:
            read_about(Path(folder))
            found[compactor.name] = sha256(Path(folder) / ABOUT)
    return found
