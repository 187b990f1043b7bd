"""What an operator returns, and what is prepared for it beforehand: caches with an exact account of their cost."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvnotes_interp.cache import KVCache
from kvnotes_interp.errors import InputError
from kvnotes_interp.operators.blocks import Blocks


@dataclass(frozen=True)
class Made:
    """A cache of prefix and chunks, and what it cost. The suffix is not in it: every operator runs that alike.

    Attributes:
        cache: of `Blocks.context`; `cache.end` is the position of the suffix.
        recomputed_tokens: tokens of prefix and chunks that went through any layer when the request came.
        layer_tokens: the same, counted once per layer that a token went through.
        compiled_layer_tokens: what was run beforehand and can be reused by other requests; 0 when it was handed in.
        token_slots: the slots that hold the tokens of `Blocks.context`, in order, where the cache has others too (a
            packet's wrappers, token id -1); None: every slot is one token, in order.
    """

    cache: KVCache
    recomputed_tokens: int
    layer_tokens: int
    compiled_layer_tokens: int = 0
    token_slots: tuple[int, ...] | None = None

    @property
    def tokens(self) -> KVCache:
        """The cache with one slot per token, to be looked at and not to be run on: the positions are those it has."""
        if self.token_slots is None:
            return self.cache
        cache, slots = self.cache, list(self.token_slots)
        return replace(
            cache,
            keys=tuple(k[:, :, slots] for k in cache.keys),
            values=tuple(v[:, :, slots] for v in cache.values),
            token_ids=cache.token_ids[:, slots],
            positions=cache.positions[slots],
            bias=None if cache.bias is None else tuple(None if b is None else b[..., slots] for b in cache.bias),
        )


@dataclass(frozen=True)
class Compiled:
    """Caches made before the request: the prefix in its place, every chunk alone at positions 0, 1, ..."""

    prefix: KVCache | None
    chunks: tuple[KVCache, ...]

    @property
    def layer_tokens(self) -> int:
        """What it took to make them: tokens, counted once per layer."""
        return sum(len(part) * part.n_layers for part in self.parts)

    @property
    def parts(self) -> tuple[KVCache, ...]:
        """Prefix (if any) and chunks in order."""
        return self.chunks if self.prefix is None else (self.prefix, *self.chunks)

    def check(self, blocks: Blocks) -> None:
        """Raise InputError unless these are the caches of `blocks`' own tokens (wrapper slots, of none, aside)."""
        want = ([blocks.prefix] if blocks.prefix else []) + list(blocks.chunks)
        have = [tuple(token for token in part.token_ids[0].tolist() if token >= 0) for part in self.parts]
        if have != want:
            bad = next(
                (i for i, (a, b) in enumerate(zip(have, want, strict=False)) if a != b), min(len(have), len(want))
            )
            raise InputError(
                f"compiled part {bad} holds other tokens than the blocks ({len(have)} parts for {len(want)}); compile "
                "these blocks with operators.precompile(model, blocks), or the operator's own precompile."
            )
