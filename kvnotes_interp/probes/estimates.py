"""From a tidy frame to the rows of a summary: means over competent pairs, intervals over contents."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from kvnotes_interp.probes.measure import controls_of
from kvnotes_interp.results import Summary
from kvnotes_interp.stats import bootstrap_mean, wilson


class Estimates:
    """Collects the rows of a summary. The bootstrap resamples whole contents, and shows how many there were."""

    def __init__(self, *, seed: int) -> None:
        self.seed = seed
        self.rows: list[dict[str, Any]] = []

    def add(self, quantity: str, values: pd.DataFrame, note: str = "") -> None:
        """The mean of `values["value"]`, one value per pair, clustered by `values["content"]`; skipped when empty."""
        if not values.empty:
            interval = bootstrap_mean(values["value"].to_numpy(float), list(values["content"]), seed=self.seed)
            self.rows.append({"quantity": quantity, **interval.to_dict(), "note": note})

    def require(self, *quantities: str) -> None:
        """Give quantities that no pair could measure a row all the same, without a mean."""
        have = {row["quantity"] for row in self.rows}
        empty = {"mean": math.nan, "low": math.nan, "high": math.nan, "n": 0, "n_effective": 0}
        self.rows += [{"quantity": q, **empty, "note": "no pair to measure it on"} for q in quantities if q not in have]

    def summary(self, probe: str, frame: pd.DataFrame, tried: pd.DataFrame) -> Summary:
        """The summary of a run, with its counts and controls."""
        competent = tried["competent"].astype(bool)
        aside = tried.loc[~competent, "reason"].value_counts()
        family = ", ".join(dict.fromkeys(tried["family"].dropna()))
        notes = []
        kept = tried[(tried["kind"] == "control") & tried["s_old"].notna()]
        if not kept.empty:
            same = int(((kept["s_old"] < 0) == (kept["s_new"] < 0)).sum())
            interval = wilson(same, len(kept))
            self.rows.append({"quantity": "answer_kept", **interval.to_dict(), "note": "control family"})
            notes.append("a control family: its field must not change the answer, so it has no recovery.")
        return Summary.of(
            f"{probe}, {family}",
            self.rows,
            counts={
                "n_tried": len(tried),
                "n_competent": int(competent.sum()),
                "set_aside": {str(reason): int(count) for reason, count in aside.items()},
            },
            controls=controls_of(frame),
            notes=notes,
        )
