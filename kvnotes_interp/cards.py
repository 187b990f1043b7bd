"""Probe cards: one YAML file per claim, with the task, the probe, its options, and the outcome the claim expects.

    claim: A derived conclusion is read from the notes, not from the field.
    paper: Models Take Notes at Prefill, arXiv 2606.17107
    section: Locality
    probe: local_patching
    arms:
      derived: {task: pronoun}
      verbatim: {task: capital}
    n: 32
    seed: 0
    options: {views: [random]}
    expect:
      - {value: derived.field_only, below: 0.25}
      - {value: derived.downstream_only, above: derived.random_site}

A bound is a number or another value of the card. An expectation *holds* when the whole 95 % interval lies on its side,
*fails* when it lies on the other, and is *undecided* in between. A claim that fails is a result, not an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvnotes_interp.errors import InputError, nearest
from kvnotes_interp.files import read_yaml

if TYPE_CHECKING:
    from kvnotes_interp.model import Model
    from kvnotes_interp.results import Result

Probe = Literal[
    "local_patching",
    "suffix_concentration",
    "linear_decodability",
    "circuit_ablation",
    "attention_deviation",
    "edit_frontier",
    "splice_quality",
    "compaction_quality",
    "compaction_survival",
]
PROBES: tuple[str, ...] = get_args(Probe)
Outcome = Literal["holds", "fails", "undecided"]
_NOT_IN_CARDS = ("seed", "out", "resume", "memory_budget", "path", "progress")  # set by the card itself, or per run


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Arm(_Strict):
    """One task that the card's probe runs on."""

    task: str
    options: dict[str, Any] = Field(default_factory=dict)


class Expectation(_Strict):
    """`value` (arm.quantity) lies above or below a number, or another value."""

    value: str
    above: float | str | None = None
    below: float | str | None = None

    @model_validator(mode="after")
    def _one_bound(self) -> Expectation:
        if (self.above is None) == (self.below is None):
            raise ValueError("give exactly one of above and below")
        return self

    def __str__(self) -> str:
        side, bound = ("above", self.above) if self.above is not None else ("below", self.below)
        return f"{self.value} {side} {bound}"


class Card(_Strict):
    """A claim, and the run that tests it."""

    claim: str
    paper: str
    section: str
    probe: Probe
    arms: dict[str, Arm] = Field(min_length=1)
    n: int = Field(default=32, ge=1)
    seed: int = 0
    options: dict[str, Any] = Field(default_factory=dict)
    expect: list[Expectation] = Field(min_length=1)
    note: str = ""

    @model_validator(mode="after")
    def _names_its_arms(self) -> Card:
        for expectation in self.expect:
            for value in (expectation.value, expectation.above, expectation.below):
                arm = str(value).partition(".")[0]
                if isinstance(value, str) and ("." not in value or arm not in self.arms):
                    raise ValueError(
                        f'"{value}" should be arm.quantity, with one of the arms {", ".join(self.arms)}.'
                        f"{nearest(arm, self.arms)}"
                    )
        return self


@dataclass(frozen=True)
class Verdict:
    """What became of a card's expectations on one model."""

    card: Card
    model: str
    results: Mapping[str, Result]
    outcomes: tuple[tuple[Expectation, str, Outcome], ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "claim": self.card.claim,
            "paper": self.card.paper,
            "section": self.card.section,
            "model": self.model,
            "expectations": [
                {"expected": str(e), "measured": measured, "outcome": outcome} for e, measured, outcome in self.outcomes
            ],
            "arms": {name: result.summary().to_dict() for name, result in self.results.items()},
        }

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        colours = {"holds": "green", "fails": "red", "undecided": "yellow"}
        table = Table("expected", "measured (95% interval)", "")
        for expectation, measured, outcome in self.outcomes:
            table.add_row(Text(str(expectation)), measured, Text(outcome, style=colours[outcome]))
        source = Text(f"{self.card.paper}, {self.card.section}; {self.model}", style="dim")
        summaries = [result.summary() for result in self.results.values()]
        return Group(*summaries, Text(self.card.claim, style="bold"), source, table)


def read(path: str | Path) -> Card:
    """Read a card. Raises InputError that names the file, the entry and what it should be."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"there is no card {path}.{nearest(path.name, [p.name for p in folder(path.parent)])}")
    try:
        card = Card.model_validate(read_yaml(path, "card"))
    except ValidationError as error:
        raise InputError(f"{path}: {_first(error)}.") from error
    from kvnotes_interp import tasks

    for name, arm in card.arms.items():
        try:
            documents = arm.task in (*tasks.documents.names(), *tasks.documents.names_from_files())
            known = tasks.documents.options(arm.task) if documents else tasks.info(arm.task).options
        except InputError as error:
            raise InputError(f"{path}: arms.{name}.task: {error}") from error
        _known(f"{path}: arms.{name}.options", arm.options, [*known, "split"])
    return card


def _first(error: ValidationError) -> str:
    """The first fault, with its place, the nearest right name, and what stands there."""
    fault = error.errors()[0]
    where = ".".join(str(part) for part in fault["loc"]) or "the card"
    if fault["type"] == "extra_forbidden":
        kinds: dict[str, type[BaseModel]] = {"arms": Arm, "expect": Expectation}
        fields = kinds.get(str(fault["loc"][0]), Card).model_fields
        return f"{where}: there is no such entry.{nearest(str(fault['loc'][-1]), fields)} Entries: {', '.join(fields)}"
    message = fault["msg"].removeprefix("Value error, ")
    found = fault.get("input")
    if fault["type"] == "literal_error":
        message += "." + nearest(str(found), PROBES)
    return f"{where}: {message}" + ("" if isinstance(found, dict | BaseModel) else f" (got {str(found)[:60]!r})")


def _known(where: str, options: Mapping[str, Any], known: Sequence[str]) -> None:
    for name in options:
        if name not in known:
            raise InputError(
                f"{where}: there is no option {name!r}.{nearest(name, known)} Options: {', '.join(known)}."
            )


def run(
    card: Card,
    model: Model,
    *,
    n: int | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
) -> Verdict:
    """Run every arm of a card on a model and hold the outcome against what the card expects.

    `out` gets one run folder per arm, and verdict.json. Raises InputError on an option that the probe does not have,
    and when an expectation names a value that was not measured (the runs are kept).
    """
    import inspect

    from kvnotes_interp import probes, tasks

    probe = getattr(probes, card.probe)
    own = [name for name, p in inspect.signature(probe).parameters.items() if p.kind is p.KEYWORD_ONLY]
    _known("the card's options", card.options, [name for name in own if name not in _NOT_IN_CARDS])
    results: dict[str, Result] = {}
    for name, arm in card.arms.items():
        items = tasks.load_items(arm.task, n=n or card.n, seed=card.seed, **arm.options)
        folder = None if out is None else Path(out) / name
        # A killed card is taken up arm by arm: those not begun yet simply start.
        results[name] = probe(
            model, items, seed=card.seed, out=folder, resume=resume, progress=progress, **card.options
        )
    values: dict[str, Mapping[Any, Any]] = {
        f"{arm}.{row['quantity']}": row
        for arm, result in results.items()
        for row in result.summary().rows.to_dict("records")
    }
    verdict = Verdict(card, model.name, results, tuple(_judge(e, values) for e in card.expect))
    if out is not None:
        from kvnotes_interp.results.manifest import write_json

        write_json(Path(out) / "verdict.json", verdict.to_dict())
    return verdict


def _judge(expectation: Expectation, values: Mapping[str, Mapping[Any, Any]]) -> tuple[Expectation, str, Outcome]:
    row = _value(expectation.value, values)
    above = expectation.above is not None
    bound = expectation.above if above else expectation.below
    other: Mapping[Any, Any] = (
        _value(bound, values) if isinstance(bound, str) else dict.fromkeys(("mean", "low", "high"), bound)
    )
    upper, lower = (row, other) if above else (other, row)  # the claim: all of `upper` lies above all of `lower`
    ends = [float(v) for v in (upper["low"], upper["high"], lower["low"], lower["high"])]
    measured = f"{row['mean']:.3f} ({row['low']:.3f} to {row['high']:.3f})"
    if isinstance(bound, str):
        measured += f" against {other['mean']:.3f}"
    if any(math.isnan(v) for v in ends):  # one content only, or nothing measured: there is no interval to judge by
        return expectation, measured.replace("nan", "–"), "undecided"
    upper_low, upper_high, lower_low, lower_high = ends
    if upper_low > lower_high:
        return expectation, measured, "holds"
    return expectation, measured, "fails" if upper_high < lower_low else "undecided"


def _value(name: str, values: Mapping[str, Mapping[Any, Any]]) -> Mapping[Any, Any]:
    if name not in values:
        raise InputError(f'the card expects something of "{name}", which no arm measured.{nearest(name, values)}')
    return values[name]


def folder(path: str | Path) -> list[Path]:
    """All cards of a folder, by name; none where there is no folder."""
    return sorted(Path(path).glob("*.yaml"))
