"""A study's tables from its runs: `summary.json`, read by collect.py.

Trained compactors are pooled over their seeds: every question weighs the same, the interval is a bootstrap over
contents of the mean over seeds, and `seeds` holds each seed's own mean, which shows what training alone changes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from experiments.still.settings import Asked, Study, Survival
from experiments.still.train import compactor_of, folder_of, method_of
from experiments.studies import finished, pooled, write_summary
from kvnotes_interp.results import Result
from kvnotes_interp.stats import bootstrap_mean
from kvnotes_interp.training import Trained

if TYPE_CHECKING:
    from kvnotes_interp.model import Model

READOUTS = ("exact_match", "kl", "share")
SURVIVES = {  # name of the quantity -> (view, readout, edit, region)
    "gap": ("survival", "gap", "", ""),
    "decided": ("survival", "decided", "", ""),
    "decoded": ("decoded", "accuracy", "", ""),
    "erratum": ("compact_edit", "effect", "erratum", ""),
    "field_patched": ("compact_edit", "effect", "field_patched", ""),
    "field_slots": ("slots", "enrichment", "", "field"),
    "delimiter_slots": ("slots", "enrichment", "", "delimiter"),
}
ALL = 0  # all numbers of documents together


def write(study: Study, model: Model, out: Path) -> dict[str, Any]:
    """Everything that is finished under `out`, written to `out`/summary.json."""
    tables = {
        "parameters": model.shape.n_params,
        "training": training(model, study, out),
        "quality": [row for name in study.quality for row in quality(study, out, name)],
        "compared": [row for name in study.quality for row in compared(study, out, name)],
        "survival": [] if study.survival is None else survival(study, out, study.survival),
    }
    return write_summary(out / "summary.json", study, model.model_id, tables)


def training(model: Model, study: Study, out: Path) -> list[dict[str, Any]]:
    """One row per trained compactor: size, validation before, at its best and at the end, steps and seconds."""
    rows = []
    for name in study.trained:
        for seed in study.seeds_of(name):
            folder = folder_of(out, name, seed)
            if not finished(folder):
                continue
            run, parameters = Trained.load(folder), method_of(model, study, name, seed).parameters()
            rows.append(
                {
                    "name": name,
                    "seed": seed,
                    "parameters": sum(parameter.numel() for parameter in parameters.values()),
                    "steps": run.steps,
                    "best_step": run.best_step,
                    "seconds": float(run.metrics()["seconds"].sum()),
                    **{f"kl_{when}": getattr(run, when)["kl"] for when in ("before", "best", "last")},
                    **{f"right_{when}": getattr(run, when)["exact_match"] for when in ("before", "best", "last")},
                }
            )
    return rows


def quality(study: Study, out: Path, name: str) -> list[dict[str, Any]]:
    """One row per number of documents (0: all, whatever it is), compactor, ratio, passes and readout."""
    frame = answers(study, out, name)
    if frame.empty:
        return []
    rows: list[dict[str, Any]] = []
    numbers = sorted(int(n) for n in frame["documents"].unique())
    for number in (ALL, *(numbers if len(numbers) > 1 else ())):
        here = frame if number == ALL else frame[frame["documents"] == number]
        for _, own in here.groupby(["method", "ratio", "passes"], sort=False, dropna=False):
            about = {"asked": name, "documents": number, **_first(own, "method", "ratio", "passes")}
            rows += [{**about, "readout": one, **pooled(own, one)} for one in READOUTS]
    return rows


def compared(study: Study, out: Path, name: str) -> list[dict[str, Any]]:
    """Right answers of the first trained compactor less those of every other one, question by question.

    A question's answer is the mean over seeds; the interval is over contents.
    """
    frame, trained = answers(study, out, name), study.quality[name].trained
    if frame.empty or not trained:
        return []
    means = frame.groupby(["ratio", "passes", "method", "pair", "content"])["exact_match"].mean().reset_index()
    rows = []
    for _, here in means.groupby(["ratio", "passes"]):
        own = here[here["method"] == trained[0]].set_index("pair")
        for method, other in here.groupby("method"):
            if method == trained[0] or own.empty:
                continue
            left = own["exact_match"] - other.set_index("pair")["exact_match"].loc[own.index]
            about = {"asked": name, **_first(here, "ratio", "passes"), "than": method}
            rows.append({**about, **bootstrap_mean(left.to_numpy(float), own["content"].tolist()).to_dict()})
    return rows


def answers(study: Study, out: Path, name: str) -> pd.DataFrame:
    """One row per question, compactor, seed, ratio and passes: the readouts as columns; empty where nothing was run."""
    folder = out / "quality" / name
    if not finished(folder):
        return pd.DataFrame()
    frame = Result.load(folder).frame
    frame = frame[frame["view"].isin(("compaction", "cost")) & ~frame["compactor"].isna()]
    # A run of one pass has no such column, and in others the full cache has none.
    frame = frame.assign(passes=frame["passes"].fillna(1).astype(int) if "passes" in frame else 1)
    index = ["pair", "content", "documents", "compactor", "ratio", "passes"]
    wide = frame.set_index([*index, "readout"])["value"].unstack().reset_index()
    return _named(study, study.quality[name], out, wide)


def survival(study: Study, out: Path, asked: Survival) -> list[dict[str, Any]]:
    """One row per family, compactor, ratio and quantity of `SURVIVES`."""
    rows: list[dict[str, Any]] = []
    for family in asked.families:
        folder = out / "survival" / family
        if not finished(folder):
            continue
        frame = Result.load(folder).frame
        frame = frame[~frame["compactor"].isna()].fillna({"edit": "", "region": ""})
        for quantity, (view, readout, edit, region) in SURVIVES.items():
            own = frame[(frame["view"] == view) & (frame["readout"] == readout)]
            own = own[(own["edit"] == edit) & ((own["region"] == region) if region else True)]
            own = _named(study, asked, out, own)
            for _, here in own.groupby(["method", "ratio"], sort=False):
                about = {"family": family, "quantity": quantity, **_first(here, "method", "ratio")}
                rows.append({**about, **pooled(here, "value")})
    return rows


def _named(study: Study, asked: Asked | Survival, out: Path, frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with `method` and `seed` in place of the folders of trained compactors."""
    names = {
        # The end of the name alone: a study may be read from another folder than it was run in.
        compactor_of(study, Path(), name, seed).partition("@")[2]: (name, seed)
        for name in asked.trained
        for seed in study.seeds_of(name)
    }

    def of(compactor: str) -> tuple[str, int]:
        return next((about for end, about in names.items() if compactor.endswith(end)), (compactor, 0))

    found = [of(compactor) for compactor in frame["compactor"].astype(str)]
    return frame.assign(method=[name for name, _ in found], seed=[seed for _, seed in found])


def _first(rows: pd.DataFrame, *columns: str) -> dict[str, Any]:
    """What these columns hold in all rows of a group."""
    return {str(name): value for name, value in rows.iloc[:1][list(columns)].to_dict("records")[0].items()}
