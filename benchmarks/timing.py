"""Timing several things against each other: in rounds, interleaved, in a fresh random order each round."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch


def synchronise(device: torch.device) -> None:
    """Wait until the device is idle, so that a clock read now means something."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(job: Callable[[], object], device: torch.device) -> float:
    """Wall time of one call."""
    synchronise(device)
    start = time.perf_counter()
    job()
    synchronise(device)
    return time.perf_counter() - start


def interleaved(
    jobs: Mapping[str, Callable[[int], object]], *, rounds: int, device: torch.device, seed: int = 0
) -> dict[str, list[float]]:
    """Wall seconds of every job in every round; a job is called with the number of the round."""
    rng, out = random.Random(seed), {key: [] for key in jobs}
    for turn in range(rounds):
        for key in rng.sample(sorted(jobs), len(jobs)):
            out[key].append(seconds(lambda key=key, turn=turn: jobs[key](turn), device))
    return out


@dataclass(frozen=True)
class Spread:
    """A few repetitions: median, least, most."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def text(self, form: str = ".3g") -> str:
        """`12.3 (11.9-12.8)`."""
        return f"{self.median:{form}} ({self.low:{form}}-{self.high:{form}})"
