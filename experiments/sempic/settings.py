"""A study: what Writers are trained on, and what they are measured on. One YAML file each."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from experiments.studies import Strict, StudyFile, Task, check_names, drawn
from kvnotes_interp.operators.writer import Kind
from kvnotes_interp.tasks.documents import Question
from kvnotes_interp.training import Settings

HERE = Path(__file__).parent


class Trained(Strict):
    """A Writer's training questions, in equal parts of several tasks. seeds: those of the study, unless said."""

    tasks: tuple[str, ...] = Field(min_length=1)
    seeds: tuple[int, ...] | None = None


class Look(Strict):
    """A Writer of seed 0 looked at on `n` questions of a task."""

    writer: str
    task: str
    documents: int
    n: int


class Study(StudyFile):
    """Everything that decides a study.

    Attributes:
        kinds: of Writers, each trained on every entry of `writers` with every one of its `seeds`.
        training: of `training.Settings`; lr: the learning rate of each kind. rank, wrapper_tokens: of the Writers.
        samples, validation: training questions of a Writer. questions: test questions per task and number of documents.
        deviation, regions: what `attention_deviation` and `regions.py` look at. notes: pair family -> the Writer
            whose caches of it are patched, `pairs` pairs of each family; probed: those that are read by probes, too.

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
    notes: dict[str, str] = Field(default_factory=dict)
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
        check_names(named)
        return self

    @classmethod
    def read(cls, name: str, folder: Path = HERE) -> Self:
        return super().read(name, folder)

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
        return drawn(tasks, self.samples, self.validation, seed)
