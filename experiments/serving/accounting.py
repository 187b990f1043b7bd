"""What a prefix cache keeps, counted exactly: token ids in, cached and prefilled tokens out. No model, no server.

The rules are those of vLLM's automatic prefix caching. A prompt is cut into blocks of `block_size` tokens; the hash of
a block covers its tokens *and* the hash of the block before it, so one changed token changes every later hash. Only
full blocks hit, only from the start of the prompt on without a hole, and at least one token is always run, because the
first logits must come from somewhere. Blocks that no request holds stay until their room is needed: least recently
used first, the tail of a prompt before its head.

What it does not prove: anything about time. A hit share says how many tokens need no prefill, not how long the rest
takes.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvnotes_interp.errors import InputError

BLOCK_SIZE = 16
"""Tokens per block in vLLM unless it is told otherwise."""


@dataclass(frozen=True)
class Served:
    """One request: tokens of its prompt, and how many of them were already in the cache."""

    prompt: int
    cached: int

    @property
    def prefilled(self) -> int:
        """Tokens that had to be run."""
        return self.prompt - self.cached


@dataclass(frozen=True)
class Totals:
    """Sums over requests. `hit_share` is cached over prompt tokens, the ratio of vLLM's two counters."""

    requests: int
    prompt: int
    cached: int
    prefilled: int
    hit_share: float


def totals(served: Iterable[Served]) -> Totals:
    """Add up; a hit share of no tokens is NaN."""
    rows = list(served)
    prompt, cached = sum(r.prompt for r in rows), sum(r.cached for r in rows)
    return Totals(len(rows), prompt, cached, prompt - cached, cached / prompt if prompt else float("nan"))


def block_hashes(token_ids: Sequence[int], *, block_size: int = BLOCK_SIZE) -> tuple[bytes, ...]:
    """Chained hash of every full block: sha256 over the parent's hash and the block's token ids.

    A last block that is not full has no hash. Equal hashes at a place mean equal tokens from the start to that place.
    """
    _check(block_size)
    hashes: list[bytes] = []
    parent = b""
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        text = ",".join(str(int(i)) for i in token_ids[start : start + block_size])
        parent = hashlib.sha256(parent + b"|" + text.encode()).digest()
        hashes.append(parent)
    return tuple(hashes)


def replay(
    prompts: Iterable[Sequence[int]],
    *,
    block_size: int = BLOCK_SIZE,
    capacity: int | None = None,
    output_tokens: int = 0,
) -> list[Served]:
    """Serve prompts one after another and count what each found in the cache.

    Args:
        prompts: token ids of each request, in the order of service.
        block_size: tokens per block.
        capacity: blocks that fit; None for no limit.
        output_tokens: tokens generated for each request; their blocks take room, and no prompt here ever matches them.

    Requests do not overlap: with several in flight, blocks that are held cannot be evicted, so a small cache keeps less
    than is counted here. Without a capacity the overlap makes no difference to the hits, except for requests that start
    before the first one with their prefix has run.

    Raises:
        InputError: a block size below 1, or a request that does not fit into the cache.
    """
    _check(block_size)
    # Block numbers that no request holds, next to be used first, with the hash of what they still hold.
    free: OrderedDict[int, bytes | None] = OrderedDict((i, None) for i in range(capacity or 0))
    where: dict[bytes, list[int]] = {}  # blocks by hash; a block that was computed twice stands twice
    made = len(free)
    served: list[Served] = []
    for number, ids in enumerate(prompts):
        _check_prompt(ids, number)
        hashes = block_hashes(ids, block_size=block_size)
        needed = -(-(len(ids) + output_tokens) // block_size)
        if capacity is not None and needed > capacity:
            raise InputError(
                f"prompt {number} needs {needed} blocks of {block_size} tokens and the cache has {capacity}: "
                "give more capacity or a shorter prompt."
            )
        held: list[tuple[int, bytes | None]] = []
        for found in hashes[: (len(ids) - 1) // block_size]:
            if not where.get(found):
                break
            block = where[found][0]
            del free[block]
            held.append((block, found))
        served.append(Served(len(ids), len(held) * block_size))
        for place in range(len(held), needed):
            if capacity is None:
                block, old, made = made, None, made + 1
            else:
                block, old = free.popitem(last=False)
            if old is not None:
                where[old].remove(block)
            own = hashes[place] if place < len(hashes) else None
            if own is not None:
                where.setdefault(own, []).append(block)
            held.append((block, own))
        free.update(reversed(held))  # the tail is let go first, so it is also used again first
    return served


def longest_common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences share from the start."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def replay_slot(prompts: Iterable[Sequence[int]], *, before: Sequence[int] = ()) -> list[Served]:
    """The same for a server with one slot that keeps the last prompt token by token, as llama.cpp does (`-np 1`).

    A hit is the longest common prefix with the prompt before, but never the whole prompt. `before` is what the slot
    holds at the start. What was generated after the last prompt is left out: no prompt here goes on with it.
    """
    served: list[Served] = []
    last = tuple(before)
    for ids in prompts:
        _check_prompt(ids, len(served))
        served.append(Served(len(ids), min(longest_common(last, ids), len(ids) - 1)))
        last = tuple(ids)
    return served


def _check(block_size: int) -> None:
    if block_size < 1:
        raise InputError(f"block_size={block_size}: a block holds at least one token; vLLM's default is {BLOCK_SIZE}.")


def _check_prompt(ids: Sequence[int], number: int) -> None:
    if not len(ids):
        raise InputError(f"prompt {number} has no tokens.")
