"""What weight_edits.py asks of a model before and after an edit, and the cache edits that it compares with."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

import kvnotes_interp as kv
from kvnotes_interp import engine
from kvnotes_interp.errors import InputError
from kvnotes_interp.metrics import kl_divergence
from kvnotes_interp.model import Model
from kvnotes_interp.tasks import EncodedPair, Pair, Piece, encode

ERRATUM = (
    "[STATE UPDATE] {label} has just changed to {value}; this overrides any earlier value. Apply the current value. "
)
"""Notes, arXiv 2606.17107, first wording."""
PLAIN = "Sorry, this is wrong: {label} is {value}. "
"""The same in the words of a small model."""
ERRATA = {"erratum": ERRATUM, "erratum_plain": PLAIN}


@dataclass(frozen=True)
class Request:
    """One prompt with the answer that is right for it and the one that is not."""

    ids: tuple[int, ...]
    right: int
    wrong: int
    value: str


@dataclass(frozen=True)
class Ground:
    """What must not change: prompts that the untouched model answers rightly, and neutral text.

    `logits` are those of the untouched model: next-token logits of every token of every text.
    """

    same_value: list[Request]
    other_value: list[Request]
    battery: list[Request]
    texts: list[tuple[int, ...]]
    logits: list[Float[Tensor, "pos token"]]


def requests_of(pair: EncodedPair) -> tuple[Request, Request]:
    """The old and the new prompt of a pair, each with its own right answer."""
    old, new = pair.answer_old_id, pair.answer_new_id
    return Request(pair.old_ids, old, new, pair.pair.field_old), Request(pair.new_ids, new, old, pair.pair.field_new)


@torch.no_grad()
def margins(model: Model, requests: Sequence[Request], *, batch: int = 16) -> Float[Tensor, " request"]:
    """Logit of the right answer minus that of the wrong one. Prompts of one length run together, unpadded."""
    out = torch.empty(len(requests))
    by_length: dict[int, list[int]] = {}
    for place, request in enumerate(requests):
        by_length.setdefault(len(request.ids), []).append(place)
    for places in by_length.values():
        for start in range(0, len(places), batch):
            some = places[start : start + batch]
            ids = torch.tensor([requests[i].ids for i in some], device=model.device)
            logits = model.hf(input_ids=ids, use_cache=False).logits[:, -1].float().cpu()
            rows = range(len(some))
            out[some] = (
                logits[rows, [requests[i].right for i in some]] - logits[rows, [requests[i].wrong for i in some]]
            )
    return out


@torch.no_grad()
def next_logits(model: Model, ids: Sequence[int]) -> Float[Tensor, "pos token"]:
    """Next-token logits of every token of a text."""
    return model.hf(input_ids=torch.tensor([list(ids)], device=model.device), use_cache=False).logits[0].float().cpu()


def competent(model: Model, requests: Sequence[Request]) -> list[Request]:
    """Those that are answered rightly."""
    if not requests:
        return []
    return [r for r, margin in zip(requests, margins(model, requests).tolist(), strict=True) if margin > 0]


def ground_for(
    model: Model, target: EncodedPair, pool: Sequence[EncodedPair], battery: Sequence[Request], texts: Any, *, n: int
) -> Ground:
    """What is asked beside `target`: at most `n` requests of each kind out of `pool`, seeded by the target's key."""
    draw = Random(f"ground|{target.pair.key}")
    known = {target.old_ids, target.new_ids}
    others = list({r.ids: r for pair in pool for r in requests_of(pair) if r.ids not in known}.values())
    old, new = target.pair.field_old, target.pair.field_new
    same = [r for r in others if r.value == old]
    rest = [r for r in others if r.value not in (old, new)]
    return Ground(
        competent(model, draw.sample(same, min(n, len(same)))),
        competent(model, draw.sample(rest, min(n, len(rest)))),
        list(battery),
        list(texts),
        [next_logits(model, ids) for ids in texts],
    )


def damage(model: Model, ground: Ground) -> dict[str, float | None]:
    """What the model as it is now answers otherwise than the untouched one."""

    def changed(requests: Sequence[Request]) -> float | None:
        return float((margins(model, requests) <= 0).float().mean()) if requests else None

    moved, kl = [], []
    for ids, before in zip(ground.texts, ground.logits, strict=True):
        after = next_logits(model, ids)
        moved.append((before.argmax(-1) != after.argmax(-1)).float())
        kl.append(kl_divergence(before, after).float())
    return {
        "same_value": changed(ground.same_value),
        "other_value": changed(ground.other_value),
        "battery": changed(ground.battery),
        "next_token": float(torch.cat(moved).mean()) if moved else None,
        "kl": float(torch.cat(kl).mean()) if kl else None,
    }


def with_erratum(pair: Pair, template: str = ERRATUM) -> Pair:
    """The pair with the correction written before its decision in the old prompt. Only `old` is meant to be used."""
    text = template.format(label=pair.label, value=pair.field_new)

    def told(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
        at = next((i for i, piece in enumerate(pieces) if piece.region == "decision"), len(pieces))
        return (*pieces[:at], Piece(text, "context", "erratum"), *pieces[at:])

    def put(prompt: Any) -> Any:
        if not pair.chat:
            return told(prompt)
        last = max(i for i, message in enumerate(prompt) if message.role != "assistant")
        return tuple(replace(m, pieces=told(m.pieces)) if i == last else m for i, m in enumerate(prompt))

    return replace(pair, old=put(pair.old), new=put(pair.new))


def cache_edit(model: Model, pair: EncodedPair, method: str) -> tuple[float, float]:
    """(margin of the new answer, seconds) of a cache edit. The stale cache, and for the patches the new one, are there.

    `field_only` and `full_downstream` copy K and V from a whole new prefill, which is not counted in the seconds.
    """
    answers = (pair.answer_old_id, pair.answer_new_id)
    old = engine.prefill(model, pair.old_ids[:-1])
    if method in ERRATA:
        told = encode(model.tokenizer, with_erratum(pair.pair, ERRATA[method])).old_ids
        unknown = getattr(model.tokenizer, "unk_token_id", None)
        if unknown is not None and unknown in told and unknown not in pair.old_ids:
            raise InputError("this tokenizer has no words for the erratum")
        shared = next(i for i, (a, b) in enumerate(zip(pair.old_ids, told, strict=False)) if a != b)
        started = time.perf_counter()
        logits = engine.decide(model, old[:shared], told[shared:], answers)[0]
    else:
        start, stop = pair.field if method == "field_only" else (pair.field[0], pair.length - 1)
        new = engine.prefill(model, pair.new_ids[:-1])
        started = time.perf_counter()
        patched = old.patched(kv.Site(tuple(range(start, stop))), new)
        logits = engine.decide(model, patched, pair.old_ids[-1:], answers)[0]
    return float(logits[1] - logits[0]), time.perf_counter() - started


def flips_rightly(model: Model, pairs: Iterable[EncodedPair]) -> list[EncodedPair]:
    """Pairs whose both prompts are answered rightly."""
    pairs = list(pairs)
    good = margins(model, [r for pair in pairs for r in requests_of(pair)]) > 0
    return [pair for place, pair in enumerate(pairs) if bool(good[2 * place : 2 * place + 2].all())]
