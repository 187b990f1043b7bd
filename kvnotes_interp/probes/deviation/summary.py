"""The summary of an attention-deviation run: means over chunks, then prompts, with intervals over contents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from kvnotes_interp.probes.estimates import Estimates
from kvnotes_interp.results import Summary
from kvnotes_interp.stats import bootstrap_ratio

FULL = "full_recompute"
READOUTS = ("kl", "top1_agreement", "answer_correct", "token_f1", "logit_cosine")


def summarise(frame: pd.DataFrame, tried: pd.DataFrame, *, model: str, operators: Sequence[str], seed: int) -> Summary:
    """One row per operator and quantity; deviations of full recompute are zero by definition and not listed."""
    found = Estimates(seed=seed)
    edge = frame["edge"].min() if "edge" in frame else None
    for name in operators:
        here = frame[frame["site"] == name]
        if name != FULL:
            maps = per_prompt(here[(here["view"] == "deviation") & (here["readout"] == "deviation")])
            found.add(f"deviation_{name}", maps, "within chunks, mean |difference| per token")
            for region in ("prefix", "interior", "suffix"):
                rows = here[(here["view"] == "region") & (here["readout"] == "deviation") & (here["region"] == region)]
                if edge is not None:
                    found.add(f"{region}_{name}", per_prompt(rows[rows["edge"] == edge]), f"edge ratio {edge:g}")
            for readout in ("total_variation", "nrmse", "cosine_distance", "mass_error"):
                rows = here[(here["view"] == "retrieval") & (here["readout"] == readout)]
                found.add(f"{readout}_{name}", per_prompt(rows))
            for part in ("k", "v"):
                rows = here[(here["view"] == "kv") & (here["readout"] == "angle") & (here["part"] == part)]
                found.add(f"{part}_angle_{name}", per_prompt(rows), "radians")
    for name in dict.fromkeys((FULL, *operators)):
        sink_ratio(found, frame[(frame["site"] == name) & (frame["view"] == "sink")], name, seed)
        for readout in READOUTS:
            # Of full recompute only what is not measured against itself.
            if name == FULL and readout not in ("answer_correct", "token_f1"):
                continue
            rows = frame[(frame["site"] == name) & (frame["view"] == "readout") & (frame["readout"] == readout)]
            found.add(f"{readout}_{name}", per_prompt(rows), "never alone" if readout == "logit_cosine" else "")
    found.require(*(f"deviation_{name}" for name in operators if name != FULL))
    summary = found.summary(f"attention deviation on {model}", frame, tried)
    controls = tuple(replace(control, detail=_CONTROLS.get(control.name, "")) for control in summary.controls)
    return replace(summary, controls=controls)


_CONTROLS = {
    "full_recompute_twice": "deviation of full recompute in two passes",
    "first_block": "K, V of a block from slot 0",
    "unmoved_keys_differ": "noise / deviation with keys unmoved",
}


def per_prompt(rows: pd.DataFrame) -> pd.DataFrame:
    """Mean of each prompt's rows, so that every prompt counts once."""
    return rows.groupby(["pair", "content"], sort=False)["value"].mean().reset_index()


def sink_ratio(found: Estimates, rows: pd.DataFrame, name: str, seed: int) -> None:
    """Attention per token in the first token over that of the middle 80 %: a ratio of means over chunks and layers."""
    if rows.empty:
        return
    means = rows.groupby(["pair", "content", "readout"], as_index=False)["value"].mean()
    wide = means.pivot(index=["pair", "content"], columns="readout", values="value").reset_index()
    for readout, label in (("first_token", "sink_first"), ("leading", "sink_leading")):
        interval = bootstrap_ratio(
            wide[readout].to_numpy(float), wide["middle"].to_numpy(float), wide["content"].tolist(), seed=seed
        )
        note = "density over the middle 80 %"
        found.rows.append({"quantity": f"{label}_{name}", **interval.to_dict(), "note": note})
