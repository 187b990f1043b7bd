"""Sites: where a patch goes, and whether it can be made.

A site applied to two caches is the simplest intervention of this package: `site(base, donor)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvnotes_interp.errors import InputError, whole_numbers

if TYPE_CHECKING:
    from kvnotes_interp.cache import KVCache

Part = Literal["kv", "k", "v"]
PARTS: tuple[Part, ...] = ("kv", "k", "v")


@dataclass(frozen=True)
class Site:
    """Where a patch goes: a set of cache slots x layers x {keys, values, both}, optionally some KV heads only.

    `positions` are indices into the `pos` axis. `layers=None` and `kv_heads=None` mean all of them.
    """

    positions: tuple[int, ...]
    layers: tuple[int, ...] | None = None
    part: Part = "kv"
    kv_heads: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        # Ranges and lists are accepted; a site is hashable, sorted and free of repeats.
        for name in ("positions", "layers", "kv_heads"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, tuple(sorted(set(whole_numbers(f"site.{name}", value)))))
        if self.part not in PARTS:
            raise InputError(f"part={self.part!r}: a site patches one of {PARTS}.")

    def check(self, *, n_pos: int, n_layers: int, n_kv_heads: int) -> None:
        """Raise InputError naming the first index that lies outside a cache of this size."""
        for name, value, size in (
            ("positions", self.positions, n_pos),
            ("layers", self.layers, n_layers),
            ("kv_heads", self.kv_heads, n_kv_heads),
        ):
            bad = [v for v in value or () if not 0 <= v < size]
            if bad:
                raise InputError(f"site.{name} holds {bad[0]}, but the cache has {size} (0 to {size - 1}).")

    def layers_of(self, n_layers: int) -> tuple[int, ...]:
        """The layers patched, spelled out."""
        return tuple(range(n_layers)) if self.layers is None else self.layers

    def __call__(self, base: KVCache, donor: KVCache) -> KVCache:
        """The intervention itself: `base` with this site copied from `donor`."""
        return base.patched(self, donor)


def check_donor(base: KVCache, donor: KVCache, sites: Sequence[Site]) -> None:
    """Raise InputError unless every site can be copied from `donor` into `base`."""
    if donor.model_id != base.model_id:
        raise InputError(f"donor was written by {donor.model_id!r}, base by {base.model_id!r}: not the same model.")
    if donor.batch not in (1, base.batch):
        raise InputError(f"donor has batch {donor.batch}; expected 1 or the base's {base.batch}.")
    length = min(len(base), len(donor))
    for site in set(sites):
        site.check(n_pos=length, n_layers=base.n_layers, n_kv_heads=base.n_kv_heads)
    used = sorted({p for site in sites if "k" in site.part for p in site.positions})
    off = [p for p in used if int(base.positions[p]) != int(donor.positions[p])]
    if off:
        raise InputError(
            f"slot {off[0]}: the donor's key is turned to position {int(donor.positions[off[0]])}, the base's to "
            f"{int(base.positions[off[0]])}. Place the donor first: donor.placed(base.positions)."
        )
