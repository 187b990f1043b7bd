"""Time to compact a context: Still against methods that work on each context anew, and against its prefill."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.memory import peak_of
from benchmarks.patch_sweep import Disagreement
from benchmarks.report import Table, mib
from benchmarks.timing import Spread, interleaved, seconds

if TYPE_CHECKING:
    from kvnotes_interp.cache import KVCache
    from kvnotes_interp.model import Model
    from kvnotes_interp.operators.eviction import Compacted

LENGTHS, RATIO, MORE_RATIO = (512, 1024, 2048), 8.0, 32.0  # the second ratio at the first length only
STILL, PREFILL, TRAINED = "Still", "prefill", "trained cache"
METHODS = {
    "random slots, 4 sinks": "random@4",
    "key norm": "key_norm",
    "StreamingLLM": "streaming",
    "H2O": "h2o",
    "SnapKV": "snapkv",
    "Attention Matching": "attention_matching",
}
FEW, MORE = 1, 4  # steps of the trained cache that are timed; the difference is that of steps alone
LONG = 1024  # tokens beyond which there is one round less, and no run on its own for peak memory
CHECK = 12  # steps that are also run in one go, once, to see whether steps add up

Job = Callable[[], "Compacted"]
Arm = tuple[float, str]  # ratio, method


def points_of(lengths: Sequence[int] = LENGTHS) -> dict[int, tuple[float, ...]]:
    """The ratios at every length."""
    return {tokens: (RATIO, MORE_RATIO) if tokens == lengths[0] else (RATIO,) for tokens in lengths}


def context(model: Model, tokens: int, *, seed: int = 0) -> list[int]:
    """Biographies, cut to exactly so many token ids; random ids for a model without a tokenizer."""
    if model.tokenizer is None:
        rng = random.Random(seed)
        return [rng.randrange(3, model.shape.vocab) for _ in range(tokens)]
    from kvnotes_interp import tasks

    ids: list[int] = []
    for question in tasks.documents.load("biography", n=1 + tokens // 16, seed=seed, documents=1):
        ids += model.tokenizer(question.documents[0], add_special_tokens=False)["input_ids"]
        if len(ids) >= tokens:
            break
    return ids[:tokens]


@dataclass
class At:
    """Everything measured at one length."""

    seconds: dict[str, dict[float, list[float]]] = field(default_factory=dict)  # method -> ratio -> per round
    bytes: dict[str, dict[float, float]] = field(default_factory=dict)  # share of the full cache's
    peak: dict[str, dict[float, int]] = field(default_factory=dict)
    steps: dict[float, dict[int, list[float]]] = field(default_factory=dict)  # of the trained cache: as timed
    per_step: dict[float, list[float]] = field(default_factory=dict)
    checked: dict[float, float] = field(default_factory=dict)  # seconds of `CHECK` steps, run once


def run(
    model: Model,
    *,
    points: Mapping[int, Sequence[float]] | None = None,
    rounds: int = 3,
    check: bool = True,
    say: Callable[[str], object] = lambda _: None,
) -> tuple[tuple[Table, ...], dict[str, Any]]:
    """A table per length of `points`: seconds, times Still, times the prefill, bytes kept, peak memory.

    The context is prefilled beforehand; every method starts from its cache. Rounds are interleaved, a length at a time,
    with all ratios and the prefill in each; a ratio of times is taken within a round. Of the trained cache `FEW` and
    `MORE` steps are timed, and its default number of steps is extrapolated; with `check` it is also run for `CHECK`
    steps, once, at the first length and ratio. Raises Disagreement when methods keep different numbers of slots.
    """
    from kvnotes_interp import engine
    from kvnotes_interp.operators.eviction.trained_cache import trained_cache
    from kvnotes_interp.operators.still import new_still

    points = points_of() if points is None else points
    compactor = new_still(model)
    steps = int(inspect.signature(trained_cache).parameters["steps"].default)
    for job in jobs_of(model, compactor, engine.prefill(model, context(model, 64)), 2).values():
        job()  # whatever is done at a first run only
    found = {tokens: _measure(model, compactor, tokens, points[tokens], rounds, steps, say) for tokens in points}
    if check:
        tokens, ratio = next((tokens, ratios[0]) for tokens, ratios in points.items())
        say(f"{tokens:,} tokens, {ratio:g}x, {_steps(CHECK)}")
        found[tokens].checked[ratio] = _checked(model, tokens, ratio)
    tables = tuple(_table(model, tokens, at, points[tokens], steps) for tokens, at in found.items())
    share = compactor.n_parameters / model.shape.n_params if model.shape.n_params else None
    raw = {
        "model": model.name,
        "still_parameters": compactor.n_parameters,
        "still_share_of_model": share,
        "trained_cache_steps": steps,
        "lengths": {tokens: vars(at) for tokens, at in found.items()},
    }
    return tables, raw


def jobs_of(model: Model, still: Any, cache: KVCache, ratio: float) -> dict[str, Job]:
    """Every method as a call that compacts this cache at this ratio; the trained cache by its number of steps."""
    from kvnotes_interp.operators import eviction

    budget = eviction.budget_of(cache, ratio)

    def job(name: str, **options: Any) -> Job:
        return partial(eviction.find(name), model, cache, budget=budget, **options)

    jobs = {STILL: job("still", adapter=still)}
    jobs |= {title: job(name) for title, name in METHODS.items()}
    return jobs | {_steps(count): job("trained_cache", steps=count) for count in (FEW, MORE)}


def _steps(count: int) -> str:
    return f"{TRAINED}, {count} steps"


def _measure(
    model: Model,
    still: Any,
    tokens: int,
    ratios: Sequence[float],
    rounds: int,
    steps: int,
    say: Callable[[str], object],
) -> At:
    from kvnotes_interp import engine

    prefill = partial(engine.prefill, model, context(model, tokens))
    cache, at = prefill(), At()
    slots: dict[Arm, tuple[int, ...]] = {}
    calls: dict[Arm, Callable[[], object]] = {(1.0, PREFILL): prefill}

    def compact(arm: Arm, job: Job) -> None:
        made = job().cache
        slots[arm] = made.slots
        at.bytes.setdefault(_title(arm[1]), {})[arm[0]] = made.nbytes / cache.nbytes

    for ratio in ratios:
        for name, job in jobs_of(model, still, cache, ratio).items():
            calls[ratio, name] = partial(compact, (ratio, name), job)
    for (ratio, name), call in calls.items():
        if tokens <= LONG and name != _steps(MORE):
            say(f"{tokens:,} tokens, memory: {name}" + (f" at {ratio:g}x" if name != PREFILL else ""))
            at.peak.setdefault(_title(name), {})[ratio], _ = peak_of(call, model.device)
    timed = _timed(calls, tokens, rounds if tokens <= LONG else max(1, rounds - 1), model, say)
    _agree(slots)
    for (ratio, name), taken in timed.items():
        at.seconds.setdefault(name, {})[ratio] = taken
    few, more = (at.seconds.pop(_steps(count)) for count in (FEW, MORE))
    at.seconds[TRAINED] = {}
    for ratio in ratios:
        at.steps[ratio] = {FEW: few[ratio], MORE: more[ratio]}
        at.per_step[ratio], at.seconds[TRAINED][ratio] = extrapolated(few[ratio], more[ratio], steps)
    return at


def _title(name: str) -> str:
    return TRAINED if name in (_steps(FEW), _steps(MORE)) else name


def _timed(
    calls: Mapping[Arm, Callable[[], object]], tokens: int, rounds: int, model: Model, say: Callable[[str], object]
) -> dict[Arm, list[float]]:
    """Seconds of every call in every round, interleaved."""
    begun: set[int] = set()

    def run(turn: int, call: Callable[[], object]) -> object:
        if turn not in begun:
            begun.add(turn)
            say(f"{tokens:,} tokens, round {turn + 1} of {rounds}")
        return call()

    names = {f"{name} at {ratio:g}x": (ratio, name) for ratio, name in calls}
    jobs = {key: partial(run, call=calls[arm]) for key, arm in names.items()}
    return {names[key]: taken for key, taken in interleaved(jobs, rounds=rounds, device=model.device).items()}


def _agree(slots: dict[Arm, tuple[int, ...]]) -> None:
    for (ratio, name), count in slots.items():
        if count != slots[ratio, STILL]:
            raise Disagreement(f"at {ratio:g}x {name} keeps {count} slots per layer, Still {slots[ratio, STILL]}.")


def _checked(model: Model, tokens: int, ratio: float) -> float:
    from kvnotes_interp import engine
    from kvnotes_interp.operators import eviction

    cache, find = engine.prefill(model, context(model, tokens)), eviction.find("trained_cache")
    return seconds(lambda: find(model, cache, budget=eviction.budget_of(cache, ratio), steps=CHECK), model.device)


def extrapolated(few: Sequence[float], more: Sequence[float], steps: int) -> tuple[list[float], list[float]]:
    """(seconds per step, seconds of `steps` steps), per round, from the seconds of `FEW` and of `MORE` steps.

    What is done once (the full cache's answers, which are learned from) is in both and in the result.
    """
    each = [(b - a) / (MORE - FEW) for a, b in zip(few, more, strict=True)]
    return each, [a + (steps - FEW) * one for a, one in zip(few, each, strict=True)]


def _table(model: Model, tokens: int, at: At, ratios: Sequence[float], steps: int) -> Table:
    columns = ("method", "s", "times Still", "times the prefill", "bytes kept")
    prefill = at.seconds[PREFILL][1.0]
    rows: list[tuple[str, ...]] = [("prefill of the context", Spread.of(prefill).text(), "", "1", "100.0%")]
    peaks = [at.peak.get(PREFILL, {}).get(1.0)]
    for ratio in ratios:
        still = at.seconds[STILL][ratio]
        for name in (STILL, *METHODS, TRAINED):
            own = at.seconds[name][ratio]
            taken, times, prefills = (Spread.of(x).text() for x in (own, _over(own, still), _over(own, prefill)))
            title = f"{name}, {steps} steps *" if name == TRAINED else name
            kept = f"{at.bytes[name][ratio]:.1%}"
            rows.append((f"{ratio:g}x: {title}", taken, "1" if name == STILL else times, prefills, kept))
            peaks.append(at.peak.get(name, {}).get(ratio))
    if at.peak:
        columns = (*columns, "peak memory")
        rows = [(*row, "" if peak is None else mib(peak)) for row, peak in zip(rows, peaks, strict=True)]
    each = ", ".join(f"{Spread.of(values).text()} s at {ratio:g}x" for ratio, values in at.per_step.items())
    notes = [f"* Extrapolated from {FEW} and {MORE} steps: {each} a step."]
    for ratio, taken in at.checked.items():
        _, guess = extrapolated(at.steps[ratio][FEW], at.steps[ratio][MORE], CHECK)
        notes.append(
            f"{CHECK} steps at {ratio:g}x, run once, took {taken:.3g} s; extrapolated {Spread.of(guess).text()} s."
        )
    about = (
        f"{model.name}. Median (min-max) of {len(prefill)} rounds, all methods, ratios and the prefill in each; the "
        "other ratios are taken within a round. Every method starts from the prefilled cache; none sees a question. "
        "Still is untrained: a trained one does the same arithmetic on other numbers; what its training costs, once, "
        "is not in here."
    )
    about += " Peak memory is what one call takes on top of model and cache." if at.peak else ""
    return Table(f"Time to compact {tokens:,} tokens", columns, tuple(rows), (*notes, about))


def _over(own: Sequence[float], other: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(own, other, strict=True)]
