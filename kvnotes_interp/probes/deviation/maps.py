"""Attention-deviation maps: how a composed cache is read, against full recompute of the same tokens.

For every operator and every chunk that stands behind something: the attention of chosen query rows over the chunk, raw
and renormalised inside it, as an absolute deviation per layer and relative position; what each query head retrieves
from the chunk; how far keys and values themselves are off; and the attention that a block's first token draws (the
sink). Beside it the readouts: KL, agreement, the answer, and logit cosine, which says nothing on its own.
(SemPIC, arXiv 2607.28069, attention deviation, boundary against interior, sink.)

Rows are captured in float32 for the chosen queries only: layers x heads x rows x tokens, never a T x T matrix.

What this does not prove: that a deviation *causes* a wrong answer. A chunk may be read differently and yet say the
same; the readouts stand beside the map for that reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from kvnotes_interp import attention, fingerprint
from kvnotes_interp import operators as library
from kvnotes_interp.engine.budget import default_budget, readable
from kvnotes_interp.errors import InputError, nearest
from kvnotes_interp.metrics import Competence
from kvnotes_interp.probes.deviation.measure import ROWS, Compose, Measure, Rows, plan_rows
from kvnotes_interp.probes.deviation.reductions import BINNINGS, Binning
from kvnotes_interp.probes.deviation.rows import Grain
from kvnotes_interp.probes.deviation.summary import summarise
from kvnotes_interp.probes.items import Item, items_of, sources_of
from kvnotes_interp.probes.request import machine_of, request_of, verb, with_items
from kvnotes_interp.probes.run import run_items
from kvnotes_interp.results import Result, Run
from kvnotes_interp.tasks import Pair
from kvnotes_interp.tasks.documents.question import Question

if TYPE_CHECKING:
    from kvnotes_interp.model import Model


@verb
def attention_deviation(
    model: Model,
    items: Sequence[Pair] | Sequence[Question],
    *,
    operators: Sequence[str | tuple[str, Compose]] = ("no_recompute",),
    rows: Rows = "terminal",
    edges: Sequence[float] = (0.1, 0.2, 0.3),
    bins: int = 20,
    binning: Binning = "overlap",
    max_new_tokens: int = 8,
    straddle: Literal["refuse", "show"] = "refuse",
    seed: int = 0,
    min_gap: float = 0.25,
    min_gap_noise: float = 50.0,
    out: str | Path | None = None,
    resume: bool = False,
    memory_budget: int | None = None,
    progress: bool = True,
) -> Result:
    """Measure how operators' caches are read, against full recompute.

    Args:
        items: counterfactual pairs (the old prompt, cut at its sentences) or document questions (cut at documents).
        operators: names of `operators.OPERATORS`, NAME@FOLDER for a learned one, or (name, function) for one of your
            own. Wrapper slots of a packet's cache are in no chunk.
        rows: queries whose attention is compared: "terminal" (last token of the suffix), "suffix" (all of it), or
            "answer" (those that predict the right answer's tokens, which are fed in turn).
        edges: ratios at which a chunk is cut into prefix, interior and suffix, between 0 and 0.5.
        bins: stretches of relative position. binning: "overlap" or "centre"; see `reductions.py`.
        max_new_tokens: greedy tokens per answer of a question.
        straddle: "refuse" a question whose pieces share a token, or "show" it and go on.
        min_gap, min_gap_noise: least score gap of a pair, in logits and in noise floors; see `Competence`. Questions
            all count, answered or not.
        seed: of the intervals. memory_budget: bytes for attention rows; by default a share of what is free.
        out, resume, progress: as in `local_patching`.

    Views of the frame; site is the operator: "deviation" (layer x position, the bin), "region", "retrieval" (layer),
    "retrieval_head" (layer x head), "kv" (layer x position, part k or v), "sink" (layer x position, the block) and
    "readout". Rows are means over chunks; intervals are over contents.

    Controls, per prompt: full recompute done twice, in one and in two passes, must agree; the join of a single block
    from slot 0 must equal full recompute; with keys not moved, rows must differ.

    Raises:
        InputError: unknown operator or option, nothing to measure, rows that exceed the memory budget.
        ControlError: a control failed; its numbers mean nothing.
    """
    chosen = _chosen(operators)
    grain = _grain(bins, edges, binning)
    if rows not in ROWS:
        raise InputError(f"rows={rows!r}: choose from {', '.join(ROWS)}.{nearest(str(rows), ROWS)}")
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens={max_new_tokens}: at least one token is needed to answer.")
    items = sources_of(items)
    attention.require(model.hf)
    competence = Competence(min_gap, min_gap_noise)
    found, aside = items_of(model, items, straddle=straddle)
    writers = library.adapters(chosen)
    trained: dict[str, Any] = {"adapters": writers} if writers else {}
    own = {name: fingerprint.function(f) for name, f in chosen.items() if name not in library.names()}
    trained |= {"functions": own} if own else {}
    options = {"operators": list(chosen), **trained, "rows": rows, "seed": seed, "straddle": straddle, **vars(grain)}
    options |= {"max_new_tokens": max_new_tokens, **vars(competence)}
    request = with_items(request_of("attention_deviation", model, items, options), found, aside)
    _announce(model, found, rows, memory_budget, progress)
    with Run.open(out, request=request, extra={"machine": machine_of(model)}, resume=resume) as run:
        if run.complete:
            return run.result()
        measure = Measure(model, chosen, rows, grain, max_new_tokens, competence)
        frame, tried = run_items(
            run,
            found,
            measure,
            key=lambda item: item,
            aside=aside,
            description="deviation",
            progress=progress,
        )
        noise = frame.loc[(frame["view"] == "control") & (frame["site"] == "noise_floor"), "value"]
        summary = summarise(frame, tried, model=model.name, operators=list(chosen), seed=seed)
        measured = [item for item in found if run.done("rows", item.key)]
        summary = replace(summary, notes=(*summary.notes, *_repeats(measured)))
        return run.finish(
            frame=frame, pairs=tried, summary=summary, noise_floor=None if noise.empty else float(noise.max())
        )


def _repeats(items: Sequence[Item]) -> list[str]:
    """A note where prompts share their moved chunks: then n contents are fewer texts."""
    texts = {item.blocks.chunks[i] for item in items for i in item.moved}
    if len(texts) >= len(items):
        return []
    count = f"{len(texts)} different text{'s' if len(texts) != 1 else ''} in {len(items)} prompts"
    return [f"the chunks measured hold {count}: the intervals are over what stands around them."]


def _announce(model: Model, items: Sequence[Item], rows: Rows, budget: int | None, progress: bool) -> None:
    """Say what the longest prompt's rows take; refuse what does not fit."""
    if not items:
        return
    size = torch.promote_types(model.dtype, torch.float32).itemsize
    plan = max(
        (plan_rows(model.shape, item, rows, bytes_per_number=size) for item in items), key=lambda plan: plan.nbytes
    )
    limit = default_budget(torch.device("cpu")) if budget is None else budget  # rows are kept on the CPU
    if progress:
        from rich.console import Console

        Console(stderr=True).print(str(plan), highlight=False, markup=False, soft_wrap=True)
    if plan.nbytes > limit:
        raise InputError(
            f"{plan}: more than the memory budget of {readable(limit)}. "
            'Take rows="terminal", shorter prompts, or a larger memory_budget.'
        )


def _chosen(given: Sequence[str | tuple[str, Compose]]) -> dict[str, Compose]:
    if isinstance(given, str):
        given = (given,)
    chosen: dict[str, Compose] = {}
    for one in given:
        name, function = (one, library.find(one)) if isinstance(one, str) else one
        if name in chosen:
            raise InputError(f"operator {name!r} is named twice.")
        chosen[name] = function
    if not chosen:
        raise InputError(f"no operator was named; choose from {', '.join(library.names())}.")
    return chosen


def _grain(bins: int, edges: Sequence[float], binning: Binning) -> Grain:
    if bins < 1:
        raise InputError(f"bins={bins}: at least one is needed.")
    if binning not in BINNINGS:
        raise InputError(f"binning={binning!r}: choose from {', '.join(BINNINGS)}.{nearest(str(binning), BINNINGS)}")
    bad = [edge for edge in edges if not 0 < edge < 0.5]
    if bad or not edges:
        raise InputError(f"edges={tuple(edges)}: give ratios between 0 and 0.5, such as 0.1.")
    return Grain(bins, tuple(edges), binning)
