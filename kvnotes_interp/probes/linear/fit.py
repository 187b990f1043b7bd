"""Held-out linear probes on a table of features: numbers in, numbers out, no model and no prompt.

A row is one prompt. Its *label* is the conclusion it should lead to, its *rival* the conclusion of the other prompt of
its pair. A probe is asked which of the two it reads (chance 0.5, whatever the number of classes). Rows of one group
(content) never stand on both sides of a split. (Notes, arXiv 2606.17107, "Linear decodability".)

What this does not prove: that the model *uses* what a probe reads (see the direction arms of `linear_decodability`);
nor, where the field's value alone fixes the conclusion, that more than the field's identity is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from sklearn.base import BaseEstimator, ClassifierMixin, TransformerMixin
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import StandardScaler

from kvnotes_interp.errors import ControlError, InputError

GRID = (1e-3, 1e-1, 1e1)  # inverse penalties that are tried inside a training fold
CLASSIFIERS = ("logistic", "mean_difference")


@dataclass(frozen=True)
class Samples:
    """What is known of each row, all `[row]`: see the module. `units` name the pair, `values` the field's text."""

    labels: ndarray
    rivals: ndarray
    groups: ndarray
    values: ndarray
    units: ndarray
    families: ndarray

    @classmethod
    def of(cls, rows: Sequence[dict[str, str]]) -> Samples:
        """From dictionaries with the keys label, rival, group, value, unit, family."""
        names = ("label", "rival", "group", "value", "unit", "family")
        return cls(*(np.array([row[name] for row in rows], dtype=object) for name in names))

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(sorted(set(self.labels)))

    def swapped(self, flip: Bool[ndarray, " row"]) -> Samples:
        """Labels and rivals exchanged where `flip` is true."""
        labels, rivals = np.where(flip, self.rivals, self.labels), np.where(flip, self.labels, self.rivals)
        return replace(self, labels=labels, rivals=rivals)


@dataclass(frozen=True)
class Fold:
    """Row numbers of one split. `name` is the held-out family, or the number of the fold."""

    train: Int[ndarray, " train"]
    test: Int[ndarray, " test"]
    name: str = ""


@dataclass(frozen=True)
class LinearProbe:
    """A linear reader of features: `scores = x @ weights.T + bias`, one column per class, the largest is read.

    `feature` and `layer` say what it was trained on ("residual", "keys" or "values"; layer -1: not said).
    """

    classes: tuple[str, ...]
    weights: Float[ndarray, "class d"]
    bias: Float[ndarray, " class"]
    feature: str = "residual"
    layer: int = -1

    def scores(self, x: Float[ndarray, "row d"]) -> Float[ndarray, "row class"]:
        """Score of every class."""
        return np.asarray(x, np.float64) @ self.weights.T + self.bias

    def margin(self, x: Float[ndarray, "row d"], labels: ndarray, rivals: ndarray) -> Float[ndarray, " row"]:
        """Score of each row's label minus that of its rival; NaN where the probe knows only one of them, or none."""
        column = {name: i for i, name in enumerate(self.classes)}
        own, other = (np.array([column.get(n, -1) for n in names]) for names in (labels, rivals))
        scores, rows = self.scores(x), np.arange(len(labels))
        return np.where((own < 0) | (other < 0), np.nan, scores[rows, own] - scores[rows, other])

    def prefers(self, x: Float[ndarray, "row d"], labels: ndarray, rivals: ndarray) -> Float[ndarray, " row"]:
        """1 where the label is read rather than the rival, 0 where it is not, 0.5 for a tie or an unknown class."""
        margin = self.margin(x, labels, rivals)
        return np.where(np.isnan(margin), 0.5, 0.5 + 0.5 * np.sign(np.nan_to_num(margin)))


class Span(TransformerMixin, BaseEstimator):
    """Coordinates of each row in the span of the training rows: a rotation, so that a penalised fit is the same.

    With fewer rows than dimensions the weights of a ridge-penalised classifier are a combination of the training rows,
    so that nothing outside their span can enter; a fit in `rows` instead of `d` dimensions is then much cheaper.
    """

    def fit(self, x: Float[ndarray, "row d"], y: Any = None) -> Span:
        """Find an orthonormal basis of the rows."""
        self.basis_ = np.linalg.qr(np.asarray(x).T)[0]
        return self

    def transform(self, x: Float[ndarray, "row d"]) -> Float[ndarray, "row rank"]:
        """Coordinates in that basis."""
        return x @ self.basis_


class NewtonLogistic(ClassifierMixin, BaseEstimator):
    """scikit-learn's LogisticRegression(C) by Newton steps: the same minimum, several times sooner on a few dozen rows.

    The minimum is unique (squared weights over 2 C plus the log loss; the intercept is free), and is reached to 1e-9 in
    the gradient. More than two classes: each against the rest.
    """

    def __init__(self, C: float = 1.0) -> None:
        self.C = C

    def fit(self, x: Float[ndarray, "row d"], y: ndarray) -> NewtonLogistic:
        """One minimum for two classes, else one per class."""
        self.classes_ = np.unique(y)
        inside = self.classes_ if len(self.classes_) > 2 else self.classes_[1:]
        found = np.stack([self._minimum(x, np.where(y == name, 1.0, -1.0)) for name in inside])
        self.coef_, self.intercept_ = found[:, :-1], found[:, -1]
        return self

    def _minimum(self, x: Float[ndarray, "row d"], sign: Float[ndarray, " row"]) -> Float[ndarray, " d+1"]:
        """Weights and intercept, from zero; a step that does not descend is halved."""
        ones = np.hstack([x, np.ones((len(x), 1))])
        penalty = np.append(np.full(x.shape[1], 1 / self.C), 0.0)

        def loss(w: ndarray) -> float:
            return float(np.logaddexp(0, -sign * (ones @ w)).sum() + 0.5 * (penalty * w * w).sum())

        w = np.zeros(ones.shape[1])
        now = loss(w)
        for _ in range(100):
            wrong = 1 / (1 + np.exp(np.clip(sign * (ones @ w), -500, 500)))
            gradient = penalty * w - ones.T @ (sign * wrong)
            if np.abs(gradient).max() < 1e-9:
                break
            hessian = (ones.T * (wrong * (1 - wrong))) @ ones + np.diag(penalty + 1e-12)
            step, size = np.linalg.solve(hessian, gradient), 1.0
            while size > 1e-6 and loss(w - size * step) > now:
                size /= 2
            w = w - size * step
            before, now = now, loss(w)
            if abs(before - now) <= 1e-15 * max(1.0, abs(now)):  # as low as rounding lets it
                break
        return w

    def decision_function(self, x: Float[ndarray, "row d"]) -> Float[ndarray, "row ..."]:
        """Log odds: of the second class where there are two `[row]`, else of each against the rest `[row class]`."""
        scores = x @ self.coef_.T + self.intercept_
        return scores[:, 0] if len(self.classes_) == 2 else scores

    def predict(self, x: Float[ndarray, "row d"]) -> ndarray:
        """The class of each row."""
        scores = self.decision_function(x)
        return self.classes_[scores.argmax(1) if scores.ndim == 2 else (scores > 0).astype(int)]


# --- splits ----------------------------------------------------------------------------------------------------------


def grouped_folds(
    samples: Samples, *, folds: int = 5, seed: int = 0, hold_out_values: bool | None = None
) -> tuple[list[Fold], bool]:
    """Split by group, never by row; returns the folds and whether field values were held out as well.

    Args:
        folds: at most this many; fewer where there are fewer groups.
        hold_out_values: leave pairs out of a training fold whose field has a value that its test fold has too. None:
            do so if every training fold keeps half of its rows and two classes. With False, or where that leaves too
            little, the field's identity may be what is read wherever it fixes the conclusion.

    Raises InputError with fewer than two groups.
    """
    names = sorted(set(samples.groups))
    if len(names) < 2:
        raise InputError(f"{len(names)} content(s): a held-out probe needs two or more. Take more pairs (n=...).")
    order = np.random.default_rng(seed).permutation(len(names))
    where: dict[str, int] = {}
    sizes = [0] * min(folds, len(names))
    for i in order:  # dealt to the fold with the fewest rows
        fold = sizes.index(min(sizes))
        where[names[i]] = fold
        sizes[fold] += int((samples.groups == names[i]).sum())
    owner = np.array([where[g] for g in samples.groups])
    plain = [Fold(np.flatnonzero(owner != f), np.flatnonzero(owner == f), str(f)) for f in range(len(sizes))]
    if hold_out_values is False:
        return plain, False
    strict = [replace(f, train=_without_values(samples, f)) for f in plain]
    enough = all(
        len(s.train) >= len(p.train) / 2 and len(set(samples.labels[s.train])) >= 2
        for s, p in zip(strict, plain, strict=True)
    )
    if hold_out_values and not enough:
        raise InputError(
            "hold_out_values=True leaves too few rows to train on: this family has few field values, and every fold "
            "needs them. Pass hold_out_values=False, and read the field_lookup control beside the accuracy."
        )
    return (strict, True) if enough else (plain, False)


def _without_values(samples: Samples, fold: Fold) -> Int[ndarray, " train"]:
    """Training rows of the pairs none of whose field values is tested: whole pairs, so that labels stay balanced."""
    tested = set(samples.values[fold.test].tolist())
    spoiled = {str(samples.units[i]) for i in fold.train if samples.values[i] in tested}
    return np.array([i for i in fold.train if samples.units[i] not in spoiled], dtype=int)


def family_folds(samples: Samples) -> list[Fold]:
    """Leave one family out. Raises InputError when the families do not share their conclusions."""
    folds = []
    for name in sorted(set(samples.families)):
        inside = samples.families == name
        fold = Fold(np.flatnonzero(~inside), np.flatnonzero(inside), str(name))
        missing = set(samples.labels[fold.test]) - set(samples.labels[fold.train])
        if missing:
            raise InputError(
                f"family {name!r} concludes {sorted(missing)[0]!r}, which no other family given here does: a probe "
                "trained on them cannot read it. Give families with the same conclusions, or one family at a time."
            )
        folds.append(fold)
    return folds


def row_folds(samples: Samples, *, folds: int = 5, seed: int = 0) -> list[Fold]:
    """A split by row. It leaks whatever rows of a group share, and exists only to show that leak."""
    owner = np.random.default_rng(seed).permutation(len(samples)) % folds
    return [Fold(np.flatnonzero(owner != f), np.flatnonzero(owner == f), str(f)) for f in range(folds)]


def check_disjoint(samples: Samples, folds: Sequence[Fold], *, values: bool) -> int:
    """The number of groups, pairs (and, with `values`, field values) on both sides of a fold: 0, or ControlError."""
    kinds = {"group": samples.groups, "pair": samples.units} | ({"field value": samples.values} if values else {})
    for kind, names in kinds.items():
        for fold in folds:
            both = set(names[fold.train]) & set(names[fold.test])
            if both:
                raise ControlError(
                    f"control 'folds_disjoint' failed: {kind} {sorted(map(str, both))[0]!r} is trained on and tested "
                    f"in fold {fold.name}; a held-out accuracy would measure memory. Split with grouped_folds."
                )
    return 0


# --- classifiers -----------------------------------------------------------------------------------------------------


def mean_difference(x: Float[ndarray, "row d"], labels: ndarray) -> LinearProbe:
    """Nearest class mean. For two classes: the difference of the means as direction, cut half-way between them."""
    classes = tuple(sorted(set(labels)))
    x = np.asarray(x, np.float64)
    means = np.stack([x[labels == name].mean(axis=0) for name in classes])
    return LinearProbe(classes, means, -0.5 * (means**2).sum(axis=1))


def pipeline(c: float = 1.0) -> Pipeline:
    """Standardise, rotate into the span of the training rows, logistic regression with inverse penalty `c`."""
    return Pipeline([("scale", StandardScaler()), ("span", Span()), ("logistic", NewtonLogistic(C=c))])


def logistic(x: Float[ndarray, "row d"], labels: ndarray, *, c: float = 1.0) -> LinearProbe:
    """Penalised logistic regression, its weights written in the coordinates of the features themselves."""
    return logistic_path(x, labels, (c,))[0]


def logistic_path(x: Float[ndarray, "row d"], labels: ndarray, grid: Sequence[float]) -> list[LinearProbe]:
    """One probe per penalty; standardising and rotating are the same for all of them and done once."""
    classes = tuple(sorted(set(labels)))
    x = np.asarray(x, np.float64)
    if len(classes) < 2:
        return [LinearProbe(classes, np.zeros((len(classes), x.shape[1])), np.zeros(len(classes)))] * len(grid)
    y = np.searchsorted(classes, labels.astype(str))
    steps = pipeline()
    scale, span = steps.named_steps["scale"], steps.named_steps["span"]
    z = steps[:-1].fit_transform(x, y)
    out = []
    for c in grid:
        head = steps.named_steps["logistic"].set_params(C=c).fit(z, y)
        weights = (head.coef_ @ span.basis_.T) / scale.scale_
        bias = head.intercept_ - weights @ scale.mean_
        if len(classes) == 2:  # one row of weights, for the second class
            weights, bias = np.concatenate([0 * weights, weights]), np.concatenate([0 * bias, bias])
        out.append(LinearProbe(classes, weights, bias))
    return out


def choose_c(
    x: Float[ndarray, "row d"], samples: Samples, *, grid: Sequence[float] = GRID, folds: int = 3, seed: int = 0
) -> float:
    """The penalty with the best accuracy on held-out groups *of these rows*; of equals the strongest penalty.

    Give it training rows only. With fewer than two groups there is nothing to choose by: the middle of the grid.
    """
    if len(grid) == 1 or len(set(samples.groups)) < 2:
        return sorted(grid)[len(grid) // 2]
    inner, _ = grouped_folds(samples, folds=folds, seed=seed, hold_out_values=False)
    grid = sorted(grid)
    right = np.zeros(len(grid))
    for f in inner:
        probes = logistic_path(x[f.train], samples.labels[f.train], grid)
        right += [p.prefers(x[f.test], samples.labels[f.test], samples.rivals[f.test]).sum() for p in probes]
    return grid[int(right.argmax())]  # the first of equals


def subset(samples: Samples, rows: Int[ndarray, " kept"]) -> Samples:
    """Some of the rows."""
    return Samples(*(getattr(samples, name)[rows] for name in samples.__dataclass_fields__))


def trainer(name: str, *, grid: Sequence[float] = GRID, seed: int = 0) -> Callable[[ndarray, Samples], LinearProbe]:
    """A function that fits the named classifier to training rows, with everything it chooses chosen on them."""
    if name == "mean_difference":
        return lambda x, samples: mean_difference(x, samples.labels)

    def fit(x: ndarray, samples: Samples) -> LinearProbe:
        return logistic(x, samples.labels, c=choose_c(x, samples, grid=grid, seed=seed))

    return fit


def held_out(
    x: Float[ndarray, "row d"],
    samples: Samples,
    folds: Sequence[Fold],
    fit: Callable[[ndarray, Samples], LinearProbe],
) -> tuple[Float[ndarray, " row"], list[LinearProbe]]:
    """Whether each row's label is read by the probe that was not trained on it, and the probe of each fold."""
    x = np.asarray(x, np.float64)
    right, probes = np.full(len(samples), np.nan), []
    for fold in folds:
        probe = fit(x[fold.train], subset(samples, fold.train))
        right[fold.test] = probe.prefers(x[fold.test], samples.labels[fold.test], samples.rivals[fold.test])
        probes.append(probe)
    return right, probes
