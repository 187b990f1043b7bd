"""Editing and composing turn after turn: skills are spliced in, a field changes, text goes on, and errors may add up.

    for step in run_turns(model, cache, [Turn(skill=chunk), Turn(edit=Edit(5, new_ids, also=(9, 12)), text=ids)]):
        step.cache, step.logits, step.layer_tokens

`compare_turns` sets every turn beside a full prefill of the same tokens. (Notes, arXiv 2606.17107, long horizon.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from kvnotes_interp import engine, metrics
from kvnotes_interp.cache import KVCache
from kvnotes_interp.errors import InputError
from kvnotes_interp.operators.splice import SeamRepair, attach

if TYPE_CHECKING:
    from kvnotes_interp.model import Model


@dataclass(frozen=True)
class Edit:
    """Tokens of the cache replaced by as many others and recomputed, in place.

    `also` names later slots that are recomputed with them, or "all" of those behind; none leaves every note stale.
    """

    start: int
    token_ids: tuple[int, ...]
    also: tuple[int, ...] | Literal["all"] = ()

    def slots(self, length: int) -> tuple[int, ...]:
        """What is recomputed in a cache of this length. Raises InputError for slots outside it."""
        stop = self.start + len(self.token_ids)
        if not self.token_ids or self.start < 0 or stop > length:
            raise InputError(
                f"an edit of {len(self.token_ids)} tokens at slot {self.start} does not fit a cache of {length} slots."
            )
        also = range(stop, length) if self.also == "all" else self.also
        bad = [slot for slot in also if not stop <= slot < length]
        if bad:
            raise InputError(
                f"also holds slot {bad[0]}; it names slots behind the edited ones, {stop} to {length - 1}."
            )
        return (*range(self.start, stop), *sorted(set(also)))


@dataclass(frozen=True)
class Turn:
    """What happens in a turn, in this order: a chunk is spliced in, a field is edited, text is run. Each is optional.

    `skill` is a chunk compiled alone (`Skill.cache`); `text` are the token ids that go behind.
    """

    skill: KVCache | None = None
    edit: Edit | None = None
    text: tuple[int, ...] = ()


@dataclass(frozen=True)
class Step:
    """A cache after a turn.

    Attributes:
        logits: `[token]` after the turn's last text token, in at least float32; None in a turn without text.
        recomputed_tokens: tokens run in this turn: repaired seams, edited slots, new text.
        layer_tokens: the same, counted once per layer.
    """

    cache: KVCache
    logits: Float[Tensor, " token"] | None
    recomputed_tokens: int
    layer_tokens: int


def run_turns(model: Model, cache: KVCache, turns: Iterable[Turn], *, seam_repair: SeamRepair = 0) -> Iterator[Step]:
    """Run `turns` on top of `cache` (batch 1), one cache per turn; nothing is reprefilled.

    Raises InputError for an edit outside the cache, or a skill of another model.
    """
    for turn in turns:
        tokens = cost = 0
        if turn.skill is not None:
            made = attach(model, cache, turn.skill, seam_repair=seam_repair)
            cache, tokens, cost = made.cache, made.recomputed_tokens, made.layer_tokens
        if turn.edit is not None:
            slots = turn.edit.slots(len(cache))
            held = cache.token_ids[0, list(slots[len(turn.edit.token_ids) :])].tolist()
            done = engine.recompute(model, cache, slots, token_ids=[*turn.edit.token_ids, *held])
            cache, tokens, cost = done.cache, tokens + len(done.slots), cost + done.layer_tokens
        logits = None
        if turn.text:
            cache, hidden = engine.extend(model, cache, turn.text)
            logits = engine.logits_of(model, hidden[:, -1])[0].cpu()
            tokens, cost = tokens + len(turn.text), cost + len(turn.text) * cache.n_layers
        yield Step(cache, logits, tokens, cost)


@dataclass(frozen=True)
class TurnReport:
    """One turn beside a full prefill of the same tokens: distances at its last text token, and what each cost."""

    turn: int
    tokens: int
    kl: float
    logit_cosine: float
    top1_agreement: bool
    layer_tokens: int
    full_layer_tokens: int


def compare_turns(model: Model, steps: Iterable[Step]) -> list[TurnReport]:
    """Every turn that ran text, against a prefill from nothing of the tokens its cache holds, at positions 0, 1, ...

    Cosine does not tell same from different decisions on its own; KL and agreement stand beside it.
    """
    out = []
    for index, step in enumerate(steps):
        if step.logits is None:
            continue
        ids = step.cache.token_ids[0].tolist()
        full = _last_logits(model, ids)
        out.append(
            TurnReport(
                index,
                len(ids),
                float(metrics.kl_divergence(full, step.logits)),
                float(metrics.logit_cosine(full, step.logits)),
                bool(metrics.agreement(full, step.logits)),
                step.layer_tokens,
                len(ids) * step.cache.n_layers,
            )
        )
    return out


def _last_logits(model: Model, ids: Sequence[int]) -> Float[Tensor, " token"]:
    if len(ids) == 1:
        raise InputError("a cache of one token has nothing before its last one; give a longer start.")
    return engine.decide(model, engine.prefill(model, ids[:-1]), [ids[-1]])[0].to("cpu", torch.float64)
