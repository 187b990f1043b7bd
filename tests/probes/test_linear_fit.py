"""Held-out probes on features whose answer is known: separable, noise, and features that only carry the group."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.multiclass import OneVsRestClassifier
from sklearn.preprocessing import StandardScaler

from kvnotes_interp.errors import ControlError, InputError
from kvnotes_interp.probes.linear import controls as controls
from kvnotes_interp.probes.linear import fit as fit
from kvnotes_interp.probes.linear.summary import chance_bound


def paired(n: int = 40, *, per_group: int = 1, values: bool = True) -> fit.Samples:
    """n pairs; both prompts of a pair stand next to each other and have opposite labels."""
    rng = np.random.default_rng(3)
    rows = []
    for i in range(n):
        labels = ("yes", "no") if rng.random() < 0.5 else ("no", "yes")
        for side, (label, rival) in enumerate((labels, labels[::-1])):
            group = f"g{i // per_group}"
            value = f"v{i}.{side}" if values else label
            rows.append(
                {"label": label, "rival": rival, "group": group, "value": value, "unit": f"u{i}", "family": f"f{i % 2}"}
            )
    return fit.Samples.of(rows)


def grouped(n: int = 30, size: int = 4) -> fit.Samples:
    """Groups of `size` rows with one label for the whole group."""
    rows = []
    for g in range(n):
        label, rival = ("yes", "no") if g % 2 else ("no", "yes")
        for i in range(size):
            unit = f"{g}.{i}"
            rows.append({"label": label, "rival": rival, "group": str(g), "value": unit, "unit": unit, "family": "f"})
    return fit.Samples.of(rows)


def signs(samples: fit.Samples) -> np.ndarray:
    return np.where(samples.labels == "yes", 1.0, -1.0)


@pytest.mark.parametrize("name", fit.CLASSIFIERS)
def test_separable_is_read_and_noise_is_not(name: str) -> None:
    samples = paired(40)
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(80, 120))
    folds, held = fit.grouped_folds(samples)
    assert held
    right, _ = fit.held_out(noise, samples, folds, fit.trainer(name))
    assert abs(right.mean() - 0.5) < chance_bound(40)
    signal = noise + 3 * np.outer(signs(samples), rng.normal(size=120))
    right, _ = fit.held_out(signal, samples, folds, fit.trainer(name))
    assert right.mean() == 1.0
    flips = controls.swaps(samples, folds, draws=3, seed=0)
    shuffled = controls.shuffled(signal, samples, folds, fit.trainer(name), flips)
    assert abs(shuffled.mean() - 0.5) < chance_bound(40, 3)


@pytest.mark.parametrize("name", fit.CLASSIFIERS)
def test_features_that_only_carry_the_group_leak_through_a_split_by_row_and_not_by_group(name: str) -> None:
    samples = grouped()
    rng = np.random.default_rng(1)
    carried = rng.normal(size=(30, 64))  # one vector per group, which knows nothing of the label
    x = np.repeat(carried, 4, axis=0) + 0.1 * rng.normal(size=(120, 64))
    held, _ = fit.held_out(x, samples, fit.grouped_folds(samples)[0], fit.trainer(name))
    leaky = fit.row_folds(samples)
    leaked, _ = fit.held_out(x, samples, leaky, fit.trainer(name))
    assert abs(held.mean() - 0.5) < chance_bound(30)  # 30 groups are what is independent here
    assert leaked.mean() > 0.8
    with pytest.raises(ControlError, match=r"'folds_disjoint' failed: group '\d+' is trained on and tested in fold 0"):
        fit.check_disjoint(samples, leaky, values=False)
    assert fit.check_disjoint(samples, fit.grouped_folds(samples)[0], values=True) == 0


def test_mean_difference_is_the_one_made_by_hand() -> None:
    x = np.array([[1.0, 0.0], [3.0, 2.0], [-1.0, 0.0], [-3.0, -4.0]])
    labels = np.array(["b", "b", "a", "a"], dtype=object)
    probe = fit.mean_difference(x, labels)  # means: a (-2, -2), b (2, 1); direction (4, 3), cut at (0, -0.5)
    assert probe.classes == ("a", "b")
    where = np.array([[0.0, -0.5], [1.0, 1.0], [0.75, -1.5]])
    margin = probe.margin(where, np.array(["b"] * 3), np.array(["a"] * 3))
    assert margin == pytest.approx([0.0, 1.0 * 4 + 1.5 * 3, 0.0])
    assert list(probe.prefers(where, np.array(["b", "b", "a"]), np.array(["a", "a", "b"]))) == [0.5, 1.0, 0.5]
    assert list(probe.prefers(where[:1], np.array(["b"]), np.array(["unseen"]))) == [0.5]


@pytest.mark.parametrize("shape", [(40, 300), (60, 20)])
@pytest.mark.parametrize("classes", [2, 3])
def test_logistic_is_sklearns_without_the_rotation(shape: tuple[int, int], classes: int) -> None:
    rng = np.random.default_rng(2)
    x = rng.normal(size=shape) * rng.uniform(0.1, 9, size=shape[1]) + 5
    labels = np.array([f"c{i % classes}" for i in range(shape[0])], dtype=object)
    probe = fit.logistic(x, labels, c=0.05)
    scale = StandardScaler().fit(x)
    plain: Any = LogisticRegression(C=0.05, max_iter=5000, tol=1e-8, solver="newton-cholesky")
    plain = OneVsRestClassifier(plain) if classes > 2 else plain
    plain.fit(scale.transform(x), labels.astype(str))
    want = plain.decision_function(scale.transform(x))
    got = probe.scores(x)
    assert (got[:, 1] - got[:, 0] if classes == 2 else got) == pytest.approx(want, abs=1e-6)
    assert list(fit.pipeline(0.05).fit(x, labels.astype(str)).predict(x)) == list(plain.predict(scale.transform(x)))
    far = fit.logistic(x, labels, c=5.0).scores(x)
    assert np.abs(far - got).max() > 0.1  # the penalty does something, so agreement above says something


def test_nothing_is_fitted_to_test_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = paired(20)
    x = np.arange(40.0)[:, None] + np.zeros((1, 8))  # a row's first number is its own index
    seen: list[set[int]] = []
    real = StandardScaler.fit

    def spy(self: Any, rows: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append({int(v) for v in np.asarray(rows)[:, 0]})
        return real(self, rows, *args, **kwargs)

    monkeypatch.setattr(StandardScaler, "fit", spy)
    folds, _ = fit.grouped_folds(samples)
    for fold in folds:
        seen.clear()
        fit.held_out(x, samples, [fold], fit.trainer("logistic"))
        assert len(seen) == 4  # three inner folds, and the final fit
        assert all(rows <= set(fold.train.tolist()) for rows in seen)
        assert seen[-1] == set(fold.train.tolist())
        assert all(rows < seen[-1] for rows in seen[:-1])
    seen.clear()
    fit.held_out(x, samples, [fit.Fold(np.arange(40), np.arange(40))], fit.trainer("logistic"))
    assert not seen[-1] <= set(folds[0].train.tolist())  # the spy does see a leak


def test_folds_keep_pairs_groups_and_values_together() -> None:
    samples = paired(24, per_group=2)
    folds, held = fit.grouped_folds(samples, folds=5, seed=1)
    assert held
    assert sorted(np.concatenate([f.test for f in folds])) == list(range(48))
    for fold in folds:
        for names in (samples.groups, samples.units, samples.values):
            assert not set(names[fold.train]) & set(names[fold.test])
    again, _ = fit.grouped_folds(samples, folds=5, seed=1)
    assert all((a.test == b.test).all() for a, b in zip(folds, again, strict=True))
    # Two values only: holding them out would leave nothing, which "auto" does not do and True refuses.
    few = paired(24, values=False)
    assert fit.grouped_folds(few)[1] is False
    with pytest.raises(InputError, match="few field values"):
        fit.grouped_folds(few, hold_out_values=True)
    # A value that recurs takes its whole pair out of the training fold.
    rows = paired(24)
    rows.values[2] = rows.values[0]
    for fold in fit.grouped_folds(rows)[0]:
        if 0 in fold.test and 2 not in fold.test:
            assert not {2, 3} & set(fold.train.tolist())
    with pytest.raises(InputError, match="two or more"):
        fit.grouped_folds(paired(3, per_group=3))


def test_leave_one_family_out() -> None:
    samples = paired(20)
    folds = fit.family_folds(samples)
    assert [f.name for f in folds] == ["f0", "f1"]
    assert all(set(samples.families[f.test]) == {f.name} for f in folds)
    assert all(f.name not in set(samples.families[f.train]) for f in folds)
    samples.labels[samples.families == "f1"] = "other"
    with pytest.raises(InputError, match="'f0' concludes 'no', which no other family"):
        fit.family_folds(samples)


def test_controls_without_features() -> None:
    free, fixed = paired(24), paired(24, values=False)
    for samples, want in ((free, 0.5), (fixed, 1.0)):
        folds, _ = fit.grouped_folds(samples)
        assert controls.field_lookup(samples, folds).mean() == want
        assert controls.majority(samples, folds).mean() == 0.5
    lopsided = grouped(12)
    lopsided.labels[:], lopsided.rivals[:] = "yes", "no"
    assert controls.majority(lopsided, fit.grouped_folds(lopsided)[0]).mean() == 1.0


def test_swaps_exchange_half_of_every_fold_pair_by_pair() -> None:
    samples = paired(40)
    folds, _ = fit.grouped_folds(samples)
    flips = controls.swaps(samples, folds, draws=4, seed=7)
    assert (flips[:, 0::2] == flips[:, 1::2]).all()
    assert all(flip[f.test].mean() == 0.5 for flip in flips for f in folds)
    assert len({flip.tobytes() for flip in flips}) == 4
    swapped = samples.swapped(flips[0])
    assert ((swapped.labels == samples.rivals) == flips[0]).all()


def test_a_random_direction_reads_little_and_identity_is_told_from_the_conclusion() -> None:
    rng = np.random.default_rng(5)
    rows, x = [], []
    base = {value: rng.normal(size=64) for value in ("red", "blue", "green", "white")}
    answer = rng.normal(size=64)
    for i in range(48):  # the 2 x 2 design: value and conclusion are independent, every value in every fold
        value, other = [("red", "blue"), ("green", "white"), ("blue", "green"), ("white", "red")][i % 4]
        polarity = 1 if (i // 4) % 2 else -1
        for sign, name in ((polarity, value), (-polarity, other)):
            labels = ("yes", "no") if sign > 0 else ("no", "yes")
            about = {"group": f"g{i // 8}", "unit": f"u{i}", "family": "f", "value": name}
            rows.append({"label": labels[0], "rival": labels[1], **about})
            x.append((base[name], sign * answer))
    samples = fit.Samples.of(rows)
    folds, held = fit.grouped_folds(samples)
    assert not held
    assert controls.field_lookup(samples, folds).mean() == pytest.approx(0.5, abs=0.15)
    noise = 0.3 * rng.normal(size=(96, 64))
    value_only, conclusion_only = noise + [v for v, _ in x], noise + [c for _, c in x]
    train = fit.trainer("mean_difference")
    assert fit.held_out(conclusion_only, samples, folds, train)[0].mean() == 1.0
    assert controls.field_identity(value_only, samples, folds).mean() > 0.95
    assert fit.held_out(value_only, samples, folds, train)[0].mean() == pytest.approx(0.5, abs=0.2)
    assert controls.field_identity(conclusion_only, samples, folds).mean() == pytest.approx(0.5, abs=0.15)
    assert controls.random_direction(noise, samples, folds).mean() == pytest.approx(0.5, abs=0.1)


def test_the_chance_bound_is_what_it_says() -> None:
    assert chance_bound(25) == 0.5
    assert chance_bound(100, 4) == pytest.approx(0.125)
    rng = np.random.default_rng(0)
    means = rng.integers(0, 2, size=(20_000, 64)).mean(axis=1)
    assert (means - 0.5).max() < chance_bound(64)
    assert (means - 0.5).max() > chance_bound(64) / 2
