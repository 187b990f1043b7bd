"""What must be true of a model before anything is read off its cache. Each check runs on the model itself.

A failed check names the layer where it can, the size of the gap, and the limit for this dtype.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvnotes_interp import compat, declared, engine
from kvnotes_interp.cache import KVCache
from kvnotes_interp.compact import Cache, CompactCache
from kvnotes_interp.engine import shared
from kvnotes_interp.engine.capture import WANTS
from kvnotes_interp.errors import UnsupportedError
from kvnotes_interp.sites import Site

if TYPE_CHECKING:
    from kvnotes_interp.model import Model

# Largest relative error (norm of the difference over norm) that rounding explains, per dtype. A wrong mask, position
# or frequency gives errors of order 0.1 to 1. float64 is bounded by the float32 angles of transformers' rotary modules.
LIMITS = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}


@dataclass(frozen=True)
class Check:
    """One check: a measured value, the limit it must stay under, and whether it did.

    The value is NaN where this model is refused what was to be measured; `detail` says why.
    """

    name: str
    passed: bool
    value: float
    limit: float
    detail: str = ""


@dataclass(frozen=True)
class CheckReport:
    """All checks of one model."""

    model: str
    dtype: str
    device: str
    checks: tuple[Check, ...]
    noise_floor: float
    sweep_path: str

    @property
    def failures(self) -> tuple[Check, ...]:
        return tuple(c for c in self.checks if not c.passed)

    @property
    def passed(self) -> bool:
        return not self.failures

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "model": self.model,
            "dtype": self.dtype,
            "device": self.device,
            "passed": self.passed,
            "noise_floor": self.noise_floor,
            "sweep_path": self.sweep_path,
            "checks": [{**vars(c), "value": None if math.isnan(c.value) else c.value} for c in self.checks],
        }

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table

        table = Table(title=f"{self.model}, {self.dtype} on {self.device}", title_justify="left")
        for column in ("", "check", "measured", "limit", ""):
            table.add_column(column, justify="right" if column in ("measured", "limit") else "left")
        for c in self.checks:
            mark = "[green]✓[/]" if c.passed else "[red]✗[/]"
            table.add_row(mark, c.name, "–" if math.isnan(c.value) else f"{c.value:.2g}", f"{c.limit:.2g}", c.detail)
        tail = f"noise floor {self.noise_floor:.2g} logits; sweep path: {self.sweep_path}"
        return Group(table, tail)


def check(model: Model, *, full: bool = True) -> CheckReport:
    """Run the checks; `full=False` is the short form that runs at load (shorter prompt, fewer forwards)."""
    limit = LIMITS.get(model.dtype, 1e-1)
    ids = _prompt(model, 64 if full else 16)
    cut = len(ids) - 5
    whole = engine.prefill(model, ids)
    head, fork = engine.prefill(model, ids[:cut]), engine.prefill(model, ids[:cut])
    grown, hidden = engine.extend(model, head, ids[cut:])
    own = _own_logits(model, ids)
    logits = compat.unembed(model.hf, hidden[0])
    checks = [
        _finite(logits),
        _under("cached suffix of 5 tokens = full pass", _relative(logits, own[cut:]), limit),
        _under("keys written in two parts = in one", *_worst(grown.keys, whole.keys, limit)),
        Check("a forward leaves the parent cache unchanged", head == fork, 0.0 if head == fork else 1.0, 0.0),
        *_moved(model, ids[:cut], head, limit),
        *declared.checks(model),
    ]
    if full:
        checks += [_gap(model, ids, cut, limit), *_paths(model, ids, cut, head, own, limit)]
    answers = (1, 2)
    noise = engine.noise_floor(model, head, ids[cut:], answers)
    reason = shared.refusal(model)
    return CheckReport(
        model=model.name,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        checks=tuple(checks),
        noise_floor=noise,
        sweep_path="shared" if not reason else f"plain: {reason}",
    )


def _prompt(model: Model, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    top = min(model.shape.vocab, 4096)  # low ids are ordinary text in every tokenizer
    return torch.randint(3, top, (length,), generator=generator).tolist()


def _own_logits(model: Model, ids: list[int]) -> Tensor:
    with torch.no_grad():
        return model.hf(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0]


def _relative(a: Tensor, b: Tensor) -> float:
    a, b = a.cpu().double(), b.cpu().double()
    return float((a - b).norm() / b.norm().clamp_min(1e-12))


def _worst(a: tuple[Tensor, ...], b: tuple[Tensor, ...], limit: float) -> tuple[float, float, str]:
    gaps = [_relative(x, y) for x, y in zip(a, b, strict=True)]
    worst = max(range(len(gaps)), key=gaps.__getitem__)
    return gaps[worst], limit, f"worst in layer {worst}"


def _under(name: str, value: float, limit: float, detail: str = "") -> Check:
    return Check(name, math.isfinite(value) and value <= limit, value, limit, detail)


def _finite(logits: Tensor) -> Check:
    bad = int((~torch.isfinite(logits)).sum())
    return Check("no NaN or infinity in the logits", bad == 0, float(bad), 0.0)


def _moved(model: Model, ids: list[int], head: KVCache, limit: float) -> list[Check]:
    """A prefix run at an offset must have the same keys, rotated, and the same values."""
    # Far enough that a wrong low frequency shows (scaled RoPE differs from plain RoPE there), inside the trained range.
    longest = getattr(compat.text_config(model.hf), "max_position_embeddings", None) or 2048
    offset = max(1, min(2048, longest - len(ids) - 1))
    there = engine.prefill(model, ids, positions=range(offset, offset + len(ids)))
    moved = head.moved(offset)
    out = [_under(f"keys moved by {offset} = re-prefilled there", *_worst(moved.keys, there.keys, limit))]
    value, _, detail = _worst(head.values, there.values, limit)
    out.append(_under("values do not depend on the offset", value, limit, detail))
    # The control of the check itself: without the rotation it must fail, or it proves nothing.
    turned = [i for i, layer in enumerate(model.rope.layers) if layer.inv_freq is not None]
    still = min((_relative(head.keys[i], there.keys[i]) for i in turned), default=0.0)
    out.append(Check("control: unmoved keys differ", still > limit, still, limit, "must be above the limit"))
    return out


def _paths(model: Model, ids: list[int], cut: int, head: KVCache, own: Tensor, limit: float) -> list[Check]:
    """Every path that a probe can take gives the model's own logits; one that this model is refused fails, by name."""
    tail, last = ids[cut:], own[-1]

    def logits(cache: Cache) -> Tensor:
        return engine.decide(model, cache, tail)[0]

    def recorded() -> Tensor:
        return compat.unembed(model.hf, engine.capture(model, head, tail, want=WANTS).hidden[0, -1])

    def recomputed() -> Tensor:
        spoiled = replace(head, keys=tuple(k + 1 for k in head.keys), values=tuple(v + 1 for v in head.values))
        return logits(engine.recompute(model, spoiled, range(cut)).cache)

    # Without its first slot, by the model's own attention: a window counts from the end and does not notice.
    ahead = compat.new_cache([k[:, :, 1:] for k in head.keys], [v[:, :, 1:] for v in head.values])
    positions, tokens = torch.arange(cut, len(ids)), torch.tensor([tail], device=model.device)
    with torch.no_grad():
        without = compat.unembed(model.hf, compat.forward(model.hf, tokens, ahead, positions)[0, -1])

    def biased() -> Tensor:
        first = torch.arange(cut) == 0
        new = tuple((first.to(k.device) * -1e9).to(k.dtype).expand(k.shape[:3]) for k in head.keys)
        return logits(replace(head, bias=new))

    def compacted() -> Tensor:
        rest = torch.arange(1, cut).expand(head.n_kv_heads, -1)
        return logits(CompactCache.of(head).kept([rest] * head.n_layers))

    def swept() -> Tensor:
        whole, all_tokens = Site(tuple(range(cut))), range(len(last))
        other = engine.prefill(model, list(reversed(ids[:cut])))
        return engine.sweep(model, other, head, [whole], tail, all_tokens).scores[0]

    ways = {
        "a recorded pass = full pass": (recorded, last),
        "recomputed slots = full pass": (recomputed, last),
        "everything patched in a sweep = full pass": (swept, last),
        "a key biased by -1e9 = a cache without it": (biased, without),
        "a compact cache = a cache without a slot": (compacted, without),
    }
    out, said = [], {}
    for name, (way, want) in ways.items():
        try:
            out.append(_under(name, _relative(way(), want), limit))
        except UnsupportedError as error:
            first = said.setdefault(str(error), name)
            reason = str(error) if first == name else f'refused, as "{first}"'
            out.append(Check(name, False, math.nan, limit, reason))
    return out


def _gap(model: Model, ids: list[int], cut: int, limit: float) -> Check:
    """A gap in the positions must act as distance, not cut the attention."""
    jump = 11
    positions = [*range(cut), *range(cut + jump, len(ids) + jump)]
    at_once = engine.prefill(model, ids, positions=positions)
    head = engine.prefill(model, ids[:cut])
    in_two, _ = engine.extend(model, head, ids[cut:], positions=positions[cut:])
    value, _, detail = _worst(in_two.keys, at_once.keys, limit)
    return _under(f"a gap of {jump} positions is honoured", value, limit, detail)
