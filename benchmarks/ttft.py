"""Time to the first token: a spliced prompt against full recompute of the same tokens, as the prompt grows."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.report import Table
from benchmarks.timing import Spread, interleaved

if TYPE_CHECKING:
    from kvnotes_interp.model import Model
    from kvnotes_interp.operators import Blocks

LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
PREFIX, SUFFIX = 32, 16  # tokens around the chunks; the prefix is compiled too, the suffix is always run
FULL = "full recompute"
_WARM = 1024  # tokens up to which a first run matters beside the work itself
ARMS = {"splice": "splice@0", "splice, 16 tokens per seam": "splice@16"}


def blocks_of(vocab: int, tokens: int, chunks: int, *, seed: int = 0) -> Blocks:
    """A prompt of `tokens` random tokens: a prefix, chunks of about equal length, a suffix."""
    from kvnotes_interp.operators import Blocks

    rng = random.Random(seed)
    ids = [rng.randrange(3, vocab) for _ in range(tokens)]
    cuts = np.linspace(PREFIX, tokens - SUFFIX, chunks + 1).round().astype(int).tolist()
    pieces = tuple(tuple(ids[a:b]) for a, b in pairwise(cuts))
    return Blocks(tuple(ids[:PREFIX]), pieces, tuple(ids[tokens - SUFFIX :]))


def run(
    model: Model,
    *,
    lengths: Sequence[int] = LENGTHS,
    chunks: Sequence[int] = (1, 8),
    rounds: int = 3,
    arms: dict[str, str] | None = None,
) -> tuple[tuple[Table, ...], dict[str, Any]]:
    """One table per number of chunks: seconds, full recompute over splice, and the slope of that ratio in log-log.

    Chunks are compiled beforehand and not timed. Rounds are interleaved, a length at a time; a ratio is taken within a
    round, so that what slows the machine slows both. The slope is of the median ratios against tokens: above zero, the
    speed-up grows with length.
    """
    arms = ARMS if arms is None else arms
    tables, raw = [], {}
    for n in chunks:
        seconds: dict[int, dict[str, list[float]]] = {}
        for tokens in lengths:
            seconds[tokens] = interleaved(_jobs(model, tokens, n, arms), rounds=rounds, device=model.device)
        ratios = {arm: {t: _ratios(seconds[t][FULL], seconds[t][arm]) for t in lengths} for arm in arms}
        slopes = {arm: slope({t: Spread.of(r).median for t, r in by.items()}) for arm, by in ratios.items()}
        rows = []
        for t in lengths:
            shown = [Spread.of(seconds[t][FULL]).text()]
            for arm in arms:
                shown += [Spread.of(seconds[t][arm]).text(), Spread.of(ratios[arm][t]).text(".2f")]
            rows.append((f"{t:,}", *shown))
        columns = ["tokens", f"{FULL}, s"]
        for arm in arms:
            columns += [f"{arm}, s", "speed-up"]
        notes = tuple(
            f"{arm}: the speed-up grows as tokens to the power {s:.2f}."
            for arm, s in slopes.items()
            if not math.isnan(s)
        )
        what = f"{n} chunk{'s' if n > 1 else ''}"
        about = f"Median (min-max) of {rounds} rounds; {PREFIX} tokens before, {SUFFIX} behind; chunks compiled before."
        tables.append(Table(f"Time to the first token, {what}", tuple(columns), tuple(rows), (*notes, about)))
        raw[f"chunks_{n}"] = {"seconds": seconds, "speedup": ratios, "slope": slopes}
    return tuple(tables), raw


def _jobs(model: Model, tokens: int, chunks: int, arms: dict[str, str]) -> dict[str, Callable[[int], object]]:
    """Every arm as a call from the compiled chunks to the first token; short ones have run once before."""
    from kvnotes_interp import compat, engine, operators

    blocks = blocks_of(model.shape.vocab, tokens, chunks)
    ready = operators.precompile(model, blocks)
    chosen = {FULL: operators.find("full_recompute"), **{arm: operators.find(name) for arm, name in arms.items()}}

    def job(operator: Any) -> Callable[[int], object]:
        options = {"compiled": ready} if operator.takes("compiled") else {}

        def first_token(_turn: int) -> int:
            cache = operator(model, blocks, **options).cache
            _, hidden = engine.extend(model, cache, blocks.suffix)
            return int(compat.unembed(model.hf, hidden[:, -1])[0].argmax())

        return first_token

    jobs = {arm: job(operator) for arm, operator in chosen.items()}
    for call in jobs.values() if tokens <= _WARM else ():
        call(0)
    return jobs


def _ratios(full: Sequence[float], arm: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(full, arm, strict=True)]


def slope(by_tokens: dict[int, float]) -> float:
    """Least-squares slope of log ratio against log tokens; NaN for fewer than two lengths."""
    if len(by_tokens) < 2:
        return math.nan
    x, y = (np.log(np.array(values, dtype=float)) for values in (list(by_tokens), list(by_tokens.values())))
    return float(np.polyfit(x, y, 1)[0])
