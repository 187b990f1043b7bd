"""A study: what Writers are trained on, and what they are measured on. One YAML file each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvnotes_interp.errors import InputError, nearest
from kvnotes_interp.operators.writer import Kind
from kvnotes_interp.tasks import documents
from kvnotes_interp.tasks.documents import Question
from kvnotes_interp.training import Settings, draw

HERE = Path(__file__).parent
TEST_SEED = 1  # of the test questions: the same ones whatever a Writer's seed


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Task(_Strict):
    """Questions: a document task with its options, at several numbers of documents (none: the task's own)."""

    task: str
    documents: tuple[int, ...]
    options: dict[str, Any] = {}

    def test(self, n: int, numbers: Sequence[int] | None = None) -> list[Question]:
        """`n` questions of the test split for each number of documents."""
        kinds: list[dict[str, Any]] = [{"documents": d} for d in numbers or self.documents] or [{}]
        return [
            question
            for kind in kinds
            for question in documents.load(self.task, n=n, seed=TEST_SEED, split="test", **kind, **self.options)
        ]


class Trained(_Strict):
    """A Writer's training questions, in equal parts of several tasks. seeds: those of the study, unless said."""

    tasks: tuple[str, ...] = Field(min_length=1)
    seeds: tuple[int, ...] | None = None


class Look(_Strict):
    """A Writer of seed 0 looked at on `n` questions of a task."""

    writer: str
    task: str
    documents: int
    n: int


class Study(_Strict):
    """Everything that decides a study.

    Attributes:
        kinds: of Writers, each trained on every entry of `writers` with every one of its `seeds`.
        training: of `training.Settings`; lr: the learning rate of each kind. rank, wrapper_tokens: of the Writers.
        samples, validation: training questions of a Writer. questions: test questions per task and number of documents.
        deviation, regions: what `attention_deviation` and `regions.py` look at. notes: pair family -> the Writer
            whose caches of it are patched, `pairs` pairs of each family; probed: those that are read by probes, too.

    Raises InputError that names the file and the entry.
    """

    model: str
    kinds: tuple[Kind, ...]
    seeds: tuple[int, ...]
    training: dict[str, Any]
    lr: dict[str, float]
    samples: int
    validation: int
    questions: int
    tasks: dict[str, Task]
    writers: dict[str, Trained]
    rank: int = 8
    wrapper_tokens: int = 8
    deviation: Look | None = None
    regions: Look | None = None
    notes: dict[str, str] = {}
    probed: tuple[str, ...] = ()
    pairs: int = 16

    @model_validator(mode="after")
    def _names_exist(self) -> Study:
        looks = [look for look in (self.deviation, self.regions) if look is not None]
        named = [
            *((task, self.tasks) for writer in self.writers.values() for task in writer.tasks),
            *((look.task, self.tasks) for look in looks),
            *((name, self.writers) for name in (*(look.writer for look in looks), *self.notes.values())),
            *((kind, self.lr) for kind in self.kinds),
            *((family, self.notes) for family in self.probed),
        ]
        for name, known in named:
            if name not in known:
                raise ValueError(f'"{name}" is not among {", ".join(known)}.{nearest(name, known)}')
        return self

    @classmethod
    def read(cls, name: str) -> Study:
        """The study `name` of this folder, or of a YAML file."""
        path = Path(name) if name.endswith(".yaml") else HERE / f"{name}.yaml"
        if not path.is_file():
            known = sorted(p.stem for p in HERE.glob("*.yaml"))
            raise InputError(f'there is no study "{name}".{nearest(name, known)} Studies: {", ".join(known)}.')
        try:
            return cls(**yaml.safe_load(path.read_text(encoding="utf-8")))
        except ValidationError as error:
            fault = error.errors()[0]
            raise InputError(f"{path}, {'.'.join(map(str, fault['loc']))}: {fault['msg']}") from None

    def settings(self, kind: str, seed: int) -> Settings:
        """Of one training run."""
        return Settings(**self.training, lr=self.lr[kind], seed=seed)

    def seeds_of(self, writer: str) -> tuple[int, ...]:
        """The study's seeds that this Writer is trained with."""
        own = self.writers[writer].seeds
        return tuple(seed for seed in self.seeds if own is None or seed in own)

    def drawn(self, writer: str, seed: int) -> tuple[list[Question], list[Question]]:
        """(training, validation) questions of a Writer, as many of each of its tasks."""
        tasks = [self.tasks[name] for name in self.writers[writer].tasks]
        parts = [
            draw(
                one.task,
                samples=self.samples // len(tasks),
                validation=self.validation // len(tasks),
                docs=one.documents or None,
                seed=seed,
                **one.options,
            )
            for one in tasks
        ]
        return [q for train, _ in parts for q in train], [q for _, held in parts for q in held]
