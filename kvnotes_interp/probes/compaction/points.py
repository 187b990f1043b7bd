"""Compactors by ratios: what both probes on compaction run, and how."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from kvnotes_interp.compact import Cache, CompactCache
from kvnotes_interp.errors import InputError
from kvnotes_interp.operators import eviction
from kvnotes_interp.operators.blocks import Blocks
from kvnotes_interp.operators.eviction import Compactor
from kvnotes_interp.operators.eviction.compacted import Budget, Compacted, Sliding, budget_of, sliding_layers
from kvnotes_interp.operators.still.stream import Tokens, chunks_of, over, parts_of
from kvnotes_interp.probes.answering import wait

if TYPE_CHECKING:
    from kvnotes_interp.engine.forward import TokenIds
    from kvnotes_interp.model import Model

COMPACTORS = ("random@4", "streaming", "key_norm", "h2o", "snapkv", "attention_matching")
RATIOS = (2.0, 4.0, 8.0, 16.0)
CHUNK, BUDGET = 512, 64  # of a stream: tokens read between two compactions, slots kept
RANDOM = "random@4"
"""What is run when no random compactor is asked for: random slots that spare the attention sink."""


@dataclass(frozen=True)
class Point:
    """A compactor at a ratio (slots before over slots after, per layer and KV head), or at an absolute size.

    Attributes:
        passes: the context is run and compacted in so many parts, to one budget.
        chunk, slots: in place of ratio and passes: parts of `chunk` tokens, compacted to `slots` slots.
    """

    compactor: Compactor
    ratio: float
    passes: int = 1
    chunk: int | None = None
    slots: int | None = None

    @property
    def name(self) -> str:
        """`snapkv_4x`; `snapkv_4x_8p` for 8 passes; `snapkv_64slots` of an absolute size."""
        if self.slots is not None:
            return f"{self.compactor.name}_{self.slots}slots"
        return f"{self.compactor.name}_{self.ratio:g}x" + (f"_{self.passes}p" if self.passes > 1 else "")

    @property
    def about(self) -> dict[str, Any]:
        """What the frame says of it."""
        return {"site": self.name, "compactor": self.compactor.name, "ratio": self.ratio}

    @property
    def in_parts(self) -> bool:
        """Whether the context is compacted while it is read, and not once when it is whole."""
        return self.passes > 1 or self.chunk is not None

    def parts(self, blocks: Blocks) -> list[Tokens]:
        """The context as it is read. Raises InputError for a context of fewer tokens than passes."""
        return parts_of(blocks, self.passes) if self.chunk is None else chunks_of(blocks.context, self.chunk)

    def budget(self, n_context: int) -> int:
        """Slots per KV head at the end of every pass: with a ratio those of the one pass, rounded up."""
        return math.ceil(n_context / self.ratio) if self.slots is None else min(self.slots, n_context)


@dataclass(frozen=True)
class Streamed:
    """A context that was compacted part by part.

    Attributes:
        cache: behind the last pass. layer_tokens: run to observe, as in `Compacted`, of all passes together.
        peak: bytes of the largest cache before a compaction. seconds: for the compactions, without running the parts.
        passes: how many there were.
    """

    cache: CompactCache
    layer_tokens: int
    peak: int
    seconds: float
    passes: int


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
        return self.to_budget(compactor, cache, budget_of(cache, ratio), key=key, observe=observe)

    def to_budget(
        self, compactor: Compactor, cache: Cache, budget: Budget, *, key: str, observe: TokenIds | None = None
    ) -> Compacted:
        """As a call, to a number of slots."""
        drawn = Random(f"compaction|{self.seed}|{key}").getrandbits(31)
        options = {"seed": drawn, **({} if observe is None else {"observe": observe})}
        chosen = {name: value for name, value in options.items() if compactor.takes(name)}
        return compactor(self.model, cache, budget=budget, sliding=self.sliding, **chosen)

    def in_parts(self, point: Point, blocks: Blocks, *, key: str, observe: TokenIds | None = None) -> Streamed:
        """Read and compact the context part by part, to one budget.

        A part is run on the compact cache of those before it. Compactors that observe tokens are shown `observe`; where
        there is none, those of the part, run again behind the cache, since compact slots cannot be read again (the
        first part has no such slots: its own tokens observe). Each pass draws from a seed of its own. With
        sliding="keep", layers whose window is shorter than the *whole* context are left whole from the first pass on.

        Raises InputError for a context of fewer tokens than passes.
        """
        parts, layer_tokens, peak, seconds = point.parts(blocks), 0, 0, 0.0
        budget = self._budgets(point.budget(blocks.n_context), blocks.n_context)

        def compact(grown: Cache, ids: Sequence[int], number: int) -> CompactCache:
            nonlocal layer_tokens, peak, seconds
            shown = observe if observe is not None or not number else list(ids)
            own = key if not number else f"{key}|{number}"
            wait(self.model.device)
            start = time.perf_counter()
            made = self.to_budget(point.compactor, grown, budget, key=own, observe=shown)
            wait(self.model.device)
            seconds += time.perf_counter() - start
            layer_tokens, peak = layer_tokens + made.layer_tokens, max(peak, grown.nbytes)
            return made.cache

        *_, last = over(self.model, parts, compact)
        return Streamed(last, layer_tokens, peak, seconds, len(parts))

    def _budgets(self, slots: int, n_context: int) -> Budget:
        """`slots` for every layer, all of the context for those that are to be kept whole at its end."""
        slides = sliding_layers(self.model, n_context) if self.sliding == "keep" else ()
        return [n_context if one else slots for one in slides] if any(slides) and not all(slides) else slots


def points_of(
    compactors: Sequence[str] = COMPACTORS,
    ratios: Sequence[float] = RATIOS,
    passes: Sequence[int] = (1,),
    *,
    chunk: int | None = None,
    slots: int | None = None,
) -> list[Point]:
    """Every compactor at every ratio in every number of passes, a random one always among them; needs no model.

    With `chunk` and `slots`, every compactor at that size, in parts of that many tokens.

    Raises InputError for an unknown name, none at all, a ratio of 1 or less (that is a control, always run), no number
    of passes or one below 1, and a chunk or a size below 1.
    """
    names = [compactors] if isinstance(compactors, str) else list(dict.fromkeys(compactors))
    if not names:
        raise InputError(f"no compactor was named; choose from {', '.join(eviction.names())}.")
    if not ratios or any(not 1 < ratio < math.inf for ratio in ratios):
        raise InputError(f"ratios={tuple(ratios)}: give slots before over slots after, each above 1, such as 2, 4, 8.")
    if not passes or any(not isinstance(n, int) or n < 1 for n in passes):
        raise InputError(f"passes={tuple(passes)}: give whole numbers, each at least 1, such as 1, 2, 4.")
    if not any(name.partition("@")[0] == "random" for name in names):
        names = [RANDOM, *names]
    chosen = [eviction.find(name) for name in names]
    if chunk is not None and slots is not None:
        if chunk < 1 or slots < 1:
            raise InputError(f"chunk={chunk}, budget={slots}: each must be at least 1.")
        return [Point(one, math.nan, chunk=chunk, slots=slots) for one in chosen]
    every = [(float(ratio), n) for ratio in dict.fromkeys(ratios) for n in dict.fromkeys(passes)]
    return [Point(one, ratio, n) for one in chosen for ratio, n in every]


def trained(points: Sequence[Point]) -> dict[str, str]:
    """The sha256 of every trained compactor's description, by its name, as manifests record it."""
    from kvnotes_interp.downloads import sha256
    from kvnotes_interp.operators.scorer import folder as scorer
    from kvnotes_interp.operators.still import folder as still

    folders = {"still": still.FOLDER, "scorer": scorer.FOLDER}
    found = {}
    for compactor in {point.compactor.name: point.compactor for point in points}.values():
        folder = compactor.options.get("adapter")
        if folder is not None:
            kind = folders[compactor.name.partition("@")[0]]
            kind.read_about(folder)
            found[compactor.name] = sha256(kind.find(folder))
    return found
