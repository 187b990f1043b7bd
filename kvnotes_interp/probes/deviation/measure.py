"""Measuring one prompt of an attention-deviation run: full recompute, the operators, and the controls."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd
import torch

from kvnotes_interp import engine, operators
from kvnotes_interp.cache import KVCache
from kvnotes_interp.checks import LIMITS
from kvnotes_interp.engine.budget import readable
from kvnotes_interp.errors import ControlError, InputError
from kvnotes_interp.metrics import Competence
from kvnotes_interp.operators.blocks import Blocks
from kvnotes_interp.operators.made import Made
from kvnotes_interp.probes.deviation.rows import Arm, Cells, Grain, alone, compare, numbers, table, within_deviation
from kvnotes_interp.probes.greedy import greedy_answer
from kvnotes_interp.probes.items import Item
from kvnotes_interp.registry import ModelShape

if TYPE_CHECKING:
    from kvnotes_interp.model import Model

Rows = Literal["terminal", "suffix", "answer"]
ROWS: tuple[Rows, ...] = ("terminal", "suffix", "answer")
Compose = Callable[["Model", Blocks], Made]
FULL = "full_recompute"


@dataclass(frozen=True)
class RowPlan:
    """Bytes that the attention rows of one prompt take: `layers x heads x rows x keys` numbers per cache."""

    layers: int
    heads: int
    rows: int
    keys: int
    bytes_per_number: int = 4

    ARMS = 3  # full recompute, one operator, one control
    FACTOR = 2  # a chunk's rows are reduced in float64, at most the whole length at a time

    @property
    def nbytes(self) -> int:
        per_cache = self.layers * self.heads * self.rows * self.keys * self.bytes_per_number
        return per_cache * (self.ARMS + 2 * self.FACTOR)

    def __str__(self) -> str:
        return (
            f"attention rows of the longest prompt: {self.layers} layers x {self.heads} heads x {self.rows} "
            f"row{'s' if self.rows != 1 else ''} x {self.keys} keys x {self.bytes_per_number} bytes; "
            f"{readable(self.nbytes)} with {self.ARMS} caches and the reduction in float64"
        )


def plan_rows(shape: ModelShape, item: Item, rows: Rows, *, bytes_per_number: int = 4) -> RowPlan:
    """What the rows of one prompt take, before anything is run."""
    tail, at = tail_of(item, rows)
    keys = item.blocks.n_context + len(tail)
    return RowPlan(shape.n_layers, shape.n_heads, len(at), keys, bytes_per_number)


@dataclass(frozen=True)
class Measure:
    """Everything that is measured on one prompt."""

    model: Model
    chosen: dict[str, Compose]
    rows: Rows
    grain: Grain
    max_new_tokens: int
    competence: Competence

    def __call__(self, item: Item) -> tuple[pd.DataFrame, dict[str, Any]]:
        full = self.look(item, FULL, operators.full_recompute(self.model, item.blocks))
        again, single = self.twice(item, full.cache)
        noise = float((again.logits - full.logits).abs()[self._answers(item)].max())
        line = self.line(item, full, noise)
        if not line["competent"]:
            return pd.DataFrame(), line
        cells = alone(item, full, full)
        first: Arm | None = None
        for name, operator in self.chosen.items():
            made = operator(self.model, item.blocks)
            _check_made(name, item, made)
            arm = self.look(item, name, made)
            first = first or (arm if made.token_slots is None else None)
            cells += compare(item, arm, full, self.grain)
            cells += alone(item, arm, full) if name != FULL else []
            cost = {"recomputed_tokens": float(made.recomputed_tokens), "layer_tokens": float(made.layer_tokens)}
            cells.append(numbers(cost, view="cost", site=name, ranking=name))
        cells += self.controls(item, full, again, single, first or full, noise)
        return table(item, cells), line

    def look(self, item: Item, name: str, made: Made | KVCache, *, answer: bool = True) -> Arm:
        """Run the end of the prompt on a cache: rows, logits and, for a question, the greedy answer.

        Of a cache with wrapper slots the tokens alone are kept: what attention the wrappers draw is no token's, and
        keys are turned to where full recompute has them, so that a shift by wrappers does not show as a difference.
        """
        made = made if isinstance(made, Made) else Made(made, 0, 0)
        cache, tail, at = made.cache, *tail_of(item, self.rows)
        context = len(cache)
        done = engine.capture(self.model, cache, tail, slots=[context + i for i in at], want=("patterns",))
        assert done.patterns is not None
        stop = len(item.blocks.suffix)
        logits = engine.logits_of(self.model, done.hidden[:1, stop - 1])[0].cpu()
        text = self.answer(item, done.cache[: context + stop], int(logits.argmax())) if answer else ""
        rows = done.patterns[:, 0]
        if made.token_slots is not None:
            rows = rows[..., [*made.token_slots, *range(context, rows.shape[-1])]]
            cache = made.tokens.placed(torch.arange(item.blocks.n_context))
        return Arm(name, cache, rows, logits, text)

    def answer(self, item: Item, cache: KVCache, first: int) -> str:
        """Greedy answer up to the first of the item's stops; empty for a pair, whose answer is read from the logits."""
        if item.pair is not None:
            return ""
        return greedy_answer(self.model, cache, first, stops=item.stops, max_new_tokens=self.max_new_tokens)

    def twice(self, item: Item, full: KVCache) -> tuple[Arm, tuple[KVCache, KVCache]]:
        """Full recompute in two passes, whose first is the join of one block; and that block in both."""
        blocks = item.blocks
        stop = blocks.spans[0][1]
        head = Blocks((), (blocks.context[:stop],), blocks.suffix)
        joined = operators.no_recompute(self.model, head).cache
        rest = blocks.context[stop:]
        cache = engine.extend(self.model, joined, rest)[0] if rest else joined
        return self.look(item, FULL, cache, answer=False), (joined, full[:stop])

    def line(self, item: Item, full: Arm, noise: float) -> dict[str, Any]:
        """The prompt's line in the pairs table; a pair must change its answer to count."""
        line = {
            "pair": item.key,
            "content": item.content,
            "family": item.family,
            "kind": item.kind,
            "split": item.split,
            "competent": True,
            "reason": "",
            "noise": noise,
            "length": len(item.blocks),
            "n_chunks": len(item.blocks.chunks),
            "chunk_starts": [start for start, _ in item.blocks.spans],
            "tokens": list(item.tokens),
            "answer_old": item.answers[0],
        }
        pair = item.pair
        if pair is None:
            return line
        answers = (pair.answer_old_id, pair.answer_new_id)
        new = engine.prefill(self.model, pair.new_ids[:-1])
        old_score = float(full.logits[answers[1]] - full.logits[answers[0]])
        logits = engine.decide(self.model, new, [pair.new_ids[-1]], answers)[0]
        new_score = float(logits[1] - logits[0])
        control = item.kind == "control"
        reason = self.competence.reason(old=old_score, new=new_score, noise=noise, control=control)
        return line | {
            "competent": not reason,
            "reason": reason,
            "s_old": old_score,
            "s_new": new_score,
            "field_start": pair.field[0],
            "field_stop": pair.field[1],
            "answer_new": pair.pair.answer_new,
            "tokens_new": list(pair.tokens_new),
            "regions": list(pair.regions),
            "anchors": list(pair.anchors),
            "delimiter": list(pair.delimiter),
        }

    def controls(
        self, item: Item, full: Arm, again: Arm, single: tuple[KVCache, KVCache], first: Arm, noise: float
    ) -> list[Cells]:
        """Rows of the three controls. Raises ControlError on the first that fails."""
        # An operator that leaves keys unmoved itself would be compared with itself, and one whose cache has wrapper
        # slots cannot be run without them: full recompute stands in for it.
        base = first if torch.equal(first.cache.positions, full.cache.positions) else full
        still = self.look(item, "unmoved", unmoved(base.cache, item.blocks), answer=False)
        itself, astray = within_deviation(item, again, full), within_deviation(item, still, base)
        eps = max(torch.finfo(self.model.dtype).eps, torch.finfo(torch.float32).eps)
        # In 16 bits rounding alone would allow anything, so the tolerance never exceeds a tenth of a real misplacement.
        tolerance = min(256 * eps, 0.1 * astray) if astray else 256 * eps
        # Exact agreement of the two passes is luck, so a few rounding errors stand for it at least.
        visible = max(itself, 8 * torch.finfo(torch.float32).eps) / astray if astray else math.inf
        one, plain = single
        rounding = min(256 * eps, LIMITS.get(self.model.dtype, 0.1))
        apart = max(
            float((a.float() - b.float()).norm() / b.float().norm())
            for mine, theirs in ((one.keys, plain.keys), (one.values, plain.values))
            for a, b in zip(mine, theirs, strict=True)
        )
        found = (
            ("full_recompute_twice", itself, tolerance, "mean within-chunk deviation of one pass against two"),
            ("first_block", apart, rounding, "relative gap of keys and values of a block that starts the prompt"),
            ("unmoved_keys_differ", visible, 0.1, "noise over the deviation with keys not moved"),
        )
        for name, gap, limit, about in found:
            if not gap <= limit:
                raise ControlError(
                    f"control {name!r} failed on {self.model.name} ({self.model.dtype}), prompt {item.key}: {about} is "
                    f"{gap:.3g}, limit {limit:.3g}. Nothing measured on this model can be trusted; run `kvprobe check`."
                )
        cells = [
            numbers({"gap": gap, "tolerance": limit}, view="control", site=name, ranking=base.name)
            for name, gap, limit, _ in found
        ]
        return [*cells, numbers({"gap": noise}, view="control", site="noise_floor", ranking=base.name)]

    def _answers(self, item: Item) -> list[int]:
        return [item.answer[0]] if item.pair is None else [item.pair.answer_old_id, item.pair.answer_new_id]


def unmoved(cache: KVCache, blocks: Blocks) -> KVCache:
    """The cache with every chunk's keys turned back to 0, 1, ...: as if the operator had not moved them."""
    local = [*range(len(blocks.prefix)), *(i for chunk in blocks.chunks for i in range(len(chunk)))]
    return replace(cache.placed(torch.tensor(local)), end=blocks.n_context)


def tail_of(item: Item, rows: Rows) -> tuple[list[int], list[int]]:
    """Tokens run behind the context, and which of them are the chosen queries."""
    suffix = list(item.blocks.suffix)
    if rows == "terminal":
        return suffix, [len(suffix) - 1]
    if rows == "suffix":
        return suffix, list(range(len(suffix)))
    tail = suffix + list(item.answer[:-1])
    return tail, list(range(len(suffix) - 1, len(tail)))


def _check_made(name: str, item: Item, made: Made) -> None:
    have = tuple(made.tokens.token_ids[0].tolist())
    if have != item.blocks.context or made.cache.batch != 1:
        raise InputError(
            f"operator {name!r} gave a cache of {len(have)} token slots, batch {made.cache.batch}, for "
            f"{item.blocks.n_context} tokens of prefix and chunks; deviation is compared slot by slot, so it needs one "
            "slot per token, in order."
        )
