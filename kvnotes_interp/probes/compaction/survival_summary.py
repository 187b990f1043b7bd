"""The summary of a survival run: per compactor and ratio, and per kind of family where there are several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from kvnotes_interp.errors import ControlError
from kvnotes_interp.probes.compaction.surviving import EDITS, FULL
from kvnotes_interp.probes.estimates import Estimates
from kvnotes_interp.probes.linear.summary import chance_bound
from kvnotes_interp.results import Control, Summary

NOTES = (
    "gap: (s_new - s_old) of the compacted caches over that of the full ones. decided: both prompts still get their "
    "own answer.",
    "edits (by how much they move the score from that of the compacted old cache, in gaps of the full caches): an "
    "erratum behind it; the field edited before compaction; the kept slots of the field patched from the new run.",
    "enrichment: the field's, and the delimiters', share of the compact slots over their share of the prompt.",
    "decoded: accuracy of a linear probe on the decision token's last hidden state, held out by content.",
)


def summarise(
    frame: pd.DataFrame,
    tried: pd.DataFrame,
    *,
    model: str,
    points: Sequence[str],
    draws: int,
    seed: int,
    notes: Sequence[str],
) -> Summary:
    """Raises ControlError when shuffled labels are read (beyond `linear.summary.chance_bound`)."""
    found = Estimates(seed=seed)
    kinds = dict(zip(tried["pair"], tried["kind"], strict=True)) if "kind" in tried else {}
    here = frame[frame["view"] != "control"]
    here = here.assign(kind=here["pair"].map(kinds))
    present = [str(kind) for kind in here["kind"].dropna().unique()]
    arms = (FULL, *points)
    for kind in present:
        own = here[here["kind"] == kind]
        prefix = f"{kind}_" if len(present) > 1 else ""
        for view, readout, edit, region, name in _QUANTITIES:
            rows = own[(own["view"] == view) & (own["readout"] == readout)]
            rows = rows[rows["edit"] == edit] if edit else rows
            rows = rows[rows["region"] == region] if region else rows
            for arm in arms:
                found.add(f"{prefix}{name}_{arm}", rows[rows["site"] == arm])
    if not present:
        found.require(*(f"gap_{arm}" for arm in points))
    summary = found.summary(f"what survives compaction on {model}", frame, tried)
    control, more = _shuffled(frame, draws)
    controls = (*(replace(c, detail=_DETAIL.get(c.name, c.detail)) for c in summary.controls), *control)
    return replace(summary, controls=controls, notes=(*summary.notes, *NOTES, *more, *notes))


_QUANTITIES = (  # view, readout, edit, region, name
    ("survival", "gap", "", "", "gap"),
    ("survival", "decided", "", "", "decided"),
    *(("compact_edit", "effect", edit, "", edit) for edit in EDITS),
    ("slots", "enrichment", "", "field", "field_enrichment"),
    ("slots", "enrichment", "", "delimiter", "delimiter_enrichment"),
    ("attention", "attention", "", "field", "field_attention"),
    ("attention", "attention", "", "delimiter", "delimiter_attention"),
    ("decoded", "accuracy", "", "", "decoded"),
)
_DETAIL = {"ratio_1": "largest gap of a budget of all slots, logits"}


def _shuffled(frame: pd.DataFrame, draws: int) -> tuple[tuple[Control, ...], list[str]]:
    rows = frame[(frame["view"] == "decoded") & (frame["readout"] == "shuffled")]
    if rows.empty:
        return (), []
    n = rows.groupby("family")["pair"].nunique().min()
    bound = chance_bound(int(n), draws)
    if bound >= 0.5:
        return (), [f"control shuffled_labels: {n} pairs of a family are too few for it to be able to fail."]
    means = rows.groupby(["family", "site"])["value"].mean() - 0.5
    worst = float(means.max())
    if worst > bound:
        family, site = means.idxmax()  # type: ignore[misc]
        raise ControlError(
            f"control 'shuffled_labels' failed: on {site} of {family} shuffled labels are read in {0.5 + worst:.3f} of "
            f"cases; chance allows {0.5 + bound:.3f}. Something that is tested was trained on: check the `content` of "
            "the family."
        )
    return (Control("shuffled_labels", True, max(worst, 0.0), bound, int(n), "accuracy above 0.5, worst arm"),), []
