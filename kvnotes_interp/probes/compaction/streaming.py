"""What an iterated stream holds behind every chunk: slots, bytes, and how large it was while the chunk was run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvnotes_interp.compact import Cache
from kvnotes_interp.operators.still.stream import passes
from kvnotes_interp.probes.answering import wait

if TYPE_CHECKING:
    from kvnotes_interp.model import Model
    from kvnotes_interp.operators.eviction import Compacted, Compactor


@dataclass
class _Watched:
    """The compactor, noting the bytes of what it is given."""

    compactor: Compactor
    given: int = 0

    def takes(self, option: str) -> bool:
        return self.compactor.takes(option)

    def __call__(self, model: Model, cache: Cache, *, budget: int, **options: Any) -> Compacted:
        self.given = cache.nbytes
        return self.compactor(model, cache, budget=budget, **options)


def stream_rows(
    model: Model, compactor: Compactor, token_ids: Sequence[int], *, chunk: int, budget: int
) -> list[dict[str, Any]]:
    """One row per chunk.

    `chunk`, `tokens` so far, `slots` (of the largest layer), `bytes` kept, `peak_bytes` before they were compacted,
    `whole_bytes` of a cache of all tokens, `seconds` for running and compacting the chunk. Bytes are of keys, values
    and biases; what the compactor itself works with is not in them.

    Raises InputError for no tokens, and for a chunk or budget below 1.
    """
    watched, rows = _Watched(compactor), []
    wait(model.device)
    start = time.perf_counter()
    for number, cache in enumerate(passes(model, watched, token_ids, chunk=chunk, budget=budget), 1):
        wait(model.device)
        now = time.perf_counter()
        rows.append(
            {
                "chunk": number,
                "tokens": cache.end,
                "slots": max(cache.slots),
                "bytes": cache.nbytes,
                "peak_bytes": watched.given,
                "whole_bytes": model.shape.kv_bytes(cache.end, bytes_per_number=model.dtype.itemsize),
                "seconds": now - start,
            }
        )
        start = time.perf_counter()
    return rows
