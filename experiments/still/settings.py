"""A study of compactors: what is trained, and what all of them are measured on. One YAML file each."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from experiments.studies import Strict, StudyFile, Task, check_names, drawn
from kvnotes_interp.operators.scorer import ScorerSettings
from kvnotes_interp.operators.still import StillSettings
from kvnotes_interp.tasks.documents import Question
from kvnotes_interp.training import Compacting, Selecting, Settings

HERE = Path(__file__).parent


class Trained(Strict):
    """A compactor that is trained on questions in equal parts of several tasks.

    Attributes:
        method: "still", or "scorer", the trained choice of slots.
        seeds: those of the study, unless said. training: of `training.Settings`, over those of the study.
        options: of the method's `Compacting` or `Selecting`, such as its horizon, or ratios other
            than the study's. settings: of the compactor itself.
    """

    method: Literal["still", "scorer"] = "still"
    tasks: tuple[str, ...] = Field(min_length=1)
    seeds: tuple[int, ...] | None = None
    training: dict[str, Any] = Field(default_factory=dict)
    options: dict[str, Any] = Field(default_factory=dict)
    settings: dict[str, Any] = Field(default_factory=dict)


class Asked(Strict):
    """Questions of a task, asked of caches of these trained and other compactors."""

    task: str
    trained: tuple[str, ...] = ()
    compactors: tuple[str, ...] = ()
    ratios: tuple[float, ...]
    passes: tuple[int, ...] = (1,)
    questions: int


class Survival(Strict):
    """Pairs of these families, decided on caches of these trained and other compactors."""

    families: tuple[str, ...]
    trained: tuple[str, ...] = ()
    compactors: tuple[str, ...]
    ratios: tuple[float, ...]
    pairs: int


class Study(StudyFile):
    """Everything that decides a study.

    Attributes:
        training: of `training.Settings`. ratios: lowest and highest in training.
        samples, validation: training questions of a compactor.
        quality: name -> what is asked; one run folder each.
    """

    model: str
    seeds: tuple[int, ...]
    training: dict[str, Any]
    ratios: tuple[float, float] = (4.0, 16.0)
    samples: int
    validation: int
    tasks: dict[str, Task]
    trained: dict[str, Trained]
    quality: dict[str, Asked]
    survival: Survival | None = None

    @model_validator(mode="after")
    def _names_exist(self) -> Study:
        asked = [*self.quality.values(), *([] if self.survival is None else [self.survival])]
        check_names(
            [
                *((task, self.tasks) for one in self.trained.values() for task in one.tasks),
                *((one.task, self.tasks) for one in self.quality.values()),
                *((name, self.trained) for one in asked for name in one.trained),
            ]
        )
        for name, one in self.trained.items():
            self.settings(name, 0)
            (StillSettings if one.method == "still" else ScorerSettings)(**one.settings)
            method = Compacting if one.method == "still" else Selecting
            check_names([(option, list(signature(method).parameters)) for option in one.options])
            check_names([(str(seed), list(map(str, self.seeds))) for seed in one.seeds or ()])
        return self

    @classmethod
    def read(cls, name: str, folder: Path = HERE) -> Self:
        return super().read(name, folder)

    def settings(self, name: str, seed: int) -> Settings:
        """Of one training run."""
        return Settings(**{**self.training, **self.trained[name].training, "seed": seed})

    def seeds_of(self, name: str) -> tuple[int, ...]:
        """The study's seeds that this compactor is trained with."""
        own = self.trained[name].seeds
        return tuple(seed for seed in self.seeds if own is None or seed in own)

    def drawn(self, name: str, seed: int) -> tuple[list[Question], list[Question]]:
        """(training, validation) questions of a compactor, as many of each of its tasks."""
        tasks = [self.tasks[task] for task in self.trained[name].tasks]
        return drawn(tasks, self.samples, self.validation, seed)
