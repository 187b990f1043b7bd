"""Can the conclusion still be read, linearly, from what the decision token makes of a compact cache?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from kvnotes_interp.errors import InputError
from kvnotes_interp.probes.compaction.surviving import COLUMNS
from kvnotes_interp.probes.linear import controls, fit
from kvnotes_interp.probes.linear.features import Store, samples_of
from kvnotes_interp.tasks import EncodedPair


def decoded(
    store: Store, pairs: Sequence[EncodedPair], arms: Sequence[dict[str, Any]], *, draws: int, seed: int
) -> tuple[pd.DataFrame, str]:
    """(rows of one family, why there are none). One probe per arm, held out by content, trained on that arm's states.

    Readouts: "accuracy" (of the two conclusions of the pair; chance 0.5) and "shuffled", the same with labels shuffled.
    """
    family = pairs[0].pair.family
    if len(pairs) < 4 or len({pair.pair.content for pair in pairs}) < 2:
        return pd.DataFrame(columns=COLUMNS), f"{family}: {len(pairs)} pairs, too few for a held-out probe."
    try:
        samples, _ = samples_of(pairs)
    except InputError as error:
        return pd.DataFrame(columns=COLUMNS), str(error)
    folds, strict = fit.grouped_folds(samples, seed=seed)
    fit.check_disjoint(samples, folds, values=strict)
    flips = controls.swaps(samples, folds, draws=draws, seed=seed)
    train = fit.trainer("logistic", seed=seed)
    rows = []
    for about in arms:
        x = store.rows([pair.pair.key for pair in pairs], about["site"]).flatten(0, 1).double().numpy()
        right, _ = fit.held_out(x, samples, folds, train)
        chance = controls.shuffled(x, samples, folds, train, flips)
        for readout, values in (("accuracy", right), ("shuffled", chance)):
            for pair, value in zip(pairs, np.asarray(values).reshape(-1, 2).mean(axis=1), strict=True):
                names = {"pair": pair.pair.key, "content": pair.pair.content, "family": family}
                row = {**names, **about, "view": "decoded", "part": "residual"}
                rows.append({**row, "readout": readout, "value": float(value)})
    return pd.DataFrame(rows, columns=COLUMNS), ""
