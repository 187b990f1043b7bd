"""What studies share: settings from a YAML file, a task's questions, finished runs, and the summary at the end."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import pandas as pd
from pydantic import BaseModel, ConfigDict, ValidationError

from kvnotes_interp.errors import InputError, nearest
from kvnotes_interp.files import read_yaml, replacing
from kvnotes_interp.results import manifest as manifests
from kvnotes_interp.stats import bootstrap_ratio
from kvnotes_interp.tasks import documents
from kvnotes_interp.tasks.documents import Question
from kvnotes_interp.training.examples import Part, draw_parts

TEST_SEED = 1  # of the test questions: the same ones whatever is trained


S = TypeVar("S", bound="StudyFile")


class Strict(BaseModel):
    """Settings that are not changed and hold nothing unknown."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Task(Strict):
    """Questions: a document task with its options, at several numbers of documents (none: the task's own)."""

    task: str
    documents: tuple[int, ...] = ()
    options: dict[str, Any] = {}

    def test(self, n: int, numbers: Sequence[int] | None = None) -> list[Question]:
        """`n` questions of the test split for each number of documents."""
        kinds: list[dict[str, Any]] = [{"documents": d} for d in numbers or self.documents] or [{}]
        return [
            question
            for kind in kinds
            for question in documents.load(self.task, n=n, seed=TEST_SEED, split="test", **kind, **self.options)
        ]


class StudyFile(Strict):
    """A study is one YAML file. Raises InputError that names the file and the entry."""

    @classmethod
    def read(cls, name: str, folder: Path) -> Self:
        """The study `name` of the folder, or of a YAML file."""
        path = Path(name) if name.endswith(".yaml") else folder / f"{name}.yaml"
        if not path.is_file():
            known = sorted(p.stem for p in folder.glob("*.yaml"))
            raise InputError(f'there is no study "{name}".{nearest(name, known)} Studies: {", ".join(known)}.')
        try:
            return cls.model_validate(read_yaml(path, "study", of=dict))
        except ValidationError as error:
            fault = error.errors()[0]
            raise InputError(f"{path}, {'.'.join(map(str, fault['loc']))}: {fault['msg']}") from None


def drawn(tasks: Sequence[Task], samples: int, validation: int, seed: int) -> tuple[list[Question], list[Question]]:
    """(training, validation) questions, exactly as many of each task."""
    parts = [Part(one.task, one.documents or None, one.options) for one in tasks]
    even = [number - number % len(tasks) for number in (samples, validation)]
    return draw_parts(parts, samples=even[0], validation=even[1], seed=seed)


def check_names(pairs: Sequence[tuple[str, Sequence[str] | Mapping[str, Any]]]) -> None:
    """Every (name, known names): raises ValueError for the first that is not among them."""
    for name, known in pairs:
        if name not in known:
            raise ValueError(f'"{name}" is not among {", ".join(known)}.{nearest(name, known)}')


def finished(folder: Path) -> bool:
    """Whether this run folder is there and complete."""
    return (folder / "manifest.json").is_file() and manifests.read(folder).get("status") == "complete"


def pooled(rows: pd.DataFrame, readout: str) -> dict[str, Any]:
    """Mean over questions and seeds of a column, its interval over contents, and each seed's mean.

    "micro_f1" is of the columns f1_common and f1_words. rows: one per question and seed, with `pair` and `content`.
    """
    top, bottom = ("f1_common", "f1_words") if readout == "micro_f1" else (readout, None)
    table = rows.assign(_top=rows[top].astype(float), _bottom=1.0 if bottom is None else rows[bottom].astype(float))
    sums = table.groupby("seed")[["_top", "_bottom"]].sum()
    means = dict(zip(sums.index.astype(str), (sums["_top"] / sums["_bottom"]).tolist(), strict=True))
    interval = bootstrap_ratio(table["_top"].to_numpy(), table["_bottom"].to_numpy(), table["content"].tolist())
    return {**interval.to_dict(), "n": int(rows["pair"].nunique()), "seeds": means}


def write_summary(path: Path, study: StudyFile, model_id: str, tables: Mapping[str, Any]) -> dict[str, Any]:
    """The study, what it ran on and its tables, as JSON; six digits, and NaN, where no interval exists, as null."""
    found = {
        "study": study.model_dump(mode="json"),
        "model_id": model_id,
        "git": manifests.git_state(),
        "versions": manifests.versions(),
        **tables,
    }
    with replacing(path) as part:
        part.write_text(_text(_json(found)), encoding="utf-8")
    return found


def _text(found: Mapping[str, Any]) -> str:
    """JSON with one line per entry, and per row of a table."""
    lines = []
    for name, value in found.items():
        rows = ",\n".join(f"  {json.dumps(row, allow_nan=False)}" for row in value) if isinstance(value, list) else ""
        lines.append(f"{json.dumps(name)}: " + (f"[\n{rows}\n]" if rows else json.dumps(value, allow_nan=False)))
    return "{\n" + ",\n".join(lines) + "\n}\n"


def keep_summaries(names: Iterable[str], runs: Path, out: Path) -> list[Path]:
    """Copy the summaries of these studies, where there are any; returns their folders."""
    kept = []
    for name in names:
        if (runs / name / "summary.json").is_file():
            (out / name).mkdir(parents=True, exist_ok=True)
            shutil.copyfile(runs / name / "summary.json", out / name / "summary.json")
            kept.append(runs / name)
    return kept


def options(module: str, about: str | None, stages: Sequence[str]) -> argparse.ArgumentParser:
    """The options that every study takes."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=about)
    parser.add_argument("--study", default="organism", help="organism, smollm2, or a YAML file like those")
    parser.add_argument("--model", help="another model than the study's")
    parser.add_argument("--seeds", type=int, nargs="+", help="other seeds than the study's")
    parser.add_argument("--out", type=Path, required=True, help="the study's folder; a stopped one is taken up again")
    parser.add_argument("--stages", nargs="+", choices=stages, default=stages, help="all, unless named")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    return parser


def changed(study: S, given: argparse.Namespace) -> S:
    """The study with the model and the seeds that were given."""
    asked = {"model": given.model, "seeds": given.seeds and tuple(given.seeds)}
    return study.model_copy(update={name: value for name, value in asked.items() if value})


def commit(summary: Mapping[str, Any]) -> str:
    """The commit that the study's code was at, with "+" where files differed from it."""
    git = summary["git"] or {}
    return (git.get("commit") or "unknown")[:9] + ("+" if git.get("dirty") else "")


def _json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _json(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_json(one) for one in value]
    if isinstance(value, float):
        return None if value != value else float(f"{value:.6g}")
    return value
