from __future__ import annotations

import math

import numpy as np
import pytest

from kvnotes_interp.errors import InputError
from kvnotes_interp.stats import Interval, bootstrap_mean, bootstrap_ratio, wilson


def test_mean_of_independent_values_has_the_normal_interval() -> None:
    values = np.random.default_rng(1).normal(0.3, 1.0, size=2000)
    interval = bootstrap_mean(values)
    half = 1.96 * values.std() / math.sqrt(len(values))
    assert interval.mean == pytest.approx(values.mean())
    assert interval.low == pytest.approx(values.mean() - half, abs=0.005)
    assert interval.high == pytest.approx(values.mean() + half, abs=0.005)
    assert (interval.n, interval.n_effective) == (2000, 2000)


def test_repeating_every_value_inside_its_cluster_adds_no_certainty() -> None:
    values = np.random.default_rng(2).normal(size=20)
    names = [f"c{i:02d}" for i in range(20)]
    once = bootstrap_mean(values, names)
    often = bootstrap_mean(np.repeat(values, 50), np.repeat(names, 50))
    assert (often.low, often.high) == (pytest.approx(once.low), pytest.approx(once.high))
    assert (often.n, often.n_effective) == (1000, 20)
    naive = bootstrap_mean(np.repeat(values, 50))
    assert naive.high - naive.low < 0.3 * (often.high - often.low)


def test_two_clusters_give_the_exact_quantiles() -> None:
    # The bootstrap mean is 0, 0.5 or 1 with chances 1/4, 1/2, 1/4, so the 2.5 % and 97.5 % quantiles are 0 and 1.
    assert bootstrap_mean([0, 1], ["a", "b"]) == Interval(0.5, 0.0, 1.0, 2, 2)
    middle = bootstrap_mean([0, 1], ["a", "b"], level=0.4)
    assert (middle.low, middle.high) == (0.5, 0.5)


def test_coverage_of_the_clustered_interval() -> None:
    generator = np.random.default_rng(3)
    hits = 0
    for _ in range(200):
        centres = generator.normal(size=30)
        values = np.repeat(centres, 4) + generator.normal(0, 0.2, size=120)
        interval = bootstrap_mean(values, np.repeat(np.arange(30), 4), n_boot=400)
        hits += interval.low <= 0 <= interval.high
    assert hits / 200 > 0.88


def test_order_does_not_matter_and_the_seed_does() -> None:
    generator = np.random.default_rng(4)
    values, names = generator.normal(size=40), [f"c{i % 7}" for i in range(40)]
    order = generator.permutation(40)
    assert bootstrap_mean(values, names) == bootstrap_mean(values[order], [names[i] for i in order])
    assert bootstrap_mean(values, names) != bootstrap_mean(values, names, seed=1)


def test_degenerate_cases() -> None:
    assert bootstrap_mean([2.0, 2.0], ["a", "b"]) == Interval(2.0, 2.0, 2.0, 2, 2)
    empty = bootstrap_mean([])
    assert math.isnan(empty.mean)
    assert empty.n == 0
    one = bootstrap_mean([1.0, 3.0], ["a", "a"])
    assert (one.mean, one.n, one.n_effective) == (2.0, 2, 1)
    assert math.isnan(one.low)
    assert "no interval" in str(one)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: bootstrap_mean([1.0, math.nan]), r"values\[1\] is nan"),
        (lambda: bootstrap_mean([1.0], ["a", "b"]), "1 values and 2 clusters"),
        (lambda: bootstrap_mean([1.0], level=95), "level=95"),
        (lambda: bootstrap_mean([1.0], n_boot=0), "n_boot=0"),
        (lambda: bootstrap_ratio([1.0], [1.0, 2.0]), "1 numerators and 2 denominators"),
        (lambda: wilson(3, 2), "successes=3 of n=2"),
    ],
)
def test_wrong_use_names_the_value(call, words: str) -> None:
    with pytest.raises(InputError, match=words):
        call()


def test_ratio_of_sums_is_not_the_mean_of_ratios() -> None:
    assert bootstrap_ratio([1, 9], [1, 3], ["a", "b"]).mean == 2.5
    assert math.isnan(bootstrap_ratio([1, 1], [0, 0], ["a", "b"]).mean)


def test_wilson_against_known_values() -> None:
    # Newcombe 1998, table I, method 3 (score without continuity correction).
    for successes, n, low, high in [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ]:
        interval = wilson(successes, n)
        assert (interval.low, interval.high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))
    assert wilson(20, 20).high == 1.0
    assert (wilson(0, 0).low, wilson(0, 0).high) == (0.0, 1.0)
