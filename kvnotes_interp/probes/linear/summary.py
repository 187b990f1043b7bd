"""From the rows of a linear run to its summary: accuracies at layers chosen elsewhere, depths, states, controls."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from kvnotes_interp.errors import ControlError
from kvnotes_interp.probes.estimates import Estimates
from kvnotes_interp.results import Control, Summary
from kvnotes_interp.stats import Interval

SHORT = {"mean_difference": "_means"}
WRITTEN = 0.9  # the held-out accuracy at which a conclusion counts as written [N]


def chance_bound(n_pairs: int, draws: int = 1) -> float:
    """How far above 0.5 a control's accuracy may lie: 2.5 / sqrt(n_pairs * draws), five binomial standard errors.

    Under chance, a pair's accuracy is independent of the labels trained on and has mean 0.5; by Hoeffding's bound its
    mean over n pairs lies this far above with probability below exp(-12.5) = 4e-6. Averaging over layers changes
    nothing of that bound. From 0.5 upwards the control could not fail, so it is not made: `n_pairs * draws` must
    exceed 25.
    """
    return 2.5 / math.sqrt(n_pairs * draws) if n_pairs else math.inf


def layer_choice(rows: pd.DataFrame) -> dict[str, int]:
    """For each content, the layer with the highest mean value over all *other* contents; the median one of equals."""
    table = rows.groupby(["content", "layer"])["value"].agg(["sum", "count"]).reset_index()
    whole = table.groupby("layer")[["sum", "count"]].sum()
    out = {}
    for content, own in table.groupby("content"):
        rest = whole - own.set_index("layer")[["sum", "count"]].reindex(whole.index, fill_value=0)
        mean = (rest["sum"] / rest["count"]).round(9)  # equal means, whatever the order of the sum
        best = [int(str(layer)) for layer in mean.index[mean == mean.max()]]
        best = best or [int(str(layer)) for layer in whole.index]
        out[str(content)] = best[(len(best) - 1) // 2]
    return out


def at_layers(rows: pd.DataFrame, choice: Mapping[str, int]) -> pd.DataFrame:
    """Rows at the layer chosen for their content; one value per pair (the mean over draws)."""
    wanted = rows["content"].map(lambda content: choice.get(str(content), -1))
    here = rows[rows["layer"].astype("float64") == wanted.astype("float64")]
    return _per_pair(here)


def write_depth(
    rows: pd.DataFrame, n_layers: int, *, level: float = WRITTEN, n_boot: int = 1000, seed: int = 0
) -> Interval:
    """First layer with mean accuracy of at least `level`, over n_layers; NaN if none. Bootstrap over contents.

    0 is the embedding, 1 what the final norm reads. A resample that never gets there counts as deeper than every layer;
    where that reaches into the interval, its upper end is NaN.
    """
    wide = rows.pivot_table(index="content", columns="layer", values="value", aggfunc="sum")
    pairs = rows.drop_duplicates(["pair", "content"]).groupby("content")["pair"].count().reindex(wide.index)
    sums, counts = wide.to_numpy(float), pairs.to_numpy(float)
    depths = np.array([float(layer) for layer in wide.columns]) / n_layers

    def first(means: np.ndarray) -> np.ndarray:
        reached = means >= level - 1e-9
        return np.where(reached.any(-1), depths[reached.argmax(-1)], np.inf)

    n = len(counts)
    point = float(first(sums.sum(0) / counts.sum()))
    low, high = math.nan, math.nan
    if n > 1:
        times = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=n_boot)
        ends = np.sort(first((times @ sums) / (times @ counts)[:, None]))
        low, high = (float(ends[round(q * (n_boot - 1))]) for q in (0.025, 0.975))
    low, point, high = (value if math.isfinite(value) else math.nan for value in (low, point, high))
    return Interval(point, low, high, int(counts.sum()), n)


def aggregator_of(rows: pd.DataFrame) -> str | None:
    """The place that write depth is measured at: the last aggregator, else the end of the rule, else none."""
    have = set(rows["site"])
    return next((name for name in ("aggregator", "rule_end") if name in have), None)


def chance_controls(frame: pd.DataFrame, *, draws: int, title: str) -> tuple[tuple[Control, ...], list[str]]:
    """Shuffled labels are not read, and nothing is before the field: accuracy over all layers, place by place.

    Raises ControlError when a place lies above `chance_bound`. Returns the controls and notes on what was not testable.
    """
    rows = frame[frame["view"] == "decodability"]
    out, notes = [], []
    for name, here, more in (
        ("shuffled_labels", rows[rows["readout"] == "shuffled"], draws),
        ("nothing_before_field", rows[(rows["readout"] == "accuracy") & (rows["site"] == "before")], 1),
    ):
        if here.empty:
            continue
        n = here["pair"].nunique()
        bound = chance_bound(n, more)
        if bound >= 0.5:
            notes.append(f"control {name}: {n} pairs are too few for it to be able to fail; take more (n=...).")
            continue
        means = here.groupby(["site", "part", "classifier"])["value"].mean() - 0.5
        worst = float(means.max())
        if worst > bound:
            site, part, classifier = means.idxmax()  # type: ignore[misc]
            raise ControlError(
                f"control {name!r} failed ({title}): at {site!r}, {classifier} on {part} is right in {0.5 + worst:.3f} "
                f"of {n} pairs, over all layers; chance allows {0.5 + bound:.3f}. Something that is tested was trained "
                "on (check `content` of the family), or the labels follow something else than the field."
            )
        out.append(Control(name, True, max(worst, 0.0), bound, n, "accuracy above 0.5, worst place"))
    return tuple(out), notes


def summarise(
    frame: pd.DataFrame,
    tried: pd.DataFrame,
    *,
    model: str,
    seed: int,
    n_layers: int,
    features: Sequence[str],
    classifiers: Sequence[str],
    draws: int,
    notes: Sequence[str],
) -> Summary:
    """Quantities of the first feature and classifier, and the accuracies of the others."""
    found = Estimates(seed=seed)
    rows = frame[frame["view"] == "decodability"]
    title = f"linear decodability on {model}"
    if not rows.empty:
        for feature in features:
            for name in classifiers:
                first = feature == features[0] and name == classifiers[0]
                suffix = ("" if feature == features[0] else f"_{feature}") + SHORT.get(name, "")
                _accuracies(found, rows[rows["part"] == feature], name, suffix, full=first)
        _rest(found, frame, rows[rows["part"] == features[0]], classifiers[0], n_layers, seed)
    found.require("write_depth", "commit_depth")
    checked, untested = chance_controls(frame, draws=draws, title=title)
    summary = found.summary(title, frame, tried)
    every = (*summary.controls, *checked)
    if not rows.empty:
        every = (*every, Control("folds_disjoint", True, 0.0, 0.0, rows["pair"].nunique(), "contents on both sides"))
    more = ["accuracies are held out by content, at the layer that is best on the other contents.", *notes, *untested]
    return dataclasses.replace(summary, controls=every, notes=(*summary.notes, *more))


def _accuracies(found: Estimates, rows: pd.DataFrame, classifier: str, suffix: str, *, full: bool) -> None:
    mine = rows[rows["classifier"] == classifier]
    for site in dict.fromkeys(rows["site"]):
        here = mine[mine["site"] == site]
        accuracy = here[here["readout"] == "accuracy"]
        choice = layer_choice(accuracy)
        layers = sorted(choice.values())
        where = f"layer {layers[0]}" if layers[0] == layers[-1] else f"layers {layers[0]} to {layers[-1]}"
        found.add(f"accuracy_{site}{suffix}", at_layers(accuracy, choice), where if full else "")
        if full:
            found.add(
                f"selectivity_{site}", at_layers(here[here["readout"] == "selectivity"], choice), "minus shuffled"
            )


def _rest(found: Estimates, frame: pd.DataFrame, rows: pd.DataFrame, classifier: str, n_layers: int, seed: int) -> None:
    accuracy = rows[(rows["readout"] == "accuracy") & (rows["classifier"] == classifier)]
    place = "decision" if "decision" in set(accuracy["site"]) else str(accuracy["site"].iloc[-1])
    choice = layer_choice(accuracy[accuracy["site"] == place])
    for readout, note in (
        ("random_direction", f"{place}; chance 0.5"),
        ("field_identity", f"{place}; which value, given its conclusion"),
    ):
        found.add(readout, at_layers(rows[(rows["readout"] == readout) & (rows["site"] == place)], choice), note)
    for readout, note in (("majority", "no features"), ("field_lookup", "value to answer, from training")):
        found.add(readout, _per_pair(rows[rows["readout"] == readout]), note)
    moved = frame[(frame["view"] == "transfer") & (frame["classifier"] == classifier)]
    for site in dict.fromkeys(moved["site"]):
        here = moved[moved["site"] == site]
        found.add(f"transfer_{site}", at_layers(here, layer_choice(here)), "family held out")
    if (site := aggregator_of(accuracy)) is not None:
        depth = write_depth(accuracy[accuracy["site"] == site], n_layers, seed=seed)
        note = f"{site}: first layer with accuracy >= {WRITTEN}, 0 to 1"
        found.rows.append({"quantity": "write_depth", **depth.to_dict(), "note": note})
    lens = frame[(frame["view"] == "lens") & (frame["readout"] == "commit_depth")]
    found.add("commit_depth", _per_pair(lens), "logit lens: both prompts keep their final sign, 0 to 1")
    states = frame[
        (frame["view"] == "staleness") & (frame["readout"] == "reads_new") & (frame["classifier"] == classifier)
    ]
    # Which of field and note is read changes from layer to layer (the figure shows it): the last is nearest the act.
    last = states[states["layer"] == states["layer"].max()]
    for state in dict.fromkeys(last["site"]):
        found.add(f"reads_new_{state}", _per_pair(last[last["site"] == state]), "decision, last layer")
    pushes = frame[(frame["view"] == "direction") & (frame["readout"] == "recovery")]
    for site in dict.fromkeys(pushes["site"]):
        for arm, note in (("add", "old prompt, direction added"), ("remove", "new prompt, taken out; 1: no effect")):
            here = pushes[(pushes["site"] == site) & (pushes["arm"] == arm)]
            size = here.assign(value=-here["value"]) if arm == "remove" else here
            best = layer_choice(size)
            found.add(f"direction_{arm}_{site}", at_layers(here, best), note)
            noise = pushes[(pushes["site"] == site) & (pushes["arm"] == f"{arm}_random")]
            found.add(f"random_{arm}_{site}", at_layers(noise, best), "same length")


def _per_pair(rows: pd.DataFrame) -> pd.DataFrame:
    return rows.groupby(["pair", "content"])[["value"]].mean().reset_index() if not rows.empty else rows
