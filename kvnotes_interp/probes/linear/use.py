"""Using a fitted probe: reading any cache with it, and pushing a run along its direction.

A probe trained on clean runs reads the decision token's residual stream on top of *any* cache, whatever operator made
it: what does the model at its decision hold to be true? (Notes, arXiv 2606.17107: the staleness signature.) And a
direction that reads a conclusion is tried as a cause: added to the old prompt, or taken out of the new one, at one
place and layer, against random vectors of the same length.

What this does not prove: a direction that works need not be the model's own way of writing the note; one that fails
may fail for being added at one place only, where the note is spread over many.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from numpy import ndarray

from kvnotes_interp import engine
from kvnotes_interp.cache import KVCache
from kvnotes_interp.engine.budget import default_budget
from kvnotes_interp.errors import ControlError, InputError
from kvnotes_interp.metrics import recovery
from kvnotes_interp.probes.linear.features import cached_features, decision_residual
from kvnotes_interp.probes.linear.fit import Fold, LinearProbe, Samples, mean_difference, subset
from kvnotes_interp.probes.measure import Case
from kvnotes_interp.results.tables import FRAME_COLUMNS

if TYPE_CHECKING:
    from kvnotes_interp.model import Model

ARMS = ("add", "add_random", "remove", "remove_random")
_ROWS = 32  # most rows of one batch of pushes


def apply_probe(model: Model, probe: LinearProbe, cache: KVCache, tail: Sequence[int]) -> Float[ndarray, "batch class"]:
    """Scores of a probe for the last token of `tail`, run on top of any cache: a stale, edited or compacted one too.

    The columns are `probe.classes`. The probe must know its feature and layer, as those of `fit_probe` do.
    """
    if probe.layer < 0:
        raise InputError("this probe does not say which layer it reads; set LinearProbe.layer, or use fit_probe.")
    if probe.feature == "residual":
        x = decision_residual(model, cache, tail)[probe.layer]
    else:
        grown = engine.extend(model, cache, list(tail))[0]
        x = cached_features(grown, [len(grown) - 1], [probe.layer])[probe.feature == "values"][0, 0]
    return probe.scores(x.double().numpy())


def signature(
    probes: Sequence[LinearProbe],
    folds: Sequence[Fold],
    samples: Samples,
    states: Mapping[str, Float[ndarray, "pair d"]],
) -> dict[str, dict[str, Float[ndarray, " pair"]]]:
    """What the probe that has not seen a pair reads in that pair's decision token on top of each cache.

    Rows of `samples` alternate, old and new. Per state: "reads_new", 1 where the new conclusion is read and 0 where the
    old one is, and "p_new", the logistic of the margin between the two.
    """
    news = np.arange(1, len(samples), 2)
    out = {name: {key: np.full(len(news), np.nan) for key in ("reads_new", "p_new")} for name in states}
    for probe, fold in zip(probes, folds, strict=True):
        rows = np.array([i for i in fold.test if i % 2 == 1], dtype=int)
        labels, rivals = samples.labels[rows], samples.rivals[rows]
        for name, x in states.items():
            here = x[rows // 2]
            out[name]["reads_new"][rows // 2] = probe.prefers(here, labels, rivals)
            margin = np.clip(probe.margin(here, labels, rivals), -500, 500)
            out[name]["p_new"][rows // 2] = np.where(np.isnan(margin), 0.5, 1 / (1 + np.exp(-margin)))
    return out


# --- directions ------------------------------------------------------------------------------------------------------


def pushed(
    case: Case, side: str, slot: int, pushes: Sequence[tuple[int, torch.Tensor]], *, rows: int | None = None
) -> list[float]:
    """Scores `s` when a vector is added to the residual stream of one slot at one layer: one run per push.

    Args:
        side: "old" or "new", the prompt that is run.
        pushes: (layer, vector `[d_model]`); layer n_layers is behind the last one. Tokens after the slot are run
            again and see what the push wrote.
        rows: of one batch; None takes what the memory budget has room for (each row copies the cache), at most 32.
    """
    if rows is None:
        budget = case.sweeper.memory_budget or default_budget(case.model.device)
        rows = int(min(_ROWS, max(1, budget // (2 * case.base.nbytes))))
    base = case.base if side == "old" else case.donor
    ids = list(case.pair.old_ids if side == "old" else case.pair.new_ids)
    out: list[float] = []
    for start in range(0, len(pushes), rows):
        part = pushes[start : start + rows]
        add: dict[int, torch.Tensor] = {}
        for row, (layer, vector) in enumerate(part):
            add.setdefault(layer, vector.new_zeros(len(part), 1, len(vector)))[row, 0] = vector
        kept = min(slot, len(base))  # the tail is run on top, whatever of it stands before the slot
        prefix = base[:kept].repeat(batch=len(part)) if kept else None
        tokens: Any = ids[kept:] if kept else [ids] * len(part)
        edits = engine.Edits(residual=engine.ResidualPatch((slot,), add))
        run = engine.capture(case.model, prefix, tokens, slots=(len(ids) - 1,), want=(), edits=edits)
        logits = engine.answer_logits(case.model, run, case.answers)
        out += (logits[:, 1] - logits[:, 0]).tolist()
    return out


def push_controls(case: Case) -> list[dict[str, Any]]:
    """Two pushes whose effect is known, as control rows. Raises ControlError when one is off.

    zero_direction: adding nothing leaves the old score. exact_direction: adding exactly what the new prompt's decision
    token differs by, behind the last layer, gives the new score.
    """
    n, slot = case.model.shape.n_layers, case.pair.length - 1
    old, new = (decision_residual(case.model, cache, case.tail)[n, 0] for cache in (case.base, case.donor))
    zero, exact = pushed(case, "old", slot, [(n, torch.zeros_like(old)), (n, new - old)])
    rows = []
    for name, gap in (("zero_direction", abs(zero - case.old)), ("exact_direction", abs(exact - case.new))):
        if not gap <= case.tolerance:
            raise ControlError(
                f"control {name!r} failed on {case.model.name} ({case.model.dtype}), pair {case.pair.pair.key}: off by "
                f"{gap:.3g} logits, tolerance {case.tolerance:.3g}. A push along a direction does not do what it says."
            )
        rows += [
            {**case.names, "view": "control", "site": name, "readout": key, "value": value}
            for key, value in (("gap", gap), ("tolerance", case.tolerance))
        ]
    return rows


def direction_rows(
    case: Case,
    places: Mapping[str, int],
    layers: Sequence[int],
    fitted: Mapping[tuple[str, int], tuple[Float[ndarray, " d"], Float[ndarray, " d"], Float[ndarray, " d"]]],
    *,
    draws: int,
    seed: int,
) -> pd.DataFrame:
    """Recovery when the direction is added to the old prompt ("add") or taken out of the new one ("remove").

    Args:
        places: name -> slot. layers: residual points.
        fitted: (place, layer) -> the direction (mean of the new conclusion minus mean of the old one, over other
            contents), the midpoint of the two means, and the new prompt's own residual there.
        draws: random vectors per direction, each as long as what it stands against.

    "remove" takes away the new prompt's component along the direction, measured from the midpoint: what is left is
    undecided. Recovery 1 there means that nothing was lost.
    """
    out = []
    for name, slot in places.items():
        arms: dict[str, list[tuple[int, torch.Tensor, dict[str, Any]]]] = {"old": [], "new": []}
        for layer in layers:
            direction, midpoint, own = fitted[name, layer]
            unit = direction / max(float(np.linalg.norm(direction)), 1e-300)
            removal = -float((own - midpoint) @ unit) * unit
            rng = np.random.default_rng([seed, layer, *case.pair.pair.key.encode()])
            for side, arm, vector in (("old", "add", direction), ("new", "remove", removal)):
                arms[side].append((layer, torch.from_numpy(vector), {"arm": arm}))
                for draw in range(draws):
                    noise = rng.normal(size=len(vector))
                    noise *= float(np.linalg.norm(vector)) / float(np.linalg.norm(noise))
                    arms[side].append((layer, torch.from_numpy(noise), {"arm": f"{arm}_random", "draw": draw}))
        for side, pushes in arms.items():
            scores = pushed(case, side, slot, [(layer, vector) for layer, vector, _ in pushes])
            for (layer, vector, about), score in zip(pushes, scores, strict=True):
                row = {**case.names, "view": "direction", "site": name, "part": "residual", "layer": layer, **about}
                out.append({**row, "readout": "norm", "value": float(vector.norm())})
                out.append({**row, "readout": "recovery", "value": recovery(score, old=case.old, new=case.new)})
                out.append({**row, "readout": "logit_diff", "value": score})
    return pd.DataFrame(out, columns=[*FRAME_COLUMNS, "arm"])


def direction_of(
    x: Float[ndarray, "row d"], samples: Samples, fold: Fold, row: int
) -> tuple[Float[ndarray, " d"], Float[ndarray, " d"]] | None:
    """Mean of the row's label minus mean of its rival, over the fold's training rows, and the midpoint of the two.

    None where one of the two is not in training. `row` must be one of the fold's test rows.
    """
    if row not in set(fold.test.tolist()):
        raise InputError(f"row {row} is not held out in fold {fold.name}; its direction would have seen it.")
    probe = mean_difference(x[fold.train], subset(samples, fold.train).labels)
    if samples.labels[row] not in probe.classes or samples.rivals[row] not in probe.classes:
        return None
    own, other = (probe.weights[probe.classes.index(names[row])] for names in (samples.labels, samples.rivals))
    return own - other, (own + other) / 2
