"""Compaction quality: what a cache answers after compaction, against the full one, and what the compaction costs.

For every question the cache of prefix and documents is compacted by every compactor to every ratio, and the question is
run on what is left. The full cache is the ceiling, the prompt without documents the floor, random slots are what any
choice must beat. (Still, arXiv 2606.07878; the compactors' own papers are named where they are registered.)

In several passes the context is read in parts, and what is there is compacted to the same budget behind each, so that
arms of one ratio end with the same bytes and differ in how often they were compacted.

What this does not prove: that a cache which answers holds what its source held: a question asks for one thing. Nor
which compactor is best elsewhere: the order changes with model, task and length. Times are those of this run. Passes
say nothing of streams with more of them, least of all beyond the horizon that a compactor was trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvnotes_interp import attention
from kvnotes_interp.errors import InputError
from kvnotes_interp.metrics import Competence
from kvnotes_interp.operators.eviction.compacted import Sliding
from kvnotes_interp.probes.answering import check_memory
from kvnotes_interp.probes.compaction.measure import Measure
from kvnotes_interp.probes.compaction.points import (
    BUDGET,
    CHUNK,
    COMPACTORS,
    RATIOS,
    Compacting,
    Point,
    points_of,
    trained,
)
from kvnotes_interp.probes.compaction.summary import summarise
from kvnotes_interp.probes.items import items_of, sources_of
from kvnotes_interp.probes.request import machine_of, request_of, verb, with_items
from kvnotes_interp.probes.run import run_items
from kvnotes_interp.results import Result, Run
from kvnotes_interp.tasks.documents.question import Question

if TYPE_CHECKING:
    from kvnotes_interp.model import Model


@verb
def compaction_quality(
    model: Model,
    questions: Sequence[Question],
    *,
    compactors: Sequence[str] = COMPACTORS,
    ratios: Sequence[float] = RATIOS,
    passes: Sequence[int] = (1,),
    iterative: bool = False,
    chunk: int | None = None,
    budget: int | None = None,
    sliding: Sliding = "keep",
    query_aware: bool = False,
    max_new_tokens: int = 8,
    timing: int = 1,
    seed: int = 0,
    min_gap: float = 0.25,
    min_gap_noise: float = 50.0,
    out: str | Path | None = None,
    resume: bool = False,
    memory_budget: int | None = None,
    progress: bool = True,
) -> Result:
    """Answer questions from compact caches.

    Args:
        questions: from `tasks.documents.load`, each with all of its documents.
        compactors: names of `operators.eviction.COMPACTORS`, NAME@VALUE with its one option set, still@FOLDER for a
            trained one. Random slots ("random@4", the sink spared) are run in any case.
        ratios: slots before over slots after, above 1.
        passes: numbers of parts that a context is read in, cut between documents where there are as many. Behind each
            part the whole is compacted to the budget of the ratio, context / ratio slots; what fits is left as it is.
            Compactors that observe tokens observe those of the part.
        iterative: in place of ratios and passes, read every context in parts of `chunk` tokens (512) and compact to
            `budget` slots (64) behind each.
        sliding: "keep" layers whole whose window is shorter than the context, or "compact" them too.
        query_aware: show the question to the compactors that observe tokens (H2O, SnapKV, Attention Matching); else
            they see the context alone, as a cache is compacted before anyone asks.
        max_new_tokens: greedy tokens per answer.
        timing: rounds of timing, interleaved in random order, the prefill among them; 0 for none. Times differ from run
            to run, all else does not.
        min_gap, min_gap_noise: the full cache *answers* a question when it prefers the right first token to the
            distractors' (to all others where there are none) by this much, in logits and in noise floors. All questions
            count for quality; `kept` is over the answered ones.
        seed: of random slots and intervals. memory_budget: bytes for one question's caches.
        out, resume, progress: as in `local_patching`.

    The frame has one row per (question, arm, readout); arms are "full", "no_context", NAME_RATIOx and, in N passes,
    NAME_RATIOx_Np (NAME_Nslots with `iterative`), with the columns `compactor`, `ratio`, `size` (tokens of prefix and
    documents) and `position` (slot of the first supporting document). Views: "compaction" (the answers); "cost" (slots,
    bytes, share of the full cache's bytes, layer-tokens observed over a prefill's); "time" (seconds to compact, and
    over the seconds of the prefill; running the parts is not counted). Where contexts are read in parts there are
    also the column `passes`, and in "cost" `peak`, the bytes of the largest cache before a compaction, and
    `peak_share`, over the full cache's.

    Controls, per question: the full cache in two passes; a budget of all slots equals the full cache, for every
    compactor, at once and in the largest number of passes; leaving the documents out must change the logits by far
    more than the noise.

    Raises:
        InputError: unknown compactor or option, no question, more passes than tokens, caches that exceed the memory
            budget.
        ControlError: a control failed; its numbers mean nothing.
    """
    given = [name for name, value in (("chunk", chunk), ("budget", budget)) if value is not None]
    if given and not iterative:
        raise InputError(f"{given[0]} is a size of iterative=True: add that, or ask by ratios and passes.")
    sizes = {"chunk": CHUNK if chunk is None else chunk, "slots": BUDGET if budget is None else budget}
    size = sizes if iterative else {}
    if iterative and tuple(passes) != (1,):
        raise InputError(f"passes={tuple(passes)} with iterative=True: the chunks decide the passes; leave one out.")
    points = points_of(compactors, ratios, passes, **size)
    for name, value, least in (("max_new_tokens", max_new_tokens, 1), ("timing", timing, 0)):
        if value < least:
            raise InputError(f"{name}={value}: give at least {least}.")
    questions = sources_of(questions, "questions")
    attention.require(model.hf)
    competence = Competence(min_gap, min_gap_noise)
    found, aside = items_of(model, questions)
    for item in found:
        max(points, key=lambda point: point.passes).parts(item.blocks)  # a context too short is refused at once
    by_key = {question.key: question for question in questions}
    written = trained(points)
    options = {
        "compactors": list(dict.fromkeys(point.compactor.name for point in points)),
        **_sizes(points),
        **({"adapters": written} if written else {}),
        "sliding": sliding,
        "query_aware": query_aware,
        "max_new_tokens": max_new_tokens,
        "timing": timing,
        "seed": seed,
        **vars(competence),
    }
    request = with_items(request_of("compaction_quality", model, questions, options), found, aside)
    # The full one, one in two passes, two in the making, and every compact one.
    longest = max((item.blocks.n_context for item in found), default=1)
    kept = sum(point.budget(longest) / longest for point in points)
    check_memory(model, found, memory_budget, caches=4 + kept)
    measure = Measure(Compacting(model, sliding, seed), points, query_aware, max_new_tokens, timing, competence)
    with Run.open(out, request=request, extra={"machine": machine_of(model)}, resume=resume) as run:
        if run.complete:
            return run.result()
        frame, tried = run_items(
            run,
            found,
            lambda item: measure(item, by_key[item.key]),
            key=lambda item: item,
            aside=aside,
            description="compacting",
            progress=progress,
        )
        noise = frame.loc[(frame["view"] == "control") & (frame["site"] == "noise_floor"), "value"]
        summary = summarise(
            frame,
            tried,
            model=model.name,
            points=[point.name for point in points],
            query_aware=query_aware,
            seed=seed,
        )
        return run.finish(
            frame=frame, pairs=tried, summary=summary, noise_floor=None if noise.empty else float(noise.max())
        )


def _sizes(points: Sequence[Point]) -> dict[str, Any]:
    """What the request says of sizes and passes; passes are not named where each context is compacted once."""
    if points[0].slots is not None:
        return {"iterative": True, "chunk": points[0].chunk, "budget": points[0].slots}
    passes = list(dict.fromkeys(point.passes for point in points))
    return {
        "ratios": list(dict.fromkeys(point.ratio for point in points)),
        **({} if passes == [1] else {"passes": passes}),
    }
