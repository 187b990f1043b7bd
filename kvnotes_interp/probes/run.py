"""The run of a probe over pairs: encode, set aside, measure one pair at a time, keep each, resume."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pandas as pd

from kvnotes_interp.engine import plan_sweep
from kvnotes_interp.errors import NOT_FINITE, InputError, NotFiniteError
from kvnotes_interp.metrics import Competence
from kvnotes_interp.probes.making import PREFILL, Making
from kvnotes_interp.probes.measure import Case, Sweeper, open_case, pair_row
from kvnotes_interp.probes.request import machine_of, runnable, with_items
from kvnotes_interp.progress import Bar
from kvnotes_interp.results import Result, Run, Summary
from kvnotes_interp.results.tables import PAIR_COLUMNS
from kvnotes_interp.tasks import EncodedPair, Pair, encode_all

if TYPE_CHECKING:
    from kvnotes_interp.model import Model
    from kvnotes_interp.probes.items import Item

T = TypeVar("T")


class Session:
    """One probe on one model over some pairs. Stages are measured in order; each keeps one table per pair.

    Use as a context manager: the run folder's lock is let go on the way out.
    """

    def __init__(
        self,
        model: Model,
        request: dict[str, Any],
        pairs: Sequence[Pair],
        *,
        competence: Competence,
        out: str | Path | None,
        resume: bool,
        memory_budget: int | None,
        path: str,
        progress: bool,
        making: Making = PREFILL,
    ) -> None:
        if model.tokenizer is None:
            raise InputError(f"{model.name} was loaded without a tokenizer; pass kv.load(..., tokenizer=...).")
        self.model, self.competence, self.path, self.progress = model, competence, path, progress
        self.memory_budget, self.making = memory_budget, making
        encoded, refused = encode_all(model.tokenizer, pairs)
        self.encoded, unfit = runnable(model, [making.aligned(pair) for pair in encoded])
        self.aside = [*refused, *unfit]
        self.lost: dict[str, str] = {}  # pairs that gave NaN or infinity in any stage, and why
        self.families = {pair.key: pair.family for pair in pairs}
        request = with_items(request, self.encoded, self.aside)
        self.folder = Run.open(out, request=request, extra={"machine": machine_of(model)}, resume=resume)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.folder.close()

    def open_case(self, pair: EncodedPair, sweeper: Sweeper) -> Case:
        """The pair on this model; an adapter opens it through another engine."""
        return open_case(self.model, pair, competence=self.competence, sweeper=sweeper, making=self.making)

    def run(
        self, stage: str, measure: Callable[[Case], pd.DataFrame], *, cost: Callable[[EncodedPair], int]
    ) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Measure every competent pair that this stage has not kept yet.

        Returns the stage's rows in the order of the pairs, and the table of all pairs tried.
        """
        lines = f"{stage}.pairs"
        costs = {pair.pair.key: cost(pair) for pair in self.encoded}
        self._announce(costs)
        with Bar(total=sum(costs.values()), description=stage, enabled=self.progress) as bar:
            for pair in self.encoded:
                key, counter = pair.pair.key, _Counter(bar)
                if not self.folder.done(lines, key):
                    sweeper = Sweeper(self.memory_budget, self.path, counter)
                    try:
                        case = self.open_case(pair, sweeper)
                        rows = None if case.reason else measure(case)
                        line = pair_row(case, pair)
                    except NotFiniteError as error:
                        rows, line = None, excluded_line(pair.pair, error)
                    if rows is not None:
                        self.folder.put(stage, key, rows)
                    # The pair's own line comes last: it says that the pair is done.
                    self.folder.put(lines, key, pd.DataFrame([line]), columns=PAIR_COLUMNS)
                counter.fill(costs[key])
        keys = [pair.pair.key for pair in self.encoded]
        rows = self.folder.stage(stage, [key for key in keys if self.folder.done(stage, key)])
        tried = self.folder.stage(lines, keys) if keys else pd.DataFrame(columns=list(PAIR_COLUMNS))
        lost = tried[tried["reason"].fillna("").str.startswith(NOT_FINITE)]
        self.lost |= dict(zip(lost["pair"], lost["reason"], strict=True))
        if self.aside:
            aside = pd.DataFrame([{**pair_row(None, a), "family": self.families[a.key]} for a in self.aside])
            tried = pd.concat([tried, aside], ignore_index=True)
        return rows, tried

    def settled(self, frame: pd.DataFrame, tried: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
        """(frame, table of pairs) of several stages: a pair that gave NaN in one of them is out of all."""
        late = tried["pair"].isin(list(self.lost)) & tried["competent"].astype(bool)
        if not late.any():
            return frame, tried
        reason = tried["reason"].where(~late, tried["pair"].map(self.lost))
        tried = tried.assign(competent=tried["competent"].astype(bool) & ~late, reason=reason)
        return frame[~frame["pair"].isin(list(self.lost))].reset_index(drop=True), tried

    def _announce(self, costs: dict[str, int]) -> None:
        """Say how the largest pair will be cut into batches, before anything runs."""
        if self.progress and costs:
            from rich.console import Console

            longest = max(self.encoded, key=lambda pair: costs[pair.pair.key])
            plan = plan_sweep(
                self.model,
                costs[longest.pair.key],
                longest.length - longest.tail,
                longest.tail,
                memory_budget=self.memory_budget,
                path=self.path,  # type: ignore[arg-type]
            )
            Console(stderr=True).print(f"largest pair: {plan}", highlight=False, markup=False)

    def finish(self, frame: pd.DataFrame, tried: pd.DataFrame, summary: Summary) -> Result:
        """Write the tables and figures and hand back the result."""
        noise = frame.loc[(frame["view"] == "control") & (frame["site"] == "noise_floor"), "value"]
        return self.folder.finish(
            frame=frame,
            pairs=tried,
            summary=summary,
            noise_floor=None if noise.empty else float(noise.max()),
            sweep_path=sorted(set(tried["sweep_path"].dropna())) if "sweep_path" in tried else [],
        )


def excluded_line(source: Pair | Item, error: NotFiniteError) -> dict[str, Any]:
    """The line of the pairs table for what gave NaN or infinity."""
    about = {name: getattr(source, name) for name in ("content", "family", "kind", "split")}
    return {"pair": source.key, **about, "competent": False, "reason": error.reason}


def run_items(
    run: Run,
    items: Sequence[T],
    measure: Callable[[T], tuple[pd.DataFrame, dict[str, Any]]],
    *,
    key: Callable[[T], Pair | Item],
    aside: Sequence[dict[str, Any]],
    description: str,
    progress: bool,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Measure every item that the run has not kept yet: (rows in the order of the items, the table of all tried).

    `measure` gives an item's rows and its line of the pairs table; `key` what the item is of.
    """
    with Bar(total=len(items), description=description, enabled=progress) as bar:
        for item in items:
            name = key(item).key
            if not run.done("pairs", name):
                try:
                    table, line = measure(item)
                except NotFiniteError as error:
                    table, line = pd.DataFrame(), excluded_line(key(item), error)
                if line["competent"]:
                    run.put("rows", name, table)
                # The item's own line comes last: it says that the item is done.
                run.put("pairs", name, pd.DataFrame([line]), columns=PAIR_COLUMNS)
            bar.advance()
    keys = [key(item).key for item in items]
    frame = run.stage("rows", [k for k in keys if run.done("rows", k)])
    tried = run.stage("pairs", keys) if keys else pd.DataFrame(columns=list(PAIR_COLUMNS))
    if aside:
        tried = pd.concat([tried, pd.DataFrame([{**line, "competent": False} for line in aside])], ignore_index=True)
    return frame, tried


class _Counter:
    """Passes finished rows on to the bar, and fills up to the announced cost when a pair ends early."""

    def __init__(self, bar: Bar) -> None:
        self.bar, self.seen = bar, 0

    def __call__(self, rows: int) -> None:
        self.seen += rows
        self.bar.advance(rows)

    def fill(self, total: int) -> None:
        self.bar.advance(total - self.seen)
