"""What the papers say of compactors, each beside what our studies found. Ours are read from the studies' summaries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from experiments.still.report import ALL
from experiments.tables import find, short

Studies = Mapping[str, Mapping[str, Any]]
ASKED = "biography"  # what every claim is looked up in


def claims(studies: Studies) -> list[tuple[str, str]]:
    """(claim and its source, what the studies found), for the claims that a study bears on."""
    makers = (
        ("About 1 % extra parameters [S]", _size),
        (
            "8x: 85 % of multiple-choice answers right, 95 % with the full cache, 20 to 22 % without a context [B]",
            _at(8),
        ),
        ("64x: 60 % right [B]", _at(64)),
        (
            "8x: 0.93 of what the context adds to the likelihood of the answer is kept [B]; ours, to right answers",
            _kept(8),
        ),
        ("8 to 22 points above KV-Distill at matched training, in 16 of 18 cells [S]", _above("scorer")),
        ("Above SnapKV and H2O in most settings [S]", _above("snapkv", "h2o")),
        ("Per-context synthesis is the strong and slow alternative [A]", _above("attention_matching", "trained_cache")),
        ("A start that copies and no norm behind the last block both matter [B]", _ablations),
        ("Iterated, it works up to the horizon that it was trained for [S]", _iterated),
    )
    return [(claim, said) for claim, make in makers if (said := make(studies))]


def _right(study: Mapping[str, Any], asked: str, method: str, ratio: float) -> Any:
    rows = [row for row in study["quality"] if row["asked"] == asked and row["documents"] == ALL]
    if method in ("full", "no_context"):
        return find(rows, method=method, readout="exact_match")
    return find(rows, method=method, ratio=ratio, passes=1, readout="exact_match")


def _told(parts: Iterable[tuple[str, str]]) -> str:
    return "; ".join(f"{name}: {said}" for name, said in parts if said)


def _size(studies: Studies) -> str:
    return _told(
        (name, f"{row['parameters'] / study['parameters']:.1%}")
        for name, study in studies.items()
        if (row := find(study["training"], name="still"))
    )


def _at(ratio: float) -> Any:
    def said(studies: Studies) -> str:
        parts = []
        for name, study in studies.items():
            own, full, bare = (_right(study, ASKED, method, ratio) for method in ("still", "full", "no_context"))
            if own and full and bare:
                parts.append(
                    (f"{name}, `{ASKED}`", f"{short(own)}, full {full['mean']:.2f}, without {bare['mean']:.2f}")
                )
        return _told(parts)

    return said


def _kept(ratio: float) -> Any:
    def said(studies: Studies) -> str:
        parts = []
        for name, study in studies.items():
            found = [_right(study, ASKED, method, ratio) for method in ("still", "full", "no_context")]
            if all(found):
                own, full, bare = (one["mean"] for one in found)
                parts.append((f"{name}, `{ASKED}`", f"{(own - bare) / (full - bare):.2f}"))
        return _told(parts)

    return said


def _above(*others: str) -> Any:
    """Differences of right answers at 8x and 16x, and in how many cells of tasks and ratios the interval is off 0."""

    def said(studies: Studies) -> str:
        parts = []
        for name, study in studies.items():
            low, high = study["study"]["ratios"]  # beyond the ratios of training nothing was asked of it
            rows = [
                row
                for row in study["compared"]
                if row["passes"] == 1
                and low <= row["ratio"] <= high
                and row["than"].partition("@")[0] in others
                # The same questions as in ASKED, but for what is too slow to be asked all of them.
                and (row["asked"] != "per_context" or row["than"] == "trained_cache")
            ]
            if not rows:
                continue
            above, below = sum(row["low"] > 0 for row in rows), sum(row["high"] < 0 for row in rows)
            first = [
                f"{row['than'].partition('@')[0]} {row['ratio']:g}x {100 * row['mean']:+.0f} points"
                for row in rows
                if row["asked"] == ASKED and row["ratio"] in (8, 16)
            ]
            parts.append(
                (
                    name,
                    f"`{ASKED}` {', '.join(first)}; the interval of {above} of {len(rows)} cells is above 0, of "
                    f"{below} below",
                )
            )
        return _told(parts)

    return said


def _ablations(studies: Studies) -> str:
    parts = []
    for name, study in studies.items():
        rows = {row["name"]: row for row in study["training"] if row["seed"] == study["study"]["seeds"][0]}
        named = [one for one in ("short", "plain_init", "final_norm") if one in rows]
        if len(named) > 1:
            parts.append((f"{name}, validation KL", ", ".join(f"`{one}` {rows[one]['kl_best']:.2f}" for one in named)))
    return _told(parts)


def _iterated(studies: Studies) -> str:
    parts = []
    for name, study in studies.items():
        for asked, about in study["study"]["quality"].items():
            if len(about["passes"]) == 1:
                continue
            rows = [row for row in study["quality"] if row["asked"] == asked and row["documents"] == ALL]
            ratio = about["ratios"][0]
            for method in about["trained"]:
                found = {
                    passes: find(rows, method=method, ratio=ratio, passes=passes, readout="exact_match")
                    for passes in about["passes"]
                }
                cells = [f"{row['mean']:.2f} in {passes}" for passes, row in found.items() if row]
                parts.append((f"{name}, `{method}` {ratio:g}x, passes", ", ".join(cells)))
    return _told(parts)
