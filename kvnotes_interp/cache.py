"""KVCache: what a model remembers of a prompt, as a value.

Nothing here changes a tensor in place. `cache[a:b]`, `a + b`, `cache.patched(site, donor)` and `cache.moved(offset)`
return new caches that share every tensor they did not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvnotes_interp.errors import InputError, whole_numbers
from kvnotes_interp.rope import RopeGeometry, rotate
from kvnotes_interp.sites import Site, check_donor


@dataclass(frozen=True, eq=False)
class KVCache:
    """Keys and values of a prompt, per layer `[batch kv_head pos d_head]`, as the model caches them.

    Keys are post-norm and post-rotary. One slot is one position in every layer, sliding-window layers included.

    Attributes:
        keys, values: one tensor per layer.
        token_ids: `[batch pos]`; -1 for a slot that stands for no single token.
        positions: `[pos]`, the rotary position each key is turned to.
        rope: the geometry that turned them.
        model_id: fingerprint of the model that wrote them; caches of different models never mix.
        bias: optional per-key attention bias per layer, `[batch kv_head pos]`, added to the scaled logits.
        end: the position that the next token takes (after the last key, unless the cache was compacted).
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    token_ids: Int[Tensor, "batch pos"]
    positions: Int[Tensor, " pos"]
    rope: RopeGeometry
    model_id: str
    bias: tuple[Tensor | None, ...] | None = None
    end: int = field(default=-1)

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.values) or len(self.keys) != len(self.rope.layers):
            raise InputError(
                f"{len(self.keys)} key layers, {len(self.values)} value layers, {len(self.rope.layers)} rotary layers: "
                "a cache needs the same number of each."
            )
        want = (self.batch, len(self))
        for index, (key, value) in enumerate(zip(self.keys, self.values, strict=True)):
            got = (key.shape[0], key.shape[2])
            if key.shape[:3] != value.shape[:3] or got != want or self.token_ids.shape != want:
                raise InputError(
                    f"layer {index}: keys {tuple(key.shape)}, values {tuple(value.shape)}, token ids "
                    f"{tuple(self.token_ids.shape)}; expected [batch kv_head pos d_head] with batch, pos = {want}."
                )
        if self.bias is not None and len(self.bias) != len(self.keys):
            raise InputError(f"bias has {len(self.bias)} layers, the cache {len(self.keys)}.")
        for index, (key, bias) in enumerate(zip(self.keys, self.bias or (), strict=False)):
            if bias is not None and bias.shape != key.shape[:3]:
                raise InputError(
                    f"layer {index}: a bias {tuple(bias.shape)} for keys {tuple(key.shape)}; expected "
                    f"[batch kv_head pos] = {tuple(key.shape[:3])}."
                )
        if self.end < 0:
            object.__setattr__(self, "end", int(self.positions.max()) + 1 if len(self) else 0)

    # --- what it is ------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.positions.shape[0]

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
        """Bytes held by keys, values and biases (shared tensors counted in full)."""
        biases = [b for b in self.bias or () if b is not None]
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values, *biases))

    def __repr__(self) -> str:
        return (
            f"KVCache(batch={self.batch}, layers={self.n_layers}, kv_heads={self.n_kv_heads}, pos={len(self)}, "
            f"d_head={self.keys[0].shape[3]}, {self.dtype}, {self.device}, {self.nbytes / 2**20:.1f} MiB)"
        )

    def __eq__(self, other: object) -> bool:
        """Bit-for-bit equality of everything a forward pass can see."""
        if not isinstance(other, KVCache):
            return NotImplemented
        return (
            self.model_id == other.model_id
            and self.end == other.end
            and self.n_layers == other.n_layers
            and self.rope.same_as(other.rope)
            and torch.equal(self.positions, other.positions)
            and torch.equal(self.token_ids, other.token_ids)
            and all(torch.equal(a, b) for a, b in zip(self.keys, other.keys, strict=True))
            and all(torch.equal(a, b) for a, b in zip(self.values, other.values, strict=True))
            and _same_bias(self.bias, other.bias)
        )

    __hash__ = None  # type: ignore[assignment]

    # --- slice and join --------------------------------------------------------------------------------------------

    def __getitem__(self, index: slice) -> KVCache:
        """The slots of a slice, at the positions they had. `cache[:a] + cache[a:]` is the cache."""
        if not isinstance(index, slice) or index.step not in (None, 1):
            raise InputError(f"cache[{index!r}]: a cache is sliced by a run of slots, cache[a:b].")
        start, stop, _ = index.indices(len(self))
        stop = max(start, stop)
        end = self.end if stop == len(self) else int(self.positions[stop])
        return replace(
            self,
            keys=tuple(k[:, :, start:stop] for k in self.keys),
            values=tuple(v[:, :, start:stop] for v in self.values),
            token_ids=self.token_ids[:, start:stop],
            positions=self.positions[start:stop],
            bias=None if self.bias is None else tuple(None if b is None else b[..., start:stop] for b in self.bias),
            end=end,
        )

    def __add__(self, other: KVCache) -> KVCache:
        return join(self, other)

    def appended(
        self, keys: Sequence[Tensor], values: Sequence[Tensor], token_ids: Tensor, positions: Tensor
    ) -> KVCache:
        """The cache with newly run tokens behind it: `keys`/`values` per layer `[batch kv_head new d_head]`."""
        new = replace(
            self,
            keys=tuple(keys),
            values=tuple(values),
            token_ids=token_ids,
            positions=positions,
            bias=None,
            end=int(positions[-1]) + 1,
        )
        return join(self, new)

    def repeat(self, *, batch: int) -> KVCache:
        """The same cache for `batch` rows, as a view: no memory is taken until something is written."""
        if self.batch != 1:
            raise InputError(f"repeat needs a cache of batch 1, this one has {self.batch}.")
        return self._mapped(lambda t: t.expand(batch, *t.shape[1:]))

    def row(self, index: int) -> KVCache:
        """One row of the batch, as a cache of batch 1. Raises InputError for a row that is not there."""
        if not 0 <= index < self.batch:
            raise InputError(f"row {index} of a cache of batch {self.batch} (0 to {self.batch - 1}).")
        return self._mapped(lambda t: t[index : index + 1])

    def take(self, slots: Sequence[int] | Int[Tensor, " slot"]) -> KVCache:
        """These slots, in the given order, at the positions they had; a slot may be named twice. `end` stays."""
        index = torch.tensor(whole_numbers("slots", slots), dtype=torch.long)
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < len(self):
            raise InputError(f"slots {int(index.min())} to {int(index.max())} of a cache of {len(self)}.")
        return self._mapped(
            lambda t: t.index_select(min(2, t.ndim - 1), index.to(t.device)), positions=self.positions[index]
        )

    def _mapped(self, change: Callable[[Tensor], Tensor], **more: Any) -> KVCache:
        """The cache with `change` applied to keys, values and biases of every layer, and to the token ids."""
        changed = {
            "keys": tuple(map(change, self.keys)),
            "values": tuple(map(change, self.values)),
            "bias": None if self.bias is None else tuple(None if b is None else change(b) for b in self.bias),
            "token_ids": change(self.token_ids),
        }
        return replace(self, **{**changed, **more})

    # --- patch -----------------------------------------------------------------------------------------------------

    def patched(self, sites: Site | Iterable[Site], donor: KVCache) -> KVCache:
        """This cache with the K, V (or only one of them) of `sites` copied from `donor`.

        A key's bias goes with the key: it decides how the key is attended to. `end` and token ids stay.

        Raises InputError when a site lies outside either cache, or when donor and base hold a patched key at
        different rotary positions (move the donor first).
        """
        sites = (sites,) if isinstance(sites, Site) else tuple(sites)
        check_donor(self, donor, sites)
        keys, values = list(self.keys), list(self.values)
        parts = [("k", keys, donor.keys), ("v", values, donor.values)]
        bias = None
        if self.bias is not None or donor.bias is not None:
            bias = list(full_bias(self))
            parts.append(("k", bias, full_bias(donor)))
        for site in sites:
            if not site.positions:
                continue
            pos = torch.tensor(site.positions)
            every = range(self.n_kv_heads) if site.kv_heads is None else site.kv_heads
            heads = torch.tensor(every, dtype=torch.long)
            for layer in site.layers_of(self.n_layers):
                at = (
                    slice(None),
                    heads[:, None].to(self.keys[layer].device),
                    pos.to(self.keys[layer].device),
                )
                for part, mine, theirs in parts:
                    if part in site.part:
                        fresh = mine[layer].clone()
                        fresh[at] = theirs[layer][at].to(fresh.device, fresh.dtype)
                        mine[layer] = fresh
        return replace(self, keys=tuple(keys), values=tuple(values), bias=None if bias is None else tuple(bias))

    # --- move ------------------------------------------------------------------------------------------------------

    def placed(self, positions: Int[Tensor, " pos"]) -> KVCache:
        """Keys turned from the positions they are at to `positions`; values as they are. One rotation, in float32.

        Rotation error adds up when a cast cache is moved again and again: keep the original and place that.
        """
        positions = indices("positions", positions)
        if positions.shape != self.positions.shape:
            raise InputError(f"{positions.numel()} positions given for a cache of {len(self)} slots.")
        delta = positions - self.positions
        if not bool(delta.any()):
            return self
        return replace(
            self,
            keys=tuple(rotate(k, delta, layer) for k, layer in zip(self.keys, self.rope.layers, strict=True)),
            positions=positions,
            end=int(positions.max()) + 1 + (self.end - 1 - int(self.positions.max())),
        )

    def moved(self, offset: int) -> KVCache:
        """Every key turned `offset` positions later (earlier when negative)."""
        return self.placed(self.positions + offset) if len(self) else self

    def unrotated(self) -> KVCache:
        """Keys without their position: turned back to position 0, where the rotation is the identity."""
        return self.placed(torch.zeros_like(self.positions))

    # --- carry -----------------------------------------------------------------------------------------------------

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> KVCache:
        """Keys, values and biases on another device or in another dtype."""
        return self._mapped(lambda t: t.to(device=device, dtype=dtype), token_ids=self.token_ids)

    def save(self, path: str | Path) -> Path:
        """Write one safetensors file (atomically); returns its path."""
        from kvnotes_interp.cachefile import write

        return write(self, Path(path))

    @classmethod
    def load(cls, path: str | Path, *, device: torch.device | str = "cpu") -> KVCache:
        """Read a file written by `save`. Raises InputError for a file that is not one."""
        from kvnotes_interp.cachefile import read

        return read(Path(path), device=device)


def indices(name: str, values: Any) -> Int[Tensor, ...]:
    """Whole numbers as a tensor of any shape. Raises InputError for a mask, for fractions and for texts."""
    if isinstance(values, str | bytes) or values is None:
        raise InputError(f"{name}={values!r}: give whole numbers.")
    given = torch.as_tensor(list(values) if isinstance(values, Iterator | range) else values)
    if given.numel() and (given.is_floating_point() or given.is_complex() or given.dtype == torch.bool):
        raise InputError(f"{name} are {given.dtype}; give whole numbers.")
    return given.to(torch.long)


def join(first: KVCache, second: KVCache, *, overlap: bool = False) -> KVCache:
    """`second` behind `first`. Causality goes by slot, rotary distance by position.

    Raises InputError when the caches come from different models, batches or dtypes, or when `second` does not start
    at or after `first.end`; `overlap=True` allows that (the naive join, with keys not moved).
    """
    if first.model_id != second.model_id or not first.rope.same_as(second.rope):
        raise InputError(
            f"these caches were written by different models ({first.model_id!r} and {second.model_id!r}); their keys "
            "cannot stand in one cache."
        )
    if first.batch != second.batch or first.dtype != second.dtype:
        raise InputError(
            f"cannot join batch {first.batch} {first.dtype} with batch {second.batch} {second.dtype}; "
            "use .repeat(batch=...) or .to(dtype=...) first."
        )
    if not overlap and len(second) and int(second.positions.min()) < first.end:
        raise InputError(
            f"the second cache starts at position {int(second.positions.min())}, before the first one's end "
            f"{first.end}. Move it there with .moved({first.end - int(second.positions.min())}), or pass overlap=True."
        )
    cat = lambda a, b: torch.cat((a, b), dim=2)  # noqa: E731
    return replace(
        first,
        keys=tuple(map(cat, first.keys, second.keys)),
        values=tuple(map(cat, first.values, second.values)),
        token_ids=torch.cat((first.token_ids, second.token_ids), dim=1),
        positions=torch.cat((first.positions, second.positions)),
        bias=_join_bias(first, second),
        end=max(first.end, second.end),
    )


def _join_bias(first: KVCache, second: KVCache) -> tuple[Tensor | None, ...] | None:
    if first.bias is None and second.bias is None:
        return None

    full = zip(full_bias(first), full_bias(second), strict=True)
    none = [all(c.bias is None or c.bias[layer] is None for c in (first, second)) for layer in range(first.n_layers)]
    return tuple(None if n else torch.cat(pair, dim=2) for n, pair in zip(none, full, strict=True))


def full_bias(cache: KVCache) -> tuple[Float[Tensor, "batch kv_head pos"], ...]:
    """The key bias of every layer; where there is none, zeros."""
    own = cache.bias or (None,) * cache.n_layers
    return tuple(
        key.new_zeros(key.shape[:3]) if bias is None else bias for key, bias in zip(cache.keys, own, strict=True)
    )


def _same_bias(a: tuple[Tensor | None, ...] | None, b: tuple[Tensor | None, ...] | None) -> bool:
    if a is None or b is None:
        return a is b
    return all(
        (x is None and y is None) or (x is not None and y is not None and torch.equal(x, y))
        for x, y in zip(a, b, strict=True)
    )
