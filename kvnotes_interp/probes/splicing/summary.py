"""The summary of a splice-quality run: means per operator and number of documents, intervals over contents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from kvnotes_interp.probes.estimates import Estimates
from kvnotes_interp.results import Result, Summary
from kvnotes_interp.stats import Interval, bootstrap_mean, bootstrap_ratio

FULL = "full_recompute"
# Beside F1 and the answers kept; exact match and first-token accuracy are in `quality_table`.
READOUTS = ("kl", "top1_agreement", "logit_cosine", "layer_share", "speedup")
NOTES = (
    "f1: micro-F1 of the greedy answers, over all numbers of documents, and for each (d).",
    "kl (nats), top-1 agreement and logit cosine: to full recompute. The cosine alone says nothing.",
    "layer share: layer-tokens run, over full recompute's. speedup: of the time to the first token.",
    "kept: the same answer as full recompute, where that answers the question.",
)
_DISTANCES = ("kl", "top1_agreement", "logit_cosine", "speedup")  # trivial for full recompute itself


def summarise(frame: pd.DataFrame, tried: pd.DataFrame, *, model: str, arms: Sequence[str], seed: int) -> Summary:
    """Readout by readout, all operators: micro-F1 (also per number of documents), distances, cost, answers kept."""
    found = Estimates(seed=seed)
    counts = sorted(int(n) for n in frame["documents"].dropna().unique()) if "documents" in frame else []
    answered = set(tried.loc[tried["answered"].fillna(False).astype(bool), "pair"]) if "answered" in tried else set()
    values = _by_readout(frame)
    for n in (None, *(counts if len(counts) > 1 else ())):
        for arm in arms:
            _f1(found, f"f1_{arm}" if n is None else f"f1_{arm}_d{n}", values, arm, n, seed)
    for readout in READOUTS:
        for arm in arms:
            if (arm != FULL or readout not in _DISTANCES) and (arm, readout) in values:
                found.add(f"{readout}_{arm}", values[arm, readout])
    for arm in arms:
        if arm != FULL and (arm, "same_answer") in values:
            kept = values[arm, "same_answer"]
            found.add(f"kept_{arm}", kept[kept["pair"].isin(answered)])
    found.require(*(f"f1_{arm}" for arm in arms))
    for row in found.rows:
        row["note"] = row["note"] if row["n"] == 0 else ""
    summary = found.summary(f"splice quality on {model}", frame, tried)
    controls = tuple(replace(control, detail=_CONTROLS.get(control.name, "")) for control in summary.controls)
    known = f"full recompute answers {len(answered)} of {int(tried['competent'].sum())} questions."
    return replace(summary, controls=controls, notes=(*summary.notes, *NOTES, known))


_CONTROLS = {
    "full_recompute_twice": "logits, one pass against two",
    "all_repaired": "logits, every seam token recomputed",
    "own_place": "logits, a chunk spliced where it stood",
    "unmoved_keys_differ": "noise / effect of keys unmoved",
}


def quality_table(result: Result, *, seed: int | None = None) -> pd.DataFrame:
    """One row per operator, number of documents and readout: mean, low, high, n, n_effective.

    Readouts are micro_f1 and all that the frame holds; `size` is the mean number of tokens of prefix and documents.
    Intervals take the seed of the run unless another is given.
    """
    if seed is None:
        seed = int(result.manifest.get("request", {}).get("options", {}).get("seed", 0))
    frame = result.frame[result.frame["view"].isin(("quality", "cost", "ttft"))]
    out: list[dict[str, Any]] = []
    for (arm, _), here in frame.groupby(["site", "documents"], sort=False):
        about = {
            "site": arm,
            "operator": here["operator"].iloc[0],
            "share": here["share"].iloc[0],
            "documents": int(here["documents"].iloc[0]),
            "size": float(here.groupby("pair")["size"].first().astype(float).mean()),
        }
        values = {readout: rows for (_, readout), rows in _by_readout(here).items()}
        common, words = values.pop("f1_common"), values.pop("f1_words")
        found = {"micro_f1": _pooled(common, words, seed)}
        found |= {
            readout: bootstrap_mean(rows["value"].to_numpy(float), list(rows["content"]), seed=seed)
            for readout, rows in values.items()
        }
        out += [{**about, "readout": readout, **interval.to_dict()} for readout, interval in found.items()]
    return pd.DataFrame(out)


def _by_readout(frame: pd.DataFrame) -> dict[tuple[str, str], pd.DataFrame]:
    """(operator, readout) -> its rows, in the frame's order; controls left out."""
    if "documents" not in frame:
        return {}
    slim = frame.loc[frame["view"] != "control", ["site", "readout", "pair", "content", "documents", "value"]]
    return {(str(site), str(readout)): rows for (site, readout), rows in slim.groupby(["site", "readout"], sort=False)}


def _f1(
    found: Estimates, quantity: str, values: dict[tuple[str, str], pd.DataFrame], arm: str, n: int | None, seed: int
) -> None:
    """F1 pooled over the corpus, or over its questions of `n` documents."""
    if (arm, "f1_words") not in values:
        return
    common, words = (values[arm, name] for name in ("f1_common", "f1_words"))
    if n is not None:
        common, words = (rows[rows["documents"] == n] for rows in (common, words))
    found.rows.append({"quantity": quantity, **_pooled(common, words, seed).to_dict(), "note": ""})


def _pooled(common: pd.DataFrame, words: pd.DataFrame, seed: int) -> Interval:
    """A ratio of sums, resampled by content."""
    return bootstrap_ratio(
        common["value"].to_numpy(float), words["value"].to_numpy(float), list(common["content"]), seed=seed
    )
