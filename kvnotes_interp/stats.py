"""Intervals: a bootstrap over whole clusters for means and ratios, and Wilson's interval for proportions.

Pairs that share their content (the same sentence with another name in it) are not independent, so the unit that is
resampled is the content, and its number is shown beside the number of pairs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvnotes_interp.errors import InputError


@dataclass(frozen=True)
class Interval:
    """An estimate with its interval.

    `n` counts the values, `n_effective` the clusters that were resampled. `low` and `high` are NaN where no interval
    exists: with a single cluster nothing can be said about the spread between clusters.
    """

    mean: float
    low: float
    high: float
    n: int
    n_effective: int

    def to_dict(self) -> dict[str, Any]:
        """The five fields as a dictionary; NaN stays NaN."""
        return asdict(self)

    def __str__(self) -> str:
        bounds = "no interval" if math.isnan(self.low) else f"{self.low:.3f} to {self.high:.3f}"
        return f"{self.mean:.3f} ({bounds}; n = {self.n}, {self.n_effective} clusters)"


def bootstrap_mean(
    values: ArrayLike,
    clusters: Iterable[object] | None = None,
    *,
    n_boot: int = 2000,
    seed: int = 0,
    level: float = 0.95,
) -> Interval:
    """Mean of `values` with a percentile bootstrap interval over whole clusters.

    Args:
        values: finite numbers, one per pair.
        clusters: the cluster (content) of each value; None makes every value its own cluster.
        n_boot: number of bootstrap samples. seed: of the generator. level: coverage, between 0 and 1.

    The result does not depend on the order of the values. No values give NaN; one cluster gives a mean without bounds.
    """
    numbers = _numbers(values, "values")
    return bootstrap_ratio(numbers, np.ones_like(numbers), clusters, n_boot=n_boot, seed=seed, level=level)


def bootstrap_ratio(
    numerators: ArrayLike,
    denominators: ArrayLike,
    clusters: Iterable[object] | None = None,
    *,
    n_boot: int = 2000,
    seed: int = 0,
    level: float = 0.95,
) -> Interval:
    """Ratio of sums, sum(numerators) / sum(denominators), with the same cluster bootstrap as `bootstrap_mean`."""
    top, bottom = _numbers(numerators, "numerators"), _numbers(denominators, "denominators")
    if len(top) != len(bottom):
        raise InputError(f"{len(top)} numerators and {len(bottom)} denominators: one of each per pair.")
    _check(n_boot, level)
    names = [str(i) for i in range(len(top))] if clusters is None else [str(c) for c in clusters]
    if len(names) != len(top):
        raise InputError(f"{len(top)} values and {len(names)} clusters: give one cluster per value.")
    n = len(top)
    if n == 0:
        return Interval(math.nan, math.nan, math.nan, 0, 0)

    sums, counts = _cluster_sums(names, top, bottom)
    total = math.fsum(counts)
    mean = math.fsum(sums) / total if total else math.nan
    n_clusters = len(sums)
    if n_clusters < 2:
        return Interval(mean, math.nan, math.nan, n, n_clusters)
    # Drawing G clusters with replacement = how often each is drawn: one multinomial row per bootstrap sample.
    generator = np.random.default_rng(seed)
    times = generator.multinomial(n_clusters, np.full(n_clusters, 1 / n_clusters), size=n_boot)
    with np.errstate(divide="ignore", invalid="ignore"):
        means = (times @ sums) / (times @ counts)
    means = means[np.isfinite(means)]
    if not len(means):
        return Interval(mean, math.nan, math.nan, n, n_clusters)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(mean, float(low), float(high), n, n_clusters)


def wilson(successes: int, n: int, level: float = 0.95) -> Interval:
    """Wilson's score interval for a proportion of `successes` out of `n` independent trials."""
    _check(1, level)
    if not 0 <= successes <= n:
        raise InputError(f"successes={successes} of n={n}: it must lie between 0 and n.")
    if n == 0:
        return Interval(math.nan, 0.0, 1.0, 0, 0)
    z = NormalDist().inv_cdf((1 + level) / 2)
    share = successes / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    # At 0 and n the bound is exact; rounding must not put it a hair beside.
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return Interval(share, low, high, n, n)


def _numbers(values: ArrayLike, name: str) -> NDArray[np.float64]:
    numbers = np.asarray(values, dtype=np.float64).reshape(-1)
    if not np.isfinite(numbers).all():
        where = int(np.flatnonzero(~np.isfinite(numbers))[0])
        raise InputError(f"{name}[{where}] is {numbers[where]}: set such pairs aside before averaging.")
    return numbers


def _check(n_boot: int, level: float) -> None:
    if n_boot < 1:
        raise InputError(f"n_boot={n_boot}: at least one bootstrap sample is needed.")
    if not 0 < level < 1:
        raise InputError(f"level={level}: give a coverage between 0 and 1, such as 0.95.")


def _cluster_sums(
    names: Sequence[str], top: NDArray[np.float64], bottom: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sums of both arrays per cluster, clusters in the order of their names; fsum forgets the order of the values."""
    members: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        members.setdefault(name, []).append(index)
    ordered = sorted(members)
    return (
        np.array([math.fsum(top[members[name]]) for name in ordered]),
        np.array([math.fsum(bottom[members[name]]) for name in ordered]),
    )
