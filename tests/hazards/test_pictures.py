"""A picture and the table of its run agree: the same pairs, the same means, the same seed of the bootstrap."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import kvnotes_interp as kv
from kvnotes_interp import plots
from kvnotes_interp.plots import export
from kvnotes_interp.plots.data import seed_of
from kvnotes_interp.probes import concentration as concentration_probe
from kvnotes_interp.results import Result
from tests.results.factory import make_result

SEED = 7
NUMBERS = ["mean", "low", "high", "n", "n_effective"]
Shown = Iterator[tuple[str, pd.Series]]  # quantity of the summary, row of the picture's table


def _patch(**options: Any) -> Result:
    model = kv.load("organism:mixed")
    pairs = kv.tasks.load("signal", n=8, seed=SEED)
    return kv.probes.local_patching(model, pairs, seed=SEED, map_pairs=1, progress=False, **options)


def _suffix() -> Result:
    model = kv.load("organism:mixed")
    return kv.probes.suffix_concentration(model, kv.tasks.load("signal", n=8, seed=SEED), seed=SEED, progress=False)


def _ablate() -> Result:
    model = kv.load("organism:mixed")
    return kv.probes.circuit_ablation(model, kv.tasks.load("signal", n=8, seed=SEED), seed=SEED, progress=False)


def _linear() -> Result:
    model = kv.load("organism:mixed")
    pairs = kv.tasks.load("signal", n=8, seed=SEED)
    return kv.probes.linear_decodability(model, pairs, seed=SEED, progress=False)


def _deviate() -> Result:
    model = kv.load("organism:mixed")
    return kv.probes.attention_deviation(model, kv.tasks.load("signal", n=8, seed=SEED), seed=SEED, progress=False)


def _edit() -> Result:
    model = kv.load("organism:mixed")
    return kv.probes.edit_frontier(model, kv.tasks.load("signal", n=8, seed=SEED), seed=SEED, progress=False)


def _questions(n: int) -> Any:
    return kv.tasks.load_items("biography", n=n, seed=SEED)


def _splice() -> Result:
    model = kv.load("organism:trained")
    operators = ("full_recompute", "no_recompute", "splice", "cacheblend")
    return kv.probes.splice_quality(
        model, _questions(6), operators=operators, shares=(0.15,), documents=(1, 2), seed=SEED, progress=False
    )


def _compact(n: int, **options: Any) -> Result:
    model, names = kv.load("organism:trained"), ("streaming", "snapkv")
    return kv.probes.compaction_quality(
        model, _questions(n), compactors=names, ratios=(2.0, 4.0), seed=SEED, progress=False, **options
    )


def _survive() -> Result:
    model = kv.load("organism:trained")
    pairs = [*kv.tasks.load("gate", n=6, seed=SEED), *kv.tasks.load("badge", n=6, seed=SEED)]
    return kv.probes.compaction_survival(
        model, pairs, compactors=("snapkv",), ratios=(2.0, 4.0), seed=SEED, progress=False
    )


MADE: dict[str, Callable[[], Result]] = {
    "patch": _patch,
    "joined": lambda: _patch(operator="no_recompute", views=("region", "random"), parts=("kv",)),
    "suffix": _suffix,
    "ablate": _ablate,
    "linear": _linear,
    "deviate": _deviate,
    "edit": _edit,
    "splice": _splice,
    "compact": lambda: _compact(8),
    "passes": lambda: _compact(6, passes=(1, 2)),
    "survive": _survive,
}

_RUNS: dict[str, Result] = {}


def run_of(name: str) -> Result:
    """The run of this name, made once."""
    if name not in _RUNS:
        _RUNS[name] = MADE[name]()
    return _RUNS[name]


# --- which rows of a picture show which quantity of the summary ------------------------------------------------------


def _rows(result: Result, kind: str, **options: Any) -> list[pd.Series]:
    return [row for _, row in export.data_of(plots.draw(result, kind, **options)).iterrows()]


def states(result: Result) -> Shown:
    for row in _rows(result, "states"):
        suffix = "" if row["part"] == "kv" else f"_{row['part']}"
        yield ("random_site" if row["site"] == "random" else f"{row['site']}{suffix}"), row


def regions(result: Result) -> Shown:
    """The summary of a run with an operator has what each region recovers alone."""
    for row in _rows(result, "regions"):
        yield f"region_{row['site']}", row


def concentration(result: Result) -> Shown:
    for row in _rows(result, "concentration"):
        if row["k"] == 8:
            yield f"top8_{row['ranking']}", row


def windows(result: Result) -> Shown:
    for row in _rows(result, "windows"):
        if row["share"] == 10:
            yield f"{row['start']}_10", row


RANKED = {"": "", "other_half": "", "attention": "", "chosen": "", "random": "_random", "same_pair": "_same_pair"}


def knockout(result: Result) -> Shown:
    for readout, word in (("recovery", ""), ("flip", "_flips")):
        for row in _rows(result, "knockout", readout=readout):
            tail = "" if row["band"] == "all" else f"_{row['band']}"
            yield f"cut_top{100 * row['share']:.0f}{RANKED[row['ranking']]}{tail}{word}", row


def edges(result: Result) -> Shown:
    for row in _rows(result, "edges"):
        base, _, site = row["site"].partition(":")
        yield f"cut_{site}_{base}{RANKED[row['ranking']]}", row


def head_curve(result: Result) -> Shown:
    for write in ("frozen", "recomputed"):
        for row in _rows(result, "head_curve", write=write):
            name = "read" if row["panel"] == "read_curve" else f"write_{write}"
            yield f"{name}_top{row['k']}{RANKED[row['ranking']]}", row


def scrub(result: Result) -> Shown:
    for row in _rows(result, "scrub"):
        if row["site"] != "same_note":  # the summary has its drift, which has no sign
            yield f"scrub_{row['site']}{RANKED[row['ranking']]}", row


def dose(result: Result) -> Shown:
    for readout, word in (("recovery", "dose"), ("flip", "followed")):
        for row in _rows(result, "dose", readout=readout):
            yield f"{word}_k{row['k']}{RANKED[row['ranking']]}", row


def staleness(result: Result) -> Shown:
    rows = _rows(result, "staleness")
    last = max(row["layer"] for row in rows)
    for row in rows:
        if row["layer"] == last:
            yield f"reads_new_{row['site']}", row


def deviation(result: Result) -> Shown:
    for kind, drawn in (("deviation", "strip"), ("deviation_curve", "bar")):
        for row in _rows(result, kind):
            if row["drawn"] == drawn:
                yield f"{row['region']}_{row['site']}", row


def frontier(result: Result) -> Shown:
    for row in _rows(result, "frontier", readout="recovery"):
        yield row["arm"], row


def splice_share(result: Result) -> Shown:
    for row in _rows(result, "splice_share"):
        yield f"f1_{row['site']}", row
    for readout in ("kl", "top1_agreement", "logit_cosine"):
        for row in _rows(result, "splice_share", readout=readout):
            yield f"{readout}_{row['site']}", row


def splice_documents(result: Result) -> Shown:
    for row in _rows(result, "splice_documents"):
        yield f"f1_{row['site']}_d{row['documents']}", row


def compaction_ratio(result: Result) -> Shown:
    for kind in ("compaction_ratio", "compaction_time"):
        for readout, word in (("micro_f1", "f1"), ("exact_match", "exact_match"), ("kl", "kl")):
            for row in _rows(result, kind, readout=readout):
                yield f"{word}_{row['site']}", row


def compaction_passes(result: Result) -> Shown:
    for readout, word in (("micro_f1", "f1"), ("exact_match", "exact_match"), ("kl", "kl")):
        for row in _rows(result, "compaction_passes", readout=readout):
            yield f"{word}_{row['site']}", row


def survival(result: Result) -> Shown:
    several = result.pairs["kind"].nunique() > 1
    for readout in ("gap", "decided"):
        for row in _rows(result, "survival", readout=readout):
            kind = f"{row['kind']}_" if several else ""
            yield f"{kind}{readout}_{row['compactor']}_{row['ratio']:g}x", row


SHOWN: list[tuple[str, Callable[[Result], Shown], int]] = [  # run, picture, quantities at least
    ("patch", states, 10),
    ("joined", states, 4),
    ("joined", regions, 3),
    ("suffix", concentration, 5),
    ("suffix", windows, 2),
    ("ablate", states, 2),
    ("ablate", knockout, 10),
    ("ablate", edges, 10),
    ("ablate", head_curve, 6),
    ("ablate", scrub, 5),
    ("ablate", dose, 6),
    ("linear", staleness, 4),
    ("deviate", deviation, 3),
    ("edit", frontier, 8),
    ("splice", splice_share, 8),
    ("splice", splice_documents, 8),
    ("compact", compaction_ratio, 12),
    ("passes", compaction_passes, 8),
    ("survive", survival, 8),
]


COARSE = (staleness, splice_documents)  # shares of few pairs: their bounds can be the same whatever the seed


@pytest.mark.parametrize(("run", "shown", "least"), SHOWN, ids=[f"{run}-{f.__name__}" for run, f, _ in SHOWN])
def test_a_picture_shows_the_numbers_of_its_table(run: str, shown: Callable[[Result], Shown], least: int) -> None:
    result = run_of(run)
    assert seed_of(result) == SEED
    known = result.summary().rows.set_index("quantity")
    # A picture may show more than the table does: every layer, every k.
    met = {quantity: row for quantity, row in shown(result) if quantity in known.index}
    assert len(met) >= least, sorted(met)
    for quantity, row in met.items():
        want = [known.loc[quantity, column] for column in NUMBERS]
        assert [row[column] for column in NUMBERS] == pytest.approx(want, rel=1e-12, abs=1e-15, nan_ok=True), quantity
    # The control: drawn with seed 0 the same picture has other bounds, and the same means.
    elsewhere = dict(shown(_with_seed(result, 0)))
    assert all(elsewhere[q]["mean"] == pytest.approx(row["mean"], nan_ok=True) for q, row in met.items())
    moved = [q for q, row in met.items() if (elsewhere[q]["low"], elsewhere[q]["high"]) != (row["low"], row["high"])]
    assert moved or shown in COARSE


def _with_seed(result: Result, seed: int) -> Result:
    request = result.manifest["request"]
    return replace(result, manifest={"request": {**request, "options": {**request["options"], "seed": seed}}})


@pytest.mark.parametrize("run", MADE)
def test_the_bars_and_bands_that_are_drawn_are_those_of_the_pictures_table(run: str) -> None:
    result = run_of(run)
    seen = 0
    for kind in result.plots():
        fig = plots.draw(result, kind)
        table = export.data_of(fig)
        bounds = [b for b in _bounds(fig) if b is not None and not math.isnan(b)]
        if "low" not in table:
            assert not bounds, kind
            continue
        unit = 100 if kind == "regions" else 1
        known = unit * np.concatenate([table[c].dropna().to_numpy(float) for c in ("mean", "low", "high")])
        gaps = [float(np.abs(known - b).min()) for b in bounds]
        assert max(gaps, default=0.0) < 1e-9, kind
        seen += len(gaps)
    assert seen > 4


def _bounds(fig: Any) -> Iterator[float]:
    """The ends of every error bar and the outline of every band."""
    for trace in fig.data:
        if trace.type == "scatter" and trace.fill == "toself":
            yield from (float(y) for y in trace.y)
        for bars, values in ((getattr(trace, "error_y", None), "y"), (getattr(trace, "error_x", None), "x")):
            if bars is not None and bars.array is not None:
                for at, up, down in zip(trace[values], bars.array, bars.arrayminus, strict=True):
                    yield from (float(at + up), float(at - down))


def test_every_interval_of_a_picture_is_drawn_with_a_seed() -> None:
    """Whoever adds a picture cannot forget it: no call of a bootstrap in plots/ leaves the seed out."""
    found = 0
    for path in sorted(Path(plots.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "").startswith("bootstrap_"):
                found += 1
                assert "seed" in {keyword.arg for keyword in node.keywords}, f"{path.name}:{node.lineno}"
    assert found >= 4


def test_a_result_without_a_request_has_seed_0() -> None:
    result = make_result(views=("state",))
    assert seed_of(result) == seed_of(replace(result, manifest={})) == 0


# --- pairs that differ in what they have -----------------------------------------------------------------------------


def _uneven() -> Result:
    """Six pairs with 5, 6, 7, 20, 20 and 20 positions after the field, and a summary by the probe itself."""
    rows, pairs = [], []
    for index, n in enumerate((5, 6, 7, 20, 20, 20)):
        names = {"pair": f"p{index}", "content": f"c{index}", "family": "hand", "part": "kv"}
        pairs.append({**names, "competent": True, "reason": "", "kind": "derived", "s_old": -1.0, "s_new": 1.0})
        for k in concentration_probe.grid(n):
            value = (0.9 - 0.05 * index) * (k / n) ** 0.5
            for ranking in ("other_pairs", "attention"):
                rows.append({**names, "view": "cumulative", "site": "top_k", "ranking": ranking, "k": k} | {
                    "readout": "recovery", "value": value * (1.0 if ranking == "attention" else 0.9)
                })  # fmt: skip
    frame, tried = pd.DataFrame(rows), pd.DataFrame(pairs)
    options = {"seed": SEED}
    made = Result.build(
        probe="suffix_concentration",
        frame=frame,
        pairs=tried,
        summary=make_result(views=("state",)).summary(),
        manifest={"request": {"options": options}},
    )
    summary = concentration_probe.summarise(made.frame, tried, model="hand", seed=SEED)
    return replace(made, _summary=summary)


def test_a_curve_counts_the_pairs_that_ended_before_k_as_the_table_does() -> None:
    result = _uneven()
    known = result.summary().rows.set_index("quantity")
    for quantity, row in concentration(result):
        assert row["n"] == 6
        assert [row[c] for c in NUMBERS] == pytest.approx([known.loc[quantity, c] for c in NUMBERS], rel=1e-12)
    exact = result.frame[(result.frame["k"] == 8) & (result.frame["ranking"] == "other_pairs")]["value"].mean()
    assert known.loc["top8_other_pairs", "mean"] != pytest.approx(exact, rel=0.05)  # what was drawn before


def test_the_marks_of_a_curve_are_the_tables() -> None:
    result = _uneven()
    known = result.summary().rows.set_index("quantity")["mean"]
    fig = plots.draw(result, "concentration")
    marks = sorted(shape.x0 for shape in fig.layout.shapes if shape.x0 == shape.x1)
    assert marks == pytest.approx([known["k50_other_pairs"], known["k90_other_pairs"]])
    texts = " ".join(str(note.text) for note in fig.layout.annotations)
    assert f"k<sub>50</sub> = {known['k50_other_pairs']:.1f}" in texts
    assert "k<sub>" not in str(plots.draw(make_result(), "concentration").layout.annotations)


def test_a_region_that_some_pairs_lack_is_not_made_denser_by_them() -> None:
    """Recovery and share of the positions are means over the same pairs."""
    whole = make_result(views=("region",))
    lacking = set(whole.pairs["pair"][::2])
    frame = whole.frame[~((whole.frame["site"] == "delimiter") & whole.frame["pair"].isin(lacking))]
    part = replace(whole, frame=frame)
    own = frame[frame["site"] == "delimiter"]
    pairs = whole.pairs.set_index("pair")
    room = (pairs["length"] - pairs["field_start"] - 1).astype(float)
    share = (own["size"].astype(float).to_numpy() / room[own["pair"]].to_numpy()).mean()
    table = export.data_of(plots.draw(part, "regions")).set_index("site")
    assert table.loc["delimiter", "n"] == own["pair"].nunique() < frame["pair"].nunique()
    assert table.loc["delimiter", "ratio"] == pytest.approx(own["value"].mean() / share)
