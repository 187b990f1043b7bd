"""What a held-out accuracy is held against: shuffled labels, the majority, random directions, the field's identity."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from numpy import ndarray
from sklearn.preprocessing import StandardScaler

from kvnotes_interp.probes.linear.fit import Fold, LinearProbe, Samples, held_out, mean_difference, subset


def swaps(samples: Samples, folds: Sequence[Fold], *, draws: int, seed: int) -> Bool[ndarray, "draw row"]:
    """Random exchanges of the two labels of a pair: in every fold, half of the pairs, one coin for both prompts.

    Labels are shuffled *within* pairs, and so within contents. Across contents would be no valid control: it would
    give both prompts of a pair the same label as often as not, and with it a task that differs in more than its labels.
    Half of each fold is exchanged, not each pair by a coin of its own: with coins, one fold's surplus is the other
    folds' training signal, and the control would wander about chance by more than its binomial error.
    """
    out = np.zeros((draws, len(samples)), dtype=bool)
    for draw in range(draws):
        rng = np.random.default_rng([seed, draw])
        for fold in folds:
            units = sorted(set(samples.units[fold.test]))
            n = len(units) // 2 + int(len(units) % 2 and rng.random() < 0.5)
            chosen = {units[i] for i in rng.permutation(len(units))[:n]}
            out[draw, fold.test] = [unit in chosen for unit in samples.units[fold.test]]
    return out


def shuffled(
    x: Float[ndarray, "row d"],
    samples: Samples,
    folds: Sequence[Fold],
    fit: Callable[[ndarray, Samples], LinearProbe],
    flips: Bool[ndarray, "draw row"],
) -> Float[ndarray, " row"]:
    """Accuracy of the same procedure on shuffled labels, tested on shuffled labels; the mean over draws."""
    runs = [held_out(x, samples.swapped(flip), folds, fit)[0] for flip in flips]
    return np.mean(runs, axis=0) if runs else np.full(len(samples), np.nan)


def random_direction(
    x: Float[ndarray, "row d"], samples: Samples, folds: Sequence[Fold], *, draws: int = 16, seed: int = 0
) -> Float[ndarray, " row"]:
    """Accuracy along one random direction of the standardised features, cut half-way between the class means.

    The direction knows nothing; only its sense and the cut are fitted. The mean over `draws` directions.
    """
    x = np.asarray(x, np.float64)
    directions = np.random.default_rng([seed, x.shape[1]]).normal(size=(x.shape[1], draws))
    right = np.full((draws, len(samples)), np.nan)
    for fold in folds:
        scale = StandardScaler().fit(x[fold.train])
        train, test = (np.asarray(scale.transform(x[rows])) @ directions for rows in (fold.train, fold.test))
        labels = samples.labels[fold.train]
        means = {name: train[labels == name].mean(axis=0) for name in set(labels)}  # [draw]
        unknown = np.full(draws, np.nan)
        for i, along in zip(fold.test, test, strict=True):  # nearest mean on every line at once
            own, rival = (means.get(names[i], unknown) for names in (samples.labels, samples.rivals))
            gap = (along - rival) ** 2 - (along - own) ** 2
            right[:, i] = 0.5 + 0.5 * np.sign(np.nan_to_num(gap))
    return right.mean(axis=0)


def majority(samples: Samples, folds: Sequence[Fold]) -> Float[ndarray, " row"]:
    """Accuracy of always reading the label that is more frequent in training."""
    return _by_counts(samples, folds, lambda train, i: train)


def field_lookup(samples: Samples, folds: Sequence[Fold]) -> Float[ndarray, " row"]:
    """Accuracy of a table from the field's value to the conclusion, filled in training.

    1 where the field's identity fixes the conclusion and is seen in training: an accuracy of 1 then says nothing more.
    0.5 where values are held out, or where field and conclusion are independent (the 2 x 2 design).
    """
    return _by_counts(samples, folds, lambda train, i: subset(train, np.flatnonzero(train.values == samples.values[i])))


def _by_counts(
    samples: Samples, folds: Sequence[Fold], seen: Callable[[Samples, int], Samples]
) -> Float[ndarray, " row"]:
    right = np.full(len(samples), np.nan)
    for fold in folds:
        train = subset(samples, fold.train)
        for i in fold.test:
            labels = seen(train, i).labels
            gap = int((labels == samples.labels[i]).sum()) - int((labels == samples.rivals[i]).sum())
            right[i] = 0.5 + 0.5 * np.sign(gap)
    return right


def field_identity(x: Float[ndarray, "row d"], samples: Samples, folds: Sequence[Fold]) -> Float[ndarray, " row"]:
    """How well the field's *value* is read: is it this value rather than another one with the same conclusion?

    By nearest class mean over training rows of other contents; the share of same-conclusion values that the right one
    beats (chance 0.5). NaN where the value, or every other with its conclusion, is not in training: nothing to read by.
    Give folds that do not hold values out.
    """
    right = np.full(len(samples), np.nan)
    x = np.asarray(x, np.float64)
    for fold in folds:
        train = subset(samples, fold.train)
        probe = mean_difference(x[fold.train], train.values)
        concludes = set(zip(train.values, train.labels, strict=True))
        column: dict[Any, int] = {value: i for i, value in enumerate(probe.classes)}
        scores = probe.scores(x[fold.test])
        for row, i in enumerate(fold.test):
            own = samples.values[i]
            others = [v for v in probe.classes if v != own and (v, samples.labels[i]) in concludes]
            if own in column and others:
                gaps = scores[row, column[own]] - scores[row, [column[v] for v in others]]
                right[i] = float(np.mean(0.5 + 0.5 * np.sign(gaps)))
    return right


def plain_folds(samples: Samples, folds: Sequence[Fold]) -> list[Fold]:
    """The same test rows, trained on every row of another group: nothing is held out but the groups."""
    return [
        replace(fold, train=np.flatnonzero(~np.isin(samples.groups, list(set(samples.groups[fold.test])))))
        for fold in folds
    ]
