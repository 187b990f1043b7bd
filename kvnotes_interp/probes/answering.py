"""What the probes over document questions measure of a cache: its answer, and its distance to full recompute."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvnotes_interp import engine, metrics
from kvnotes_interp.cache import KVCache
from kvnotes_interp.compact import Cache
from kvnotes_interp.engine.budget import default_budget, readable
from kvnotes_interp.errors import InputError
from kvnotes_interp.operators.blocks import Blocks
from kvnotes_interp.probes.greedy import greedy_answer
from kvnotes_interp.probes.items import Item
from kvnotes_interp.tasks.documents.question import Question

if TYPE_CHECKING:
    from kvnotes_interp.model import Model


@dataclass(frozen=True)
class Arm:
    """What one cache made the model say: logits `[token]` at the suffix's last token, and the greedy answer."""

    logits: Float[Tensor, " token"]
    text: str = ""


def logits_on(model: Model, cache: Cache, suffix: Sequence[int]) -> Float[Tensor, " token"]:
    """Logits behind the suffix, run on a cache; on the CPU."""
    return engine.decide(model, cache, suffix)[0].cpu()


def answer_on(model: Model, item: Item, cache: Cache, suffix: Sequence[int], *, max_new_tokens: int) -> Arm:
    """Run the suffix on a cache: logits at its end, and the greedy answer."""
    grown, hidden = engine.extend(model, cache, suffix)
    logits = engine.logits_of(model, hidden[:, -1])[0].cpu()
    first = int(logits.argmax())
    return Arm(logits, greedy_answer(model, grown, first, stops=item.stops, max_new_tokens=max_new_tokens))


def quality(item: Item, arm: Arm, full: Arm, rivals: Sequence[int]) -> list[dict[str, Any]]:
    """Rows of the answer and of the distances to full recompute; the first one holds the answer's text."""
    common, words = answer_words(arm.text, item.answers)
    right = item.answer[0]
    found = {
        "exact_match": float(metrics.exact_match(arm.text, item.answers)),
        "token_f1": metrics.token_f1(arm.text, item.answers),
        "f1_common": float(common),
        "f1_words": float(words),
        "same_answer": float(metrics.normalised(arm.text) == metrics.normalised(full.text)),
        "first_token": float(int(arm.logits.argmax()) == right),
        "margin": margin(arm.logits, right, []),
        "kl": float(metrics.kl_divergence(full.logits, arm.logits)),
        "top1_agreement": float(metrics.agreement(full.logits, arm.logits)),
        "logit_cosine": float(metrics.logit_cosine(full.logits, arm.logits)),
    }
    if rivals:
        found["margin_distractors"] = margin(arm.logits, right, rivals)
    rows: list[dict[str, Any]] = [{"view": "quality", "readout": name, "value": value} for name, value in found.items()]
    rows[0]["token"] = arm.text
    return rows


def answer_words(text: str, answers: tuple[str, ...]) -> tuple[int, int]:
    """(twice the words in common, words of both) with the best of `answers`: micro-F1 is the ratio of their sums."""
    best = max(answers, key=lambda one: metrics.token_f1(text, one))
    words = len(metrics.normalised(text).split()) + len(metrics.normalised(best).split())
    return round(metrics.token_f1(text, best) * words), words  # F1 = 2 common / words


def margin(logits: Float[Tensor, " token"], right: int, rivals: Sequence[int]) -> float:
    """Logit of the right token over the best of `rivals`, or over all others where there are none."""
    others = logits.clone()
    others[right] = -math.inf
    return float(logits[right] - (others[list(rivals)].max() if rivals else others.max()))


def rivals_of(model: Model, item: Item, question: Question) -> list[int]:
    """First tokens of the distractors that differ from the right one's, as they follow the prompt."""
    found = []
    for text in question.distractors:
        joint = model.tokenizer(question.suffix + text, add_special_tokens=False)["input_ids"]
        alone = model.tokenizer(question.suffix, add_special_tokens=False)["input_ids"]
        if joint[: len(alone)] == alone and len(joint) > len(alone):
            found.append(int(joint[len(alone)]))
    return sorted(set(found) - {item.answer[0]})


def in_two_passes(model: Model, blocks: Blocks) -> KVCache:
    """Full recompute cut where the first chunk begins, or behind it if it begins the prompt."""
    start, stop = blocks.spans[0]
    cut = start or stop
    return engine.extend(model, engine.prefill(model, blocks.context[:cut]), blocks.context[cut:])[0]


def rounding(model: Model, full: Arm, *, astray: float) -> float:
    """How far, in logits, rounding alone may move what should be equal.

    In 16 bits it would allow anything, so it never exceeds a tenth of `astray`: what a cache known to be wrong does.
    """
    eps = max(torch.finfo(model.dtype).eps, torch.finfo(torch.float32).eps)
    return min(512 * eps * float(full.logits.abs().max()), 0.1 * astray)


def question_line(
    item: Item, question: Question, full: Arm, *, full_margin: float, answered: bool, noise: float
) -> dict[str, Any]:
    """The question's line in the pairs table. Every question counts; `answered` says what full recompute knew."""
    return {
        "pair": item.key,
        "content": item.content,
        "family": item.family,
        "kind": item.kind,
        "split": item.split,
        "competent": True,
        "reason": "",
        "length": len(item.blocks),
        "answer_old": item.answers[0],
        "answered": answered,
        "full_answer": full.text,
        "full_margin": full_margin,
        "noise": noise,
        "documents": len(item.blocks.chunks),
        "gold": list(question.gold),
        "chunk_starts": [start for start, _ in item.blocks.spans],
        "tokens": list(item.tokens),
    }


def check_memory(model: Model, items: Sequence[Item], budget: int | None, *, caches: float) -> None:
    """Refuse questions of which `caches` whole caches do not fit. Raises InputError."""
    if not items:
        return
    longest = max(len(item.blocks) for item in items)
    need = int(caches * model.shape.kv_bytes(longest, bytes_per_number=model.dtype.itemsize))
    limit = default_budget(model.device) if budget is None else budget
    if need > limit:
        raise InputError(
            f"the longest question has {longest} tokens, and {caches:g} caches of it take {readable(need)}, more than "
            f"the memory budget of {readable(limit)}. Take fewer documents, or a larger memory_budget."
        )


def wait(device: torch.device) -> None:
    """Until the device has done what it was given; before and after anything is timed."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
