"""CompactCache: a cache in which a slot is no longer a token.

A `KVCache` holds the same tokens in every layer. Eviction keeps other tokens in each layer and head, and a compactor
writes keys and values that belong to no token at all. So a `CompactCache` names, per layer and KV head, at which
position each key is turned and which source token it was copied from. The engine runs tokens on it as on a `KVCache`;
the next token keeps the position that it would have had behind the source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from kvnotes_interp.cache import KVCache
from kvnotes_interp.errors import InputError
from kvnotes_interp.rope import RopeGeometry, rotate

SYNTHETIC = -1
"""In `sources`: a key and value copied from no single token."""


@dataclass(frozen=True, eq=False)
class CompactCache:
    """Keys and values per layer `[batch kv_head slot d_head]`; layers may hold different numbers of slots.

    Attributes:
        positions: per layer `[kv_head slot]`, the rotary position that each key is turned to.
        sources: per layer `[kv_head slot]`, the position of the token that the slot was copied from, or `SYNTHETIC`.
        rope, model_id: as in `KVCache`.
        end: the position that the next token takes: that of the source, however few slots are left.
        bias: optional attention bias per layer `[batch kv_head slot]`, added to the scaled logits.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    positions: tuple[Int[Tensor, "kv_head slot"], ...]
    sources: tuple[Int[Tensor, "kv_head slot"], ...]
    rope: RopeGeometry
    model_id: str
    end: int
    bias: tuple[Tensor | None, ...] | None = None

    def __post_init__(self) -> None:
        parts = (self.keys, self.values, self.positions, self.sources, self.rope.layers)
        if len({len(part) for part in parts}) != 1 or (self.bias is not None and len(self.bias) != len(self.keys)):
            raise InputError(
                "a compact cache needs keys, values, positions, sources and rotary layers for the same number of "
                f"layers; got {[len(part) for part in parts]}."
            )
        for layer, (key, value) in enumerate(zip(self.keys, self.values, strict=True)):
            here = (self.positions[layer].shape, self.sources[layer].shape)
            bias = None if self.bias is None else self.bias[layer]
            wrong_bias = bias is not None and bias.shape[-2:] != key.shape[1:3]
            if key.shape[:3] != value.shape[:3] or any(s != key.shape[1:3] for s in here) or wrong_bias:
                raise InputError(
                    f"layer {layer}: keys {tuple(key.shape)}, values {tuple(value.shape)}, positions {tuple(here[0])}, "
                    f"sources {tuple(here[1])}, bias {None if bias is None else tuple(bias.shape)}; expected "
                    "[batch kv_head slot d_head], [kv_head slot] and [batch kv_head slot]."
                )

    # --- what it is ------------------------------------------------------------------------------------------------

    @property
    def slots(self) -> tuple[int, ...]:
        """Number of slots of every layer."""
        return tuple(key.shape[2] for key in self.keys)

    @property
    def n_layers(self) -> int:
        return len(self.keys)

    @property
    def batch(self) -> int:
        return self.keys[0].shape[0]

    @property
    def n_kv_heads(self) -> int:
        return self.keys[0].shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.keys[0].dtype

    @property
    def device(self) -> torch.device:
        return self.keys[0].device

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and biases."""
        biases = [b for b in self.bias or () if b is not None]
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values, *biases))

    def __repr__(self) -> str:
        low, high = min(self.slots), max(self.slots)
        slots = f"{low}" if low == high else f"{low} to {high}"
        return (
            f"CompactCache(batch={self.batch}, layers={self.n_layers}, kv_heads={self.n_kv_heads}, slots={slots}, "
            f"end={self.end}, {self.dtype}, {self.device}, {self.nbytes / 2**20:.1f} MiB)"
        )

    # --- make ------------------------------------------------------------------------------------------------------

    @classmethod
    def of(cls, cache: KVCache) -> CompactCache:
        """The whole cache in this form; nothing is lost, no tensor is copied."""
        every = cache.positions.expand(cache.n_kv_heads, -1)
        same = (every,) * cache.n_layers
        return cls(cache.keys, cache.values, same, same, cache.rope, cache.model_id, cache.end, cache.bias)

    def kept(self, slots: Sequence[Int[Tensor, "kv_head kept"]]) -> CompactCache:
        """Only these slots, chosen per layer and KV head, in the given order.

        Raises InputError for another number of layers or heads, or a slot that is not there.
        """
        if len(slots) != self.n_layers:
            raise InputError(f"slots for {len(slots)} layers were given to a cache of {self.n_layers}.")
        for layer, chosen in enumerate(slots):
            n = self.slots[layer]
            inside = not chosen.numel() or (int(chosen.min()) >= 0 and int(chosen.max()) < n)
            if chosen.ndim != 2 or chosen.shape[0] != self.n_kv_heads or not inside:
                raise InputError(
                    f"layer {layer}: slots of shape {tuple(chosen.shape)} for {self.n_kv_heads} KV heads of {n} slots; "
                    f"give [kv_head kept], each from 0 to {n - 1}."
                )

        def take(tensor: Tensor, chosen: Tensor) -> Tensor:
            index = chosen.to(tensor.device)[None, :, :, None].expand(tensor.shape[0], -1, -1, tensor.shape[-1])
            return tensor.gather(2, index)

        bias = None
        if self.bias is not None:
            bias = tuple(
                None if b is None else take(b[..., None], s)[..., 0] for b, s in zip(self.bias, slots, strict=True)
            )
        return replace(
            self,
            keys=tuple(map(take, self.keys, slots)),
            values=tuple(map(take, self.values, slots)),
            positions=tuple(p.gather(1, s.cpu()) for p, s in zip(self.positions, slots, strict=True)),
            sources=tuple(p.gather(1, s.cpu()) for p, s in zip(self.sources, slots, strict=True)),
            bias=bias,
        )

    def appended(
        self, keys: Sequence[Tensor], values: Sequence[Tensor], token_ids: Tensor, positions: Tensor
    ) -> CompactCache:
        """The cache with newly run tokens behind it; arguments as in `KVCache.appended`."""
        every = positions.expand(self.n_kv_heads, -1)
        bias = None
        if self.bias is not None:  # new tokens have no bias
            bias = tuple(
                None if b is None else torch.cat((b, b.new_zeros(*b.shape[:2], len(positions))), dim=2)
                for b in self.bias
            )
        return replace(
            self,
            keys=tuple(torch.cat(pair, dim=2) for pair in zip(self.keys, keys, strict=True)),
            values=tuple(torch.cat(pair, dim=2) for pair in zip(self.values, values, strict=True)),
            positions=tuple(torch.cat((p, every), dim=1) for p in self.positions),
            sources=tuple(torch.cat((s, every), dim=1) for s in self.sources),
            bias=bias,
            end=int(positions[-1]) + 1,
        )

    def repeat(self, *, batch: int) -> CompactCache:
        """The same cache for `batch` rows, as a view."""
        if self.batch != 1:
            raise InputError(f"repeat needs a cache of batch 1, this one has {self.batch}.")
        grow = lambda t: t.expand(batch, *t.shape[1:])  # noqa: E731
        bias = None if self.bias is None else tuple(None if b is None else grow(b) for b in self.bias)
        return replace(self, keys=tuple(map(grow, self.keys)), values=tuple(map(grow, self.values)), bias=bias)

    # --- positions -------------------------------------------------------------------------------------------------

    def placed(self, positions: Sequence[Int[Tensor, "kv_head slot"]]) -> CompactCache:
        """Keys turned to these positions, per layer and KV head; values, sources and `end` as they are."""
        if [p.shape for p in positions] != [p.shape for p in self.positions]:
            raise InputError(
                f"positions of shapes {[tuple(p.shape) for p in positions]} for a cache of "
                f"{[tuple(p.shape) for p in self.positions]} [kv_head slot]."
            )
        moves = [new - old for new, old in zip(positions, self.positions, strict=True)]
        keys = tuple(rotate(k, d, layer) for k, d, layer in zip(self.keys, moves, self.rope.layers, strict=True))
        return replace(self, keys=keys, positions=tuple(positions))

    def unrotated(self) -> CompactCache:
        """Keys without their position: turned back to position 0."""
        return self.placed([torch.zeros_like(p) for p in self.positions])

    def renumbered(self) -> CompactCache:
        """Every head's keys turned to 0, 1, ... in the order of their slots: the cache forgets the gaps.

        `end` becomes the largest number of slots, so that the next token follows at once (StreamingLLM, section 3.2).
        """
        dense = [torch.arange(p.shape[1]).expand_as(p) for p in self.positions]
        return replace(self.placed(dense), end=max(self.slots))

    # --- carry -----------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> Path:
        """Write one safetensors file (atomically); returns its path."""
        from kvnotes_interp.compactfile import write

        return write(self, Path(path))

    @classmethod
    def load(cls, path: str | Path, *, device: torch.device | str = "cpu") -> CompactCache:
        """Read a file written by `save`. Raises InputError for a file that is not one, a `KVCache`'s included."""
        from kvnotes_interp.compactfile import read

        return read(Path(path), device=device)


Cache = KVCache | CompactCache
"""What the engine runs tokens on."""
