"""Linear decodability: is the conclusion readable, where, from which layer on, and is that more than the field?

Clean runs of both prompts of every pair are the samples, the answer is the label. A linear probe per place and layer is
trained on some contents and tested on others. Beside its accuracy stand the same procedure on shuffled labels, random
directions, the majority, a table from the field's value to the answer, and how well the field's value itself is read.
(Notes, arXiv 2606.17107, "Linear decodability", timing, staleness signature, direction.)

What this does not prove: that the model uses what a probe reads (the direction arms test one way of using it); that a
conclusion which no probe reads is absent, since it may be written non-linearly or over several tokens; or, in a family
whose field values each lead to one answer, that the probe reads a conclusion and not a property of the value. Where
values are held out (`field_lookup` is then 0.5) at least no value was seen in training; only the 2 x 2 design
(`tasks.polarity_pairs`) makes field and conclusion independent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy import ndarray

from kvnotes_interp import attention, engine, fingerprint
from kvnotes_interp.errors import InputError, nearest
from kvnotes_interp.metrics import Competence
from kvnotes_interp.probes.linear import controls, fit
from kvnotes_interp.probes.linear.features import (
    FEATURES,
    STATES,
    CacheOf,
    Store,
    final_sign,
    layers_of,
    lens_control,
    places_of,
    record,
    samples_of,
)
from kvnotes_interp.probes.linear.summary import summarise
from kvnotes_interp.probes.linear.use import direction_of, direction_rows, push_controls, signature
from kvnotes_interp.probes.making import Making
from kvnotes_interp.probes.measure import Case, Sweeper, identity_controls
from kvnotes_interp.probes.request import pairs_of, request_of, verb
from kvnotes_interp.probes.run import Session
from kvnotes_interp.progress import Bar
from kvnotes_interp.results import Result
from kvnotes_interp.results.tables import FRAME_COLUMNS
from kvnotes_interp.tasks import EncodedPair, Pair, encode_all

if TYPE_CHECKING:
    from pathlib import Path

    from kvnotes_interp.model import Model

COLUMNS = [*FRAME_COLUMNS, "classifier"]
LABELS = ("auto", "answer", "outcome")


@verb
def linear_decodability(
    model: Model,
    pairs: Iterable[Pair] | Pair,
    *,
    features: Sequence[str] = ("residual",),
    positions: Sequence[str] | None = None,
    max_aggregators: int = 4,
    layers: Sequence[int] | str | None = None,
    classifiers: Sequence[str] = fit.CLASSIFIERS,
    labels: str = "auto",
    folds: int = 5,
    hold_out_values: bool | None = None,
    draws: int = 2,
    caches: Mapping[str, CacheOf] | None = None,
    directions: Sequence[str] = ("aggregator", "decision"),
    direction_pairs: int = 12,
    direction_layers: int = 6,
    operator: str | None = None,
    blocks: str = "sentences",
    tail: str = "last",
    seed: int = 0,
    min_gap: float = 0.25,
    min_gap_noise: float = 50.0,
    out: str | Path | None = None,
    resume: bool = False,
    memory_budget: int | None = None,
    path: str = "auto",
    progress: bool = True,
) -> Result:
    """Train probes on clean runs of the competent pairs, place by place and layer by layer, and test them held out.

    Args:
        pairs: of one family, or of several with the same conclusions: then one family at a time is held out, too.
        features: "residual" (what a layer reads; layer n_layers: what the final norm reads), "keys" (turned back to
            position 0) and "values" (of all KV heads side by side).
        positions, max_aggregators: see `features.places_of`. None: before, field, rule_end, aggregators and
            decision, as far as all pairs have them.
        layers: None for up to 16 evenly spread ones, "all", or their numbers.
        classifiers: "logistic" (standardised, penalty chosen inside the training fold) and "mean_difference".
        labels: "answer", "outcome" or "auto", see `features.samples_of`. With more than two classes a probe
            still chooses between the two conclusions of the pair, so that chance is 0.5 for every family.
        folds, hold_out_values: see `fit.grouped_folds`.
        draws: shuffles of the labels per probe, and random vectors per direction.
        caches: name -> function from an opened `Case` to a `KVCache`, beside the four states: what does the probe read
            at the decision on top of what an operator made? Only the names go into the manifest.
        directions, direction_pairs, direction_layers: places, number of pairs and of layers for the direction arms;
            an empty `directions` leaves them out.
        operator, blocks, tail: make both caches by an operator; see `probes.making.Making`. Keys and values are then
            read from its caches at every place, the residual stream only where tokens are run on top ("decision").
        seed: of folds, shuffles, random vectors and the bootstrap. Other arguments as in `local_patching`.

    Rows (view, readout): "decodability" (accuracy, shuffled, selectivity = accuracy - shuffled per classifier;
    random_direction, field_identity, majority, field_lookup), "transfer" (accuracy on a held-out family), "lens"
    (margin_old and margin_new, `s` of either prompt by each layer's logit lens; commit_depth, from where on both have
    their final sign), "staleness" (reads_new, p_new), "direction" (recovery). `part` is the feature,
    `site` the place or cache, `value` the mean of a pair's two prompts.

    Raises ControlError when labels that were shuffled are read, when something is read before the field (both beyond
    `summary.chance_bound`, which has fewer than 4 chances in a million per place), when a fold leaks a group, or
    when an identity of patching or pushing fails; InputError on wrong options.
    """
    points = layers_of(layers, model.shape.n_layers)
    plan = {**_options(features, classifiers, labels, draws, folds), "layers": list(points)}
    pairs = pairs_of("linear_decodability", pairs)
    attention.require(model.hf)
    competence, making = Competence(min_gap, min_gap_noise), Making(operator, blocks, tail)
    states = {**STATES, **(caches or {})}
    options = {
        **plan,
        "positions": None if positions is None else list(positions),
        "max_aggregators": max_aggregators,
        "hold_out_values": hold_out_values,
        "caches": {name: fingerprint.function(make) for name, make in sorted((caches or {}).items())},
        "directions": list(directions),
        "direction_pairs": direction_pairs,
        "direction_layers": direction_layers,
        "seed": seed,
        "path": path,
        **making.request,
    }
    with Session(
        model,
        request_of("linear_decodability", model, pairs, {**options, **vars(competence)}),
        pairs,
        competence=competence,
        out=out,
        resume=resume,
        memory_budget=memory_budget,
        path=path,
        progress=progress,
        making=making,
    ) as session:
        if session.folder.complete:
            return session.folder.result()
        run = _Run(session, places_of(session.encoded, positions, max_aggregators=max_aggregators), points, seed)
        if session.encoded and "residual" in plan["features"] and not run.live:
            raise InputError(
                'no position is run on top of the operator\'s caches, so none has a residual stream: add "decision" to '
                "positions, or read keys and values only."
            )
        first, tried = session.run("features", lambda case: run.features(case, plan["features"], states), cost=_one)
        known = set(tried.loc[tried["competent"].astype(bool), "pair"])
        good = [pair for pair in session.encoded if pair.pair.key in known]
        frames, notes = [first], []
        if len(good) >= 4 and len({pair.pair.content for pair in good}) >= 2:
            task = _Task.of(good, labels=labels, folds=folds, hold_out_values=hold_out_values, draws=draws, seed=seed)
            notes += task.notes
            frames.append(run.fits(task, plan, list(states)))
            chosen = [name for name in directions if name in run.live]
            if chosen and direction_pairs > 0 and direction_layers > 0 and "residual" in plan["features"]:
                where = {pair.pair.key for pair in good[:direction_pairs]}
                below = [layer for layer in points if layer < model.shape.n_layers]
                spread = [
                    below[i] for i in np.unique(np.linspace(0, len(below) - 1, direction_layers).round().astype(int))
                ]
                frames.append(run.directions(task, chosen, spread, where, draws))
        else:
            notes.append(f"{len(good)} competent pairs: held-out probes need four or more, of two or more contents.")
        frame = pd.concat(frames, ignore_index=True)
        summary = summarise(
            frame, tried, model=model.name + making.words, seed=seed, n_layers=model.shape.n_layers,
            features=plan["features"], classifiers=plan["classifiers"], draws=draws, notes=notes,
        )  # fmt: skip
        return session.finish(frame, tried, summary)


def _one(_pair: EncodedPair) -> int:
    return 1


def _options(
    features: Sequence[str], classifiers: Sequence[str], labels: str, draws: int, folds: int
) -> dict[str, Any]:
    for name, given, known in (
        ("features", features, FEATURES),
        ("classifiers", classifiers, fit.CLASSIFIERS),
        ("labels", (labels,), LABELS),
    ):
        wrong = [value for value in given if value not in known]
        if wrong or not given:
            bad = wrong[0] if wrong else ""
            raise InputError(f"{name} holds {bad!r}; choose from {', '.join(known)}.{nearest(str(bad), known)}")
    if draws < 1 or folds < 2:
        raise InputError(f"draws={draws}, folds={folds}: at least one draw and two folds are needed.")
    chosen = {"features": list(dict.fromkeys(features)), "classifiers": list(dict.fromkeys(classifiers))}
    return {**chosen, "labels": labels, "draws": draws, "folds": folds}


@dataclass(frozen=True)
class _Task:
    """What is decided once for all probes of a run: samples, splits and shuffles."""

    pairs: Sequence[EncodedPair]
    samples: fit.Samples
    folds: list[fit.Fold]
    plain: list[fit.Fold]
    families: list[fit.Fold]
    flips: ndarray
    notes: list[str]

    @classmethod
    def of(
        cls,
        pairs: Sequence[EncodedPair],
        *,
        labels: str,
        folds: int,
        hold_out_values: bool | None,
        draws: int,
        seed: int,
    ) -> _Task:
        samples, kind = samples_of(pairs, labels)
        split, strict = fit.grouped_folds(samples, folds=folds, seed=seed, hold_out_values=hold_out_values)
        fit.check_disjoint(samples, split, values=strict)
        families = fit.family_folds(samples) if len(set(samples.families)) > 1 else []
        notes = [f"labels: {kind} ({len(samples.classes)} classes; a probe chooses between the two of the pair)."]
        if not strict:
            notes.append("field values are shared between folds: where field_lookup is above 0.5, so may accuracy be.")
        flips = controls.swaps(samples, split, draws=draws, seed=seed)
        return cls(pairs, samples, split, controls.plain_folds(samples, split), families, flips, notes)


class _Run:
    """The three stages: features of each pair, probes of each place and layer, directions on each pair."""

    def __init__(self, session: Session, places: dict[str, dict[str, int]], points: tuple[int, ...], seed: int) -> None:
        self.session, self.places, self.points, self.seed = session, places, points, seed
        # An operator's cache holds keys and values; a residual stream there is only of what is run on top of it.
        on_top = {pair.pair.key: pair.length - pair.tail for pair in session.encoded}
        prefilled = session.making.operator is None
        self.live = [n for n, at in places.items() if prefilled or all(slot >= on_top[key] for key, slot in at.items())]
        folder = session.folder.path
        self.store = Store(None if folder is None else folder / "parts" / "activations")

    def features(self, case: Case, features: Sequence[str], states: Mapping[str, CacheOf]) -> pd.DataFrame:
        """Record one pair; its rows are the controls and the logit lens of the decision token."""
        key = case.pair.pair.key
        slots = {name: case.slots[where[key]] for name, where in self.places.items()}
        live = [slots[name] for name in self.live]
        tensors = record(case, list(slots.values()), live=live, features=features, layers=self.points, states=states)
        self.store.put(key, tensors)
        margins = (tensors["lens"][..., 1] - tensors["lens"][..., 0]).double().numpy()  # [layer side]
        rows = lens_control(case, margins)
        # The later prompt of the two: the one whose answer the lens prefers in any case has its sign from layer 0 on.
        depth = final_sign(margins).max() / (len(margins) - 1)
        about = {**case.names, "view": "lens", "site": "decision", "part": "residual"}
        rows.append({**about, "readout": "commit_depth", "value": float(depth)})
        for layer, both in enumerate(margins):
            for side, value in zip(("old", "new"), both, strict=True):
                rows.append({**about, "layer": layer, "readout": f"margin_{side}", "value": float(value)})
        return pd.concat([identity_controls(case), pd.DataFrame(rows)], ignore_index=True)

    def fits(self, task: _Task, plan: Mapping[str, Any], states: Sequence[str]) -> pd.DataFrame:
        """Every probe; one part of the run per feature, place and layer."""
        n_layers = self.session.model.shape.n_layers
        cells = [
            (feature, place, layer)
            for feature in plan["features"]
            for place in self.places
            for layer in self.points
            if (place in self.live if feature == "residual" else layer < n_layers)
        ]
        folder, keys, loaded = self.session.folder, [pair.pair.key for pair in task.pairs], {}
        names = [f"{feature}.{place.replace(':', '_')}.{layer:03d}" for feature, place, layer in cells]
        with Bar(total=len(cells), description="probes", enabled=self.session.progress) as bar:
            for name, (feature, place, layer) in zip(names, cells, strict=True):
                if not folder.done("fits", name):
                    if feature not in loaded:
                        loaded = {feature: self.store.rows(keys, feature)}  # one kind at a time is in memory
                    among = self.live if feature == "residual" else list(self.places)
                    at = among.index(place), self.points.index(layer)
                    x = loaded[feature][:, at[0], at[1]].flatten(0, 1).double().numpy()
                    about = {"site": place, "part": feature, "layer": layer}
                    seen = {}
                    if feature == "residual" and place == "decision":
                        seen = {s: self.store.rows(keys, f"state/{s}")[:, at[1]].double().numpy() for s in states}
                    folder.put("fits", name, probe_rows(x, task, plan, about, seen, seed=self.seed))
                bar.advance()
        return folder.stage("fits", names)

    def directions(
        self, task: _Task, places: Sequence[str], layers: Sequence[int], where: set[str], draws: int
    ) -> pd.DataFrame:
        """The direction arms, on the pairs named in `where`; each pair's directions are fit on other contents."""
        keys = [pair.pair.key for pair in task.pairs]
        x = self.store.rows(keys, "residual")
        folder, session = self.session.folder, self.session

        def measure(case: Case) -> pd.DataFrame:
            row = 2 * keys.index(case.pair.pair.key) + 1
            fold = next(f for f in task.folds if row in f.test)
            fitted = {}
            for place in places:
                for layer in layers:
                    at = self.live.index(place), self.points.index(layer)
                    rows = x[:, at[0], at[1]].flatten(0, 1).double().numpy()
                    if (found := direction_of(rows, task.samples, fold, row)) is not None:
                        fitted[place, layer] = (*found, rows[row])
            known = {
                place: case.slots[self.places[place][case.pair.pair.key]]
                for place in places
                if (place, layers[0]) in fitted
            }
            pushes = direction_rows(case, known, layers, fitted, draws=draws, seed=self.seed)
            return pd.concat([pd.DataFrame(push_controls(case)), pushes], ignore_index=True)

        chosen = [pair for pair in task.pairs if pair.pair.key in where]
        with Bar(total=len(chosen), description="directions", enabled=session.progress) as bar:
            for pair in chosen:
                if not folder.done("directions", pair.pair.key):
                    case = session.open_case(pair, Sweeper(session.memory_budget, session.path))
                    folder.put("directions", pair.pair.key, measure(case))
                bar.advance()
        return folder.stage("directions", [pair.pair.key for pair in chosen])


def probe_rows(
    x: ndarray,
    task: _Task,
    plan: Mapping[str, Any],
    about: Mapping[str, Any],
    states: Mapping[str, ndarray],
    *,
    seed: int,
) -> pd.DataFrame:
    """All rows of one place and layer: `x` `[2*pair d]`, old and new prompt of each pair in turn."""
    samples, rows = task.samples, []

    def add(values: ndarray, readout: str, *, view: str = "decodability", classifier: str = "", **more: Any) -> None:
        for pair, value in zip(task.pairs, values, strict=True):
            names = {"pair": pair.pair.key, "content": pair.pair.content, "family": pair.pair.family}
            if not np.isnan(value):
                row = {**names, "view": view, **about, **more, "classifier": classifier}
                rows.append({**row, "readout": readout, "value": float(value)})

    def both(values: ndarray) -> ndarray:
        return values.reshape(-1, 2).mean(axis=1)

    for name in plan["classifiers"]:
        train = fit.trainer(name, seed=seed)
        right, probes = fit.held_out(x, samples, task.folds, train)
        chance = controls.shuffled(x, samples, task.folds, train, task.flips)
        for readout, values in (("accuracy", right), ("shuffled", chance), ("selectivity", right - chance)):
            add(both(values), readout, classifier=name)
        if task.families:
            add(both(fit.held_out(x, samples, task.families, train)[0]), "accuracy", view="transfer", classifier=name)
        for state, read in signature(probes, task.folds, samples, states).items():
            for readout, values in read.items():
                if readout == "reads_new" or name == "logistic":  # a nearest mean gives no probability
                    add(values, readout, view="staleness", classifier=name, site=state)
    add(both(controls.random_direction(x, samples, task.folds, seed=seed)), "random_direction")
    add(both(controls.field_identity(x, samples, task.plain)), "field_identity")
    if about["layer"] == plan["layers"][0]:  # these two see no features, and are the same everywhere
        add(both(controls.majority(samples, task.folds)), "majority")
        add(both(controls.field_lookup(samples, task.folds)), "field_lookup")
    return pd.DataFrame(rows, columns=COLUMNS)


def fit_probe(
    model: Model,
    pairs: Sequence[Pair],
    *,
    layer: int,
    position: str = "decision",
    feature: str = "residual",
    classifier: str = "logistic",
    labels: str = "auto",
    seed: int = 0,
) -> fit.LinearProbe:
    """One probe, trained on clean runs of all these pairs, to read other prompts and caches with (`apply_probe`).

    Its accuracy on the pairs it was trained on means nothing. Keep contents that you test on out of `pairs`.
    """
    _options((feature,), (classifier,), labels, 1, 2)
    layers_of([layer], model.shape.n_layers)
    encoded, _ = encode_all(model.tokenizer, pairs)
    places = places_of(encoded, [position])
    samples, _ = samples_of(encoded, labels)
    x = []
    for pair in encoded:
        slot = next(iter(places.values()))[pair.pair.key]
        seen = engine.capture(model, None, [list(pair.old_ids), list(pair.new_ids)], slots=(slot,))
        if feature == "residual":
            assert seen.residual is not None
            x.append(seen.residual[layer, :, 0])
        else:
            from kvnotes_interp.probes.linear.features import cached_features

            x.append(cached_features(seen.cache, [slot], [layer])[feature == "values"][0, 0])
    train: Callable[..., fit.LinearProbe] = fit.trainer(classifier, seed=seed)
    probe = train(np.concatenate([part.double().numpy() for part in x]), samples)
    return replace(probe, feature=feature, layer=layer)
