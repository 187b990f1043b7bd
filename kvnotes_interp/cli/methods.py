"""What `kvprobe train KIND` trains: the options that are a kind's own, the questions, and the method of the loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvnotes_interp.cli import options as opt
from kvnotes_interp.errors import InputError, nearest

if TYPE_CHECKING:
    from kvnotes_interp.model import Model
    from kvnotes_interp.training import Method, Part

# As in operators and training, which cannot be asked without importing torch; a test holds them together.
WRITERS = ("sempic", "packet", "joint")
KINDS = (*WRITERS, "still", "scorer")
BACKWARD = ("truncated", "full")
OUTPUTS = ("spread", "last")
INITS = ("identity", "plain")
WRITER_OPTIONS = ("rank", "alpha", "targets", "wrapper_tokens")
STILL_SETTINGS = ("blocks", "feed_forward", "bias", "outputs", "init", "final_norm")
STILL_OPTIONS = ("horizon", "backward", "consistency")
SCORER_SETTINGS = ("hidden", "update_rank")
SCORER_OPTIONS = ("temperature",)
OWN = {
    **dict.fromkeys(WRITERS, (*WRITER_OPTIONS, "checkpointing")),
    "still": (*STILL_SETTINGS, *STILL_OPTIONS, "ratios"),
    "scorer": (*SCORER_SETTINGS, *SCORER_OPTIONS, "ratios"),
}
"""The options of each kind; all others are of the questions and of the loop."""


def checked(kind: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the options that are this kind's own, lists read. Raises InputError on what there is not."""
    opt.choice("KIND", kind, KINDS)
    for name, words in (("backward", BACKWARD), ("outputs", OUTPUTS), ("init", INITS)):
        opt.choice(f"--{name}", given[name], words)
    own = {name: given[name] for name in OWN[kind]}
    if "targets" in own:
        own["targets"] = opt.words("--targets", own["targets"], opt.TARGETS, none=False)
    if "ratios" in own:
        two = "4,16"
        own["ratios"] = opt.numbers("--ratios", own["ratios"], float, above=1, such_as=two, again=True)
        if len(own["ratios"]) != 2 or own["ratios"][0] > own["ratios"][1]:
            raise InputError(f"--ratios {given['ratios']!r}: write the lowest and the highest, such as {two}.")
    return own


def parts_of(task: str, docs: str, given: Sequence[str] | None) -> list[Part]:
    """The tasks of `--task A,B`, each with its options: NAME=VALUE goes to all of them, A.NAME=VALUE to A alone.

    Raises InputError for what is no document task, twice the same one, and an option of a task that is not there.
    """
    from kvnotes_interp import tasks

    known = (*tasks.documents.names(), *tasks.documents.names_from_files())

    def document_task(name: str) -> str:
        if name not in known:
            raise InputError(
                f'--task "{name}": training needs a document task; use {", ".join(known)}.{nearest(name, known)}'
            )
        return name

    names = opt.read_list("--task", task, document_task, such_as="biography,gated", again=True)
    if len(set(names)) < len(names):
        raise InputError(f"--task {task!r} names a task twice: every one has an equal part of the questions.")
    numbers = opt.numbers("--docs", docs, int, least=1, such_as="2,3,5", empty=True) or None
    values = opt.task_options(list(given or ()))
    common = {option: value for option, value in values.items() if "." not in option}
    options: dict[str, dict[str, Any]] = {name: dict(common) for name in names}
    for where in values.keys() - common.keys():
        name, _, option = where.partition(".")
        if name not in options:
            raise InputError(f"--task-option {where}: {name!r} is not among the tasks of --task {task!r}.")
        options[name][option] = values[where]
    from kvnotes_interp.training import Part

    return [Part(name, numbers, options[name]) for name in names]


def method_of(kind: str, model: Model, *, seed: int, **own: Any) -> Method:
    """The method that trains a new Writer or compactor of this kind; `own` as `checked` gives them."""

    def taken(names: Sequence[str]) -> dict[str, Any]:
        return {name: own[name] for name in names}

    if kind in WRITERS:
        from kvnotes_interp.operators.writer import new_writer
        from kvnotes_interp.training import Writing

        writer = new_writer(model, kind, seed=seed, **taken(WRITER_OPTIONS))  # type: ignore[arg-type]
        return Writing(model, writer, checkpointing=own["checkpointing"])
    limits = own["ratios"]
    if kind == "still":
        from kvnotes_interp.operators.still import StillSettings, new_still
        from kvnotes_interp.training import Compacting

        still = new_still(model, settings=StillSettings(**taken(STILL_SETTINGS), seed=seed))
        return Compacting(model, still, ratios=limits, **taken(STILL_OPTIONS))
    from kvnotes_interp.operators.scorer import ScorerSettings, new_scorer
    from kvnotes_interp.training import Selecting

    scorer = new_scorer(model, settings=ScorerSettings(**taken(SCORER_SETTINGS), seed=seed))
    return Selecting(model, scorer, ratios=limits, **taken(SCORER_OPTIONS))
