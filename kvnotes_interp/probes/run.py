"""The run of a probe over pairs: encode, set aside, measure one pair at a time, keep each, resume."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from kvnotes_interp.engine import plan_sweep
from kvnotes_interp.errors import InputError
from kvnotes_interp.metrics import Competence
from kvnotes_interp.probes.making import PREFILL, Making
from kvnotes_interp.probes.measure import Case, Sweeper, open_case, pair_row
from kvnotes_interp.progress import Bar
from kvnotes_interp.results import Result, Run, Summary
from kvnotes_interp.results.tables import PAIR_COLUMNS
from kvnotes_interp.tasks import EncodedPair, Pair, encode_all

if TYPE_CHECKING:
    from kvnotes_interp.model import Model


def plan_request(probe: str, model: Model, pairs: Sequence[Pair], options: dict[str, Any]) -> dict[str, Any]:
    """Everything that decides the numbers of a run: a resumed run must ask for exactly this.

    Raises InputError when something else than pairs was given.
    """
    strangers = [type(p).__name__ for p in pairs if not isinstance(p, Pair)]
    if strangers:
        raise InputError(
            f"{probe} takes counterfactual pairs and was given a {strangers[0]}; take pairs from tasks.load(name, "
            "n=...). Document questions go to attention_deviation and splice_quality."
        )
    texts = json.dumps([[p.key, p.content, repr(p.old), repr(p.new)] for p in pairs], sort_keys=True)
    return {
        "probe": probe,
        "model": model.source.to_dict(),
        "model_id": model.model_id,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
        "tasks": sorted({p.family for p in pairs}),
        "n": len(pairs),
        "pairs_sha256": hashlib.sha256(texts.encode()).hexdigest(),
        "options": options,
    }


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
        if not pairs:
            raise InputError("no pairs were given; take some from tasks.load(name, n=...).")
        self.model, self.competence, self.path, self.progress = model, competence, path, progress
        self.memory_budget, self.making = memory_budget, making
        encoded, self.aside = encode_all(model.tokenizer, pairs)
        self.encoded = [making.aligned(pair) for pair in encoded]
        self.family = pairs[0].family
        machine = {"device": _device_name(model), "dtype": request["dtype"]}
        self.folder = Run.open(out, request=request, extra={"machine": machine}, resume=resume)

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
                    case = self.open_case(pair, sweeper)
                    if not case.reason:
                        self.folder.put(stage, key, measure(case))
                    # The pair's own line comes last: it says that the pair is done.
                    self.folder.put(lines, key, pd.DataFrame([pair_row(case, pair)]), columns=PAIR_COLUMNS)
                counter.fill(costs[key])
        keys = [pair.pair.key for pair in self.encoded]
        rows = self.folder.stage(stage, [key for key in keys if self.folder.done(stage, key)])
        tried = self.folder.stage(lines, keys) if keys else pd.DataFrame(columns=list(PAIR_COLUMNS))
        if self.aside:
            aside = pd.DataFrame([{**pair_row(None, a), "family": self.family} for a in self.aside])
            tried = pd.concat([tried, aside], ignore_index=True)
        return rows, tried

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


def _device_name(model: Model) -> str:
    if model.device.type != "cuda":
        return str(model.device)
    import torch

    return f"{model.device} ({torch.cuda.get_device_name(model.device)})"


class _Counter:
    """Passes finished rows on to the bar, and fills up to the announced cost when a pair ends early."""

    def __init__(self, bar: Bar) -> None:
        self.bar, self.seen = bar, 0

    def __call__(self, rows: int) -> None:
        self.seen += rows
        self.bar.advance(rows)

    def fill(self, total: int) -> None:
        self.bar.advance(total - self.seen)
