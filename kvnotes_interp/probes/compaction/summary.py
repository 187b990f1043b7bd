"""The summary of a compaction-quality run: per compactor and ratio, with intervals over contents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from kvnotes_interp.probes.compaction.measure import FULL, NO_CONTEXT
from kvnotes_interp.probes.estimates import Estimates
from kvnotes_interp.results import Summary
from kvnotes_interp.stats import Interval, bootstrap_ratio

READOUTS = ("exact_match", "kl", "share", "peak_share", "prefills")
_OF_COMPACTED = ("kl", "prefills")  # trivial for the full cache, and without meaning where nothing is compacted
NOTES = (
    "f1: micro-F1 of the greedy answers. kl (nats): to the full cache.",
    "utilisation: (token F1 - no_context's) / (full's - no_context's), of the means.",
    "share: bytes kept. prefills: time to compact over that of a prefill, in this run.",
    "kept: the same answer as the full cache, where that answers the question.",
)
_CONTROLS = {
    "documents_matter": "noise / effect of leaving the documents out",
    "full_twice": "logits, one pass against two",
    "ratio_1": "logits, a budget of all slots",
    "ratio_1_in_parts": "logits, a budget of all slots in as many passes as were run",
}


def summarise(
    frame: pd.DataFrame, tried: pd.DataFrame, *, model: str, points: Sequence[str], query_aware: bool, seed: int
) -> Summary:
    """Readout by readout: the full cache, no context, then every compactor and ratio."""
    found = Estimates(seed=seed)
    arms = (FULL, NO_CONTEXT, *points)
    values = by_arm(frame)
    for arm in arms:
        if (arm, "f1_words") in values:
            common, words = values[arm, "f1_common"], values[arm, "f1_words"]
            found.rows.append({"quantity": f"f1_{arm}", **_ratio(common, words, seed).to_dict(), "note": ""})
    for arm in points:
        if (arm, "token_f1") in values:
            interval = utilisation(values, arm, seed=seed)
            found.rows.append({"quantity": f"utilisation_{arm}", **interval.to_dict(), "note": ""})
    for readout in READOUTS:
        for arm in points if readout in _OF_COMPACTED else arms:
            if (arm, readout) in values:
                found.add(f"{readout}_{arm}", values[arm, readout])
    answered = set(tried.loc[tried["answered"].fillna(False).astype(bool), "pair"]) if "answered" in tried else set()
    for arm in points:
        if (arm, "same_answer") in values:
            same = values[arm, "same_answer"]
            found.add(f"kept_{arm}", same[same["pair"].isin(answered)])
    found.require(*(f"f1_{arm}" for arm in arms))
    summary = found.summary(f"compaction quality on {model}", frame, tried)
    controls = tuple(replace(control, detail=_CONTROLS.get(control.name, "")) for control in summary.controls)
    parts = ()
    if "passes" in frame:
        parts = ("Np: read in N parts, compacted behind each. peak_share: bytes before a compaction, at most.",)
    known = f"the full cache answers {len(answered)} of {int(tried['competent'].sum())} questions."
    aware = ("query-aware: compactors that observe were shown the question.",) if query_aware else ()
    return replace(summary, controls=controls, notes=(*summary.notes, *NOTES, *parts, *aware, known))


def by_arm(frame: pd.DataFrame) -> dict[tuple[str, str], pd.DataFrame]:
    """(site, readout) -> its rows, one per question, in the frame's order; controls left out."""
    if "compactor" not in frame:
        return {}
    slim = frame.loc[frame["view"] != "control", ["site", "readout", "pair", "content", "value"]]
    return {(str(site), str(readout)): rows for (site, readout), rows in slim.groupby(["site", "readout"], sort=False)}


def utilisation(values: dict[tuple[str, str], pd.DataFrame], arm: str, *, seed: int) -> Interval:
    """How much of what the documents add to token F1 is left: 1 as the full cache, 0 as without documents.

    NaN where the documents add nothing.
    """
    own, full, floor = (values[site, "token_f1"].set_index("pair") for site in (arm, FULL, NO_CONTEXT))
    left, added = own["value"] - floor["value"], full["value"] - floor["value"]
    return bootstrap_ratio(left.to_numpy(float), added[left.index].to_numpy(float), list(own["content"]), seed=seed)


def _ratio(top: pd.DataFrame, bottom: pd.DataFrame, seed: int) -> Interval:
    numbers, among = (rows["value"].to_numpy(float) for rows in (top, bottom))
    return bootstrap_ratio(numbers, among, list(top["content"]), seed=seed)
