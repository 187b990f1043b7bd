"""A study's tables from its runs: `summary.json`, read by collect.py.

Quality is pooled over the Writers of all seeds: every question weighs the same, the interval is a bootstrap over
contents of the mean over seeds, and `seeds` holds each seed's own mean, which shows what training alone changes.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from experiments.sempic.guess import open_answers
from experiments.sempic.settings import Study
from experiments.sempic.train import folder_of
from experiments.studies import finished, pooled, write_summary
from kvnotes_interp.results import Result
from kvnotes_interp.stats import bootstrap_ratio
from kvnotes_interp.training import Trained

if TYPE_CHECKING:
    from kvnotes_interp.model import Model

READOUTS = ("micro_f1", "kl", "top1_agreement", "exact_match")
PLAIN = ("full_recompute", "no_recompute", "no_recompute_unmoved")
ALL = 0  # all numbers of documents together


def write(study: Study, model: Model, out: Path) -> dict[str, Any]:
    """Everything that is finished under `out`, written to `out`/summary.json."""
    tables = {"training": training(study, out), "quality": quality(study, out), "regions": regions(out)}
    return write_summary(out / "summary.json", study, model.model_id, tables)


def training(study: Study, out: Path) -> list[dict[str, Any]]:
    """One row per finished Writer: validation KL before, at its best and at the end, steps and seconds."""
    rows = []
    for writer in study.writers:
        for kind in study.kinds:
            for seed in study.seeds_of(writer):
                folder = folder_of(out, writer, kind, seed)
                if not finished(folder):
                    continue
                run = Trained.load(folder)
                metrics = run.metrics()
                rows.append(
                    {
                        "writer": writer,
                        "kind": kind,
                        "seed": seed,
                        "steps": run.steps,
                        "best_step": run.best_step,
                        "seconds": float(metrics["seconds"].sum()),
                        **{f"kl_{when}": getattr(run, when)["kl"] for when in ("before", "best", "last")},
                        **{f"right_{when}": getattr(run, when)["first_token"] for when in ("before", "best", "last")},
                    }
                )
    return rows


def quality(study: Study, out: Path) -> list[dict[str, Any]]:
    """One row per task, number of documents (0: all), Writer, operator and readout."""
    rows: list[dict[str, Any]] = []
    for task in study.tasks:
        runs = {seed: out / "quality" / task / str(seed) for seed in study.seeds}
        tables = [_table(study, Result.load(run), out, seed) for seed, run in runs.items() if finished(run)]
        if not tables:
            continue
        frame = pd.concat(tables, ignore_index=True)
        for number in (ALL, *sorted(int(n) for n in frame["documents"].unique())):
            here = frame if number == ALL else frame[frame["documents"] == number]
            for (writer, operator), own in here.groupby(["writer", "operator"], sort=False):
                about = {"task": task, "documents": number, "writer": writer, "operator": operator}
                rows += [{**about, "readout": name, **pooled(own, name)} for name in READOUTS]
        rows += _guess(study, task)
    return rows


def _guess(study: Study, task: str) -> list[dict[str, Any]]:
    """Rows of the operator "guess": what can be answered from documents each read alone; see `guess.py`."""
    questions = study.tasks[task].test(study.questions)
    left = {question: open_answers(question) for question in questions}
    rows = []
    for number in (ALL, *sorted({len(question.documents) for question in questions})):
        asked = [question for question in questions if number in (ALL, len(question.documents))]
        counts = [count for question in asked if (count := left[question]) is not None]
        if len(counts) < len(asked):
            return []
        contents = [question.content for question in asked]
        for readout, values in (("micro_f1", [1 / k for k in counts]), ("kl", [math.log(k) for k in counts])):
            about = {"task": task, "documents": number, "writer": "", "operator": "guess", "readout": readout}
            interval = bootstrap_ratio(values, [1.0] * len(values), contents)
            rows.append({**about, **interval.to_dict(), "seeds": {}})
    return rows


def _table(study: Study, result: Result, out: Path, seed: int) -> pd.DataFrame:
    """One row per question and cache: the readouts as columns, with the Writer ("" for the plain joins)."""
    frame = result.frame[result.frame["view"] == "quality"]
    names = {name: ("", name) for name in PLAIN}
    for writer in study.writers:
        for kind in study.kinds:
            # The end of the name alone: a study may be read from another folder than it was run in.
            names[f"writers/{writer}/{kind}-{seed}/best"] = (writer, kind)
    sites = {site: next(about for end, about in names.items() if _is(site, end)) for site in frame["site"].unique()}
    wide = frame.pivot_table(
        index=["pair", "content", "site", "documents"], columns="readout", values="value", observed=True
    ).reset_index()
    about = [sites[site] for site in wide["site"]]
    return wide.assign(seed=seed, writer=[writer for writer, _ in about], operator=[name for _, name in about])


def _is(site: str, end: str) -> bool:
    return site == end or Path(site.partition("@")[2]).as_posix().endswith(end)


def regions(out: Path) -> list[dict[str, Any]]:
    """One row per donor and region: mean recovery with its interval over contents."""
    path = out / "regions" / "table.parquet"
    if not path.is_file():
        return []
    rows = []
    for (donor, region), own in pd.read_parquet(path).groupby(["donor", "region"], sort=False):
        interval = bootstrap_ratio(own["value"].to_numpy(float), [1.0] * len(own), own["content"].tolist())
        rows.append({"donor": donor, "region": region, "size": float(own["size"].mean()), **interval.to_dict()})
    return rows
