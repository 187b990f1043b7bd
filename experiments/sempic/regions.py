"""Which tokens of a learned cache carry what it restores?

The cache of no recompute is patched, one region of tokens at a time, from another cache of the same documents: full
recompute's or SemPIC's. Recovery is the change of the right first token's margin over the other answers, as a share of
what full recompute changes: 0 is no recompute, 1 is full recompute. If the Writer restored what full recompute writes,
where full recompute writes it, both donors would recover at the same regions. Questions of `biography_cut` alone, whose
regions are known.

What this does not show: that equal recovery at a region means equal keys and values there; and regions that act only
together show in "statements" (all of one document) and "all", not alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from kvnotes_interp import Site, engine, operators
from kvnotes_interp.errors import ControlError, InputError
from kvnotes_interp.files import replacing
from kvnotes_interp.probes.items import Item, items_of
from kvnotes_interp.tasks.documents import Question
from kvnotes_interp.tasks.documents.biography import FACTS

if TYPE_CHECKING:
    from kvnotes_interp.cache import KVCache
    from kvnotes_interp.model import Model

MIN_GAP = 1.0  # logits that full recompute's margin must be above no recompute's for a question to count
REGIONS = (
    "heading",
    "subject",
    "value",
    "rest of the sentence",
    "other statements",
    "statements",
    "other people",
    "all",
)


def patched_regions(
    model: Model, questions: Sequence[Question], donors: Mapping[str, operators.Operator], *, out: Path
) -> pd.DataFrame:
    """One row per question, donor and region: `value` is the recovery. Written to `out`/table.parquet.

    Args:
        questions: of `biography_cut`. donors: whose caches are patched in, slot by slot like no recompute's.

    Only questions that full recompute answers, no recompute does not, with a gap of `MIN_GAP`. Raises InputError for
    other questions, or when none counts; ControlError when patching everything is not the donor.
    """
    path = out / "table.parquet"
    if path.is_file():
        return pd.read_parquet(path)
    if any(question.family != "biography_cut" for question in questions):
        raise InputError("regions are known for questions of biography_cut alone.")
    items, _ = items_of(model, questions)
    rows = []
    for item, question in zip(items, questions, strict=True):
        base = operators.no_recompute(model, item.blocks).cache
        caches = {name: operator(model, item.blocks).cache for name, operator in donors.items()}
        full = operators.full_recompute(model, item.blocks).cache
        low, high = (margin(model, cache, item, question) for cache in (base, full))
        if not (low < 0 < high and high - low >= MIN_GAP):
            continue
        where = regions_of(model, item, question)
        for donor, cache in caches.items():
            found = {
                region: (margin(model, base.patched(Site(slots), cache), item, question) - low) / (high - low)
                for region, slots in where.items()
            }
            whole = (margin(model, cache, item, question) - low) / (high - low)
            if abs(found["all"] - whole) > 1e-3:
                raise ControlError(
                    f"question {item.key}: patching all of {donor} recovers {found['all']}, not {whole}."
                )
            about = {"pair": item.key, "content": item.content, "donor": donor}
            rows += [
                {**about, "region": name, "size": len(where[name]), "value": value} for name, value in found.items()
            ]
    if not rows:
        raise InputError(f"none of {len(questions)} questions is lost without recompute and right with it.")
    frame = pd.DataFrame(rows)
    with replacing(path) as part:
        frame.to_parquet(part)
    return frame


def margin(model: Model, cache: KVCache, item: Item, question: Question) -> float:
    """Logit of the right first token over the best of the other answers, all of one token each."""
    heads = [model.tokenizer(text, add_special_tokens=False)["input_ids"][0] for text in question.distractors]
    logits = engine.decide(model, cache, item.blocks.suffix, [item.answer[0], *heads])[0]
    return float(logits[0] - logits[1:].max())


def regions_of(model: Model, item: Item, question: Question) -> dict[str, tuple[int, ...]]:
    """Slots of each of `REGIONS`; those of the person asked about, unless they say otherwise.

    "subject" holds the first tokens of that person's statements, "value" the answer.
    """
    own = question.gold[-1]
    start, stop = item.blocks.spans[own]
    text = question.documents[own]
    fact = FACTS[str(question.detail("fact"))].statement.format(question.answer.strip())
    asked = text.index(fact)
    value = text.index(question.answer.strip(), asked)
    ends = [i + 1 for i, sign in enumerate(text) if sign == "."]
    begins = [0, *ends[:-1]]
    sentence = next((a, b) for a, b in zip(begins, ends, strict=True) if a <= asked < b)
    parts: dict[str, list[int]] = {name: [] for name in REGIONS}
    before = len(question.prefix) + sum(map(len, question.documents[:own]))
    joint = model.tokenizer(question.text, add_special_tokens=False, return_offsets_mapping=True)
    if tuple(joint["input_ids"]) != item.blocks.token_ids:
        raise InputError(f"question {item.key}: the tokenizer adds tokens of its own; regions are counted without.")
    offsets = joint["offset_mapping"]
    for slot in range(start, stop):
        first, last = (place - before for place in offsets[slot])
        if any(first <= begin + 1 < last for begin in begins):  # the letter behind the space
            name = "subject"
        elif first < value + len(question.answer.strip()) and last > value:
            name = "value"
        else:
            name = "rest of the sentence" if sentence[0] <= first < sentence[1] else "other statements"
        parts[name].append(slot)
        parts["statements"].append(slot)
    parts["heading"] = list(range(*item.blocks.spans[own - 1]))
    mine = {*parts["statements"], *parts["heading"]}
    prefix = len(item.blocks.prefix)
    parts["other people"] = [slot for slot in range(prefix, item.blocks.n_context) if slot not in mine]
    parts["all"] = list(range(prefix, item.blocks.n_context))
    return {name: tuple(slots) for name, slots in parts.items()}
