"""Splice quality: what composing a cache from compiled chunks costs in answers, against full recompute.

For every question, cut down to several numbers of documents, every operator makes the cache of prefix and documents;
the question is run on top. Readouts: the greedy answer (micro-F1, exact match), the first token, the margin of the
right answer, distances to full recompute (KL, top-1 agreement, logit cosine, which says nothing on its own), tokens and
layer-tokens recomputed, and the time to the first token. (Notes, arXiv 2606.17107, composition; SemPIC, arXiv
2607.28069, micro-F1 of its baselines.)

What this does not prove: that a document was *read*. A model may answer from the question's form alone; what full
recompute and the naive join get right is the frame in which the other numbers mean something.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Literal

from kvnotes_interp import attention
from kvnotes_interp import operators as library
from kvnotes_interp.errors import InputError
from kvnotes_interp.metrics import Competence
from kvnotes_interp.operators import Operator
from kvnotes_interp.probes.answering import check_memory
from kvnotes_interp.probes.items import items_of, sources_of
from kvnotes_interp.probes.request import machine_of, request_of, verb, with_items
from kvnotes_interp.probes.run import run_items
from kvnotes_interp.probes.splicing.measure import Measure
from kvnotes_interp.probes.splicing.summary import summarise
from kvnotes_interp.results import Result, Run
from kvnotes_interp.tasks.documents.question import Question

if TYPE_CHECKING:
    from kvnotes_interp.model import Model

OPERATORS = (
    "full_recompute",
    "no_recompute_unmoved",
    "no_recompute",
    "splice",
    "epic",
    "cacheblend",
    "random_recompute",
)
SHARES = (0.05, 0.15, 0.3, 0.5, 0.9)
SEAM_REPAIR = (1, 4, 16)
ALWAYS = ("full_recompute", "no_recompute_unmoved", "no_recompute")
TOO_FEW, TOO_MANY = "fewer documents in the question", "more supporting documents"


@verb
def splice_quality(
    model: Model,
    questions: Sequence[Question],
    *,
    operators: Sequence[str] = OPERATORS,
    shares: Sequence[float] = SHARES,
    seam_repair: Sequence[int | Literal["all"]] = SEAM_REPAIR,
    documents: Sequence[int] | None = (1, 2, 4, 8),
    max_new_tokens: int = 8,
    timing: int = 1,
    straddle: Literal["refuse", "show"] = "refuse",
    seed: int = 0,
    min_gap: float = 0.25,
    min_gap_noise: float = 50.0,
    out: str | Path | None = None,
    resume: bool = False,
    memory_budget: int | None = None,
    progress: bool = True,
) -> Result:
    """Answer questions from composed caches.

    Args:
        questions: with as many documents as the largest of `documents`, from `tasks.documents.load`.
        operators: names of `operators.OPERATORS`. A name that takes a share or a number of tokens is run with all of
            `shares` or `seam_repair`, NAME@VALUE with that value alone; a learned one is NAME@FOLDER. Full recompute,
            the bare join, and the join with keys not moved are always run, and random tokens at every share that
            another operator has.
        documents: numbers of documents; each question is cut down to its supporting ones and others, the larger number
            holding the smaller. Where it has too few it is set aside. None: all documents of each question.
        max_new_tokens: greedy tokens per answer.
        timing: rounds of timing, interleaved in random order; 0 for none. Compiled chunks are made beforehand and not
            timed; full recompute prefills the prefix too. Times differ from run to run, all else does not.
        straddle: "refuse" a question whose pieces share a token, or "show" it and go on.
        min_gap, min_gap_noise: full recompute *answers* a question when it prefers the right first token to the
            distractors' (to all others where there are none) by this much, in logits and in noise floors. All questions
            count for quality; `kept` is over the answered ones.
        seed: of the documents kept, random tokens and intervals. memory_budget: bytes for one question's caches.
        out, resume, progress: as in `local_patching`.

    The frame has one row per (question x documents, operator, readout); views "quality", "cost" and "ttft", with the
    columns `operator`, `share`, `documents`, `size` (tokens of prefix and documents) and `position` (slot of the first
    supporting document).

    Controls, per question: full recompute in two passes; the seam repaired all along equals full recompute; a chunk cut
    out and spliced where it stood is the identity; keys not moved must differ by far more than the noise.

    Raises:
        InputError: unknown operator or option, no question, caches that exceed the memory budget.
        ControlError: a control failed; its numbers mean nothing.
    """
    arms = arms_of(operators, shares=shares, seam_repair=seam_repair)
    for name, value, least in (("max_new_tokens", max_new_tokens, 1), ("timing", timing, 0)):
        if value < least:
            raise InputError(f"{name}={value}: give at least {least}.")
    questions = sources_of(questions, "questions")
    attention.require(model.hf)
    competence = Competence(min_gap, min_gap_noise)
    writers = library.adapters(arms)
    trained = {"adapters": writers} if writers else {}
    fitting, aside = cut_down(questions, documents, seed=seed)
    found, more = items_of(model, fitting, straddle=straddle) if fitting else ([], [])
    by_key = {question.key: question for question in fitting}
    options = {
        "operators": list(arms),
        **trained,
        "documents": None if documents is None else list(documents),
        "max_new_tokens": max_new_tokens,
        "timing": timing,
        "straddle": straddle,
        "seed": seed,
        **vars(competence),
    }
    request = with_items(request_of("splice_quality", model, questions, options), found, [*aside, *more])
    # The compiled ones (by the model and by each Writer), full recompute's, an operator's, and two in the making.
    check_memory(model, found, memory_budget, caches=5 + len(set(writers.values())))
    measure = Measure(model, arms, max_new_tokens, timing, seed, competence)
    with Run.open(out, request=request, extra={"machine": machine_of(model)}, resume=resume) as run:
        if run.complete:
            return run.result()
        frame, tried = run_items(
            run,
            found,
            lambda item: measure(item, by_key[item.key]),
            key=lambda item: item,
            aside=[*aside, *more],
            description="splicing",
            progress=progress,
        )
        noise = frame.loc[(frame["view"] == "control") & (frame["site"] == "noise_floor"), "value"]
        summary = summarise(frame, tried, model=model.name, arms=list(arms), seed=seed)
        return run.finish(
            frame=frame, pairs=tried, summary=summary, noise_floor=None if noise.empty else float(noise.max())
        )


def arms_of(
    operators: Sequence[str] = OPERATORS,
    *,
    shares: Sequence[float] = SHARES,
    seam_repair: Sequence[int | Literal["all"]] = SEAM_REPAIR,
) -> dict[str, Operator]:
    """Every operator that is run, by its label, in order; needs no model. Raises InputError for an unknown name."""
    given = (operators,) if isinstance(operators, str) else tuple(operators)
    if not given:
        raise InputError(f"no operator was named; choose from {', '.join(library.names())}.")
    settings: dict[str, Sequence[float | str]] = {"share": tuple(shares), "seam_repair": tuple(seam_repair)}
    labels: dict[str, Operator] = {name: library.find(name) for name in ALWAYS}
    for name in given:
        option = library.setting(library.find(name))
        every = [f"{name}@{value}" for value in settings[option]] if option and "@" not in name else [name]
        labels |= {label: library.find(label) for label in every}
    for share in dict.fromkeys(op.options["share"] for op in labels.values() if "share" in op.options):
        label = f"random_recompute@{share}"
        labels.setdefault(label, library.find(label))
    return labels


def cut_down(
    questions: Sequence[Question], documents: Sequence[int] | None, *, seed: int = 0
) -> tuple[list[Question], list[dict]]:
    """(questions with these numbers of documents, lines of the pairs table for what does not fit).

    The supporting documents stay, the others are drawn at random, in one order per question, so that a larger number
    holds the smaller; the documents' own order is kept.
    """
    if not questions:
        raise InputError("no questions were given; take some from tasks.documents.load(name, n=...).")
    if documents is None:
        return list(questions), []
    if not documents or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in documents):
        raise InputError(f"documents={documents!r}: give numbers of documents from 1, such as (1, 2, 4, 8), or None.")
    out: list[Question] = []
    aside: list[dict] = []
    for question in questions:
        others = [i for i in range(len(question.documents)) if i not in question.gold]
        order = Random(f"documents|{seed}|{question.key}").sample(others, len(others))
        for n in dict.fromkeys(documents):
            key = f"{question.key}.d{n}"
            if len(question.gold) <= n <= len(question.documents):
                kept = sorted((*question.gold, *order[: n - len(question.gold)]))
                gold = tuple(kept.index(i) for i in question.gold)
                texts = tuple(question.documents[i] for i in kept)
                out.append(replace(question, key=key, documents=texts, gold=gold))
                continue
            reason = TOO_MANY if n < len(question.gold) else TOO_FEW
            line = {"pair": key, "content": question.content, "family": question.family, "kind": "question"}
            aside.append({**line, "split": question.split, "competent": False, "reason": reason, "documents": n})
    return out, aside
