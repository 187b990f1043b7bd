"""What the attention function is asked to do besides attending: cuts, records, patches of a shared base, one `Plan`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxtyping import Bool
from torch import Tensor

from kvnotes_interp.errors import whole_numbers


@dataclass(frozen=True)
class Cut:
    """Edges taken out of the attention before the softmax, so that what is left is renormalised.

    `keys` and `queries` are slots; `queries=None` means every new token, `layers=None` and `heads=None` all of them.
    """

    keys: tuple[int, ...]
    queries: tuple[int, ...] | None = None
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("keys", "queries", "layers", "heads"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, whole_numbers(f"cuts.{name}", value))


@dataclass
class Recorder:
    """Collects, per layer and in float32 (float64 for a float64 model), what attention did for some query slots.

    Slots count from the beginning of the cache, negative ones from the end of the new tokens.
    `want` holds "patterns" `[batch head slot key]`, "queries" `[batch head slot d_head]` (rotated), or both.
    """

    slots: tuple[int, ...]
    want: frozenset[str] = frozenset({"patterns"})
    patterns: dict[int, Tensor] = field(default_factory=dict)
    queries: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class LayerPatch:
    """What rows of a sweep see differently in one layer.

    `slots` `[slot]` are the base positions that any row patches here; `keys`/`values` `[kv_head slot d_head]` the
    donor's; `k_rows`/`v_rows` `[kv_head|1 row slot]` say which row takes which. None: no row patches that part.
    `bias` `[kv_head slot]` is what a patched key's bias has over the base's, where either cache has one.
    """

    slots: Tensor
    keys: Tensor
    values: Tensor
    k_rows: Bool[Tensor, "kv_head row slot"] | None
    v_rows: Bool[Tensor, "kv_head row slot"] | None
    bias: Tensor | None = None


@dataclass
class SharedBase:
    """One base cache that all rows attend to, `[kv_head pos d_head]` per layer, with the patches of the current layer.

    Rows hold only their own tail (new tokens); `masked` `[tail pos+tail]` is True where attention is forbidden.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    bias: tuple[Tensor | None, ...] | None = None
    patch: LayerPatch | None = None
    masked: Bool[Tensor, "tail key"] | None = None


@dataclass(frozen=True)
class KeyPositions:
    """Where the cached keys stand when slots are not tokens: per layer `[kv_head slot]`, and `queries` `[query]`.

    Every cached key lies before every new token; a layer's sliding window is counted in positions.
    """

    keys: tuple[Tensor, ...]
    queries: Tensor


@dataclass
class Plan:
    """What the attention function does besides attending."""

    bias: tuple[Tensor | None, ...] | None = None
    recorder: Recorder | None = None
    shared: SharedBase | None = None
    cuts: Sequence[Sequence[Cut]] = ()  # one list for all rows of the batch, or one per row
    slots: Tensor | None = None  # `[query]` where the queries stand, when they do not stand behind the cache
    compact: KeyPositions | None = None
    ran: Counter[int] = field(default_factory=Counter)  # how often each layer called the attention function
    masks: list[Tensor] = field(default_factory=list)  # the masks made for this pass

    @property
    def replaces_mask(self) -> bool:
        """Whether the mask that the model hands over is not the one that holds."""
        return self.slots is not None or self.compact is not None or self.shared is not None
