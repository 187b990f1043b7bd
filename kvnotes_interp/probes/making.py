"""How the two caches of a pair come to be: each prompt in one prefill, or by an operator from the pair's blocks.

A learned operator may put slots into the cache that hold no token (a packet's wrappers). The pair is then laid out
anew, one entry per *slot*, so that every site, region and token that a probe names is that of the cache at hand:
wrapper slots have the region "wrapper", and the `anchor` of a token is the same under every operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any, get_args

import torch

from kvnotes_interp import engine
from kvnotes_interp import operators as library
from kvnotes_interp.cache import KVCache
from kvnotes_interp.errors import InputError
from kvnotes_interp.operators.blocks import Cut, cut_pair, decision_start
from kvnotes_interp.tasks import EncodedPair

if TYPE_CHECKING:
    from kvnotes_interp.model import Model

TAILS = ("last", "suffix")
WRAPPER = "wrapper"


@dataclass(frozen=True)
class Making:
    """What a probe over pairs is asked to do with their caches.

    Attributes:
        operator: NAME or NAME@VALUE of `operators.OPERATORS`; None prefills each prompt in one pass.
        blocks: where an operator's prompt is cut, "sentences" or "documents"; see `operators.cut_pair`.
        tail: what is run on top of every patched cache: the "last" token only, as in the Notes paper, or the whole
            decision text ("suffix"), as a cache made beforehand is used. With "suffix" no site holds a token that was
            itself run on top of the field, so that what is found is in what the operator made.

    Raises InputError on a wrong choice, and on `blocks` without an operator to cut for.
    """

    operator: str | None = None
    blocks: str = "sentences"
    tail: str = "last"

    def __post_init__(self) -> None:
        if self.operator is not None:
            library.find(self.operator)
        if self.blocks not in get_args(Cut):
            raise InputError(f"blocks={self.blocks!r}: choose from {', '.join(get_args(Cut))}.")
        if self.operator is None and self.blocks != "sentences":
            raise InputError(f"blocks={self.blocks!r} says where an operator cuts; name one with operator=...")
        if self.tail not in TAILS:
            raise InputError(f"tail={self.tail!r}: choose from {', '.join(TAILS)}.")

    @property
    def request(self) -> dict[str, Any]:
        """What a run's request says of it: nothing for the default, else all of it, and a learned operator's hash."""
        if self == PREFILL:
            return {}
        named = {} if self.operator is None else library.adapters({self.operator: library.find(self.operator)})
        return {**vars(self), **({"adapters": named} if named else {})}

    @property
    def words(self) -> str:
        """For titles: what is not the default."""
        cut = "" if self.blocks == "sentences" else f", cut at {self.blocks}"
        made = "" if self.operator is None else f", caches by {self.operator}{cut}"
        return made + ("" if self.tail == "last" else ", whole suffix run on top")

    def aligned(self, pair: EncodedPair) -> EncodedPair:
        """The pair with the tail that this asks for."""
        return replace(pair, tail=pair.length - decision_start(pair)) if self.tail == "suffix" else pair


PREFILL = Making()


def caches_of(model: Model, pair: EncodedPair, making: Making) -> tuple[EncodedPair, tuple[int, ...], KVCache, KVCache]:
    """(the pair as it lies in the caches, slot of each of its tokens, old cache, new cache), without the tail.

    Raises InputError when the operator lays out the two prompts differently, or tears the field apart.
    """
    if making.operator is None:
        stop = pair.length - pair.tail
        both = engine.prefill(model, [list(pair.old_ids[:stop]), list(pair.new_ids[:stop])])
        return pair, tuple(range(pair.length)), both.row(0), both.row(1)
    operator, caches, layouts = library.find(making.operator), [], []
    for side in ("old", "new"):
        blocks = cut_pair(pair, side=side, blocks=making.blocks)  # type: ignore[arg-type]
        made = operator(model, blocks)
        # Decision tokens that are not in the tail are run on the operator's cache, as in use.
        rest = blocks.suffix[: len(blocks.suffix) - pair.tail]
        cache = engine.extend(model, made.cache, rest)[0] if rest else made.cache
        held = range(len(made.cache)) if made.token_slots is None else made.token_slots
        layouts.append((*held, *range(len(made.cache), len(made.cache) + len(blocks.suffix))))
        caches.append(cache)
    old, new = caches
    if layouts[0] != layouts[1] or not torch.equal(old.positions, new.positions):
        raise InputError(
            f"operator {making.operator!r} lays out the two prompts of pair {pair.pair.key!r} differently; their "
            "caches cannot be patched from each other."
        )
    return laid_out(pair, layouts[0]), layouts[0], old, new


def laid_out(pair: EncodedPair, slots: Sequence[int]) -> EncodedPair:
    """The pair with one entry per slot: its tokens at `slots` (rising), and wrapper slots, of token id -1, between.

    Raises InputError when the field's tokens would not stand side by side.
    """
    slots = tuple(slots)
    if slots == tuple(range(pair.length)):
        return pair
    start, stop = slots[pair.field[0]], slots[pair.field[1] - 1] + 1
    if stop - start != pair.field[1] - pair.field[0]:
        raise InputError(f"pair {pair.pair.key!r}: slots stand inside the field, so it has no span of its own.")
    token_at = {slot: token for token, slot in enumerate(slots)}
    every = range(slots[-1] + 1)
    numbers = count()

    def spread(entries: Sequence[Any], wrapper: Any) -> tuple[Any, ...]:
        return tuple(entries[token_at[slot]] if slot in token_at else wrapper for slot in every)

    return replace(
        pair,
        old_ids=spread(pair.old_ids, -1),
        new_ids=spread(pair.new_ids, -1),
        field=(start, stop),
        tokens_old=spread(pair.tokens_old, f"[{WRAPPER}]"),
        tokens_new=spread(pair.tokens_new, f"[{WRAPPER}]"),
        regions=spread(pair.regions, WRAPPER),
        delimiter=spread(pair.delimiter, False),
        anchors=tuple(pair.anchors[token_at[s]] if s in token_at else f"{WRAPPER}:{next(numbers)}" for s in every),
        documents=spread(pair.documents, -1) if pair.documents else (),
    )
