"""The sweep: the same decision read from thousands of patched caches.

Two paths give the same numbers. *shared* never copies the base cache: all rows attend to it at once and each carries
only its patch (see `shared.py`). *plain* copies the base per row, patches the copies and runs the tail on the batch;
it serves any model and is the reference the shared path is tested against.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from kvnotes_interp import compat
from kvnotes_interp.cache import KVCache, full_bias
from kvnotes_interp.engine import shared
from kvnotes_interp.engine.budget import default_budget, readable
from kvnotes_interp.engine.forward import as_ids, check_tokens, decide, places_of
from kvnotes_interp.errors import NOT_FINITE, InputError, NotFiniteError, UnsupportedError, whole_numbers
from kvnotes_interp.sites import Site, check_donor

if TYPE_CHECKING:
    from kvnotes_interp.model import Model

Path = Literal["shared", "plain"]
PLAIN_ROWS = 64
Progress = Callable[[int], None]


@dataclass(frozen=True)
class SweepPlan:
    """How a sweep is cut into batches, worked out before it runs."""

    path: Path
    n_sites: int
    batch_rows: int
    bytes_per_row: int
    memory_budget: int
    reason: str = ""

    def __str__(self) -> str:
        n = -(-self.n_sites // self.batch_rows)
        return (
            f"{self.n_sites} patched caches, {self.path} path, {n} batch{'es' if n > 1 else ''} of up to "
            f"{self.batch_rows} rows x {readable(self.bytes_per_row)} (budget {readable(self.memory_budget)})"
        )


@dataclass(frozen=True)
class SweepResult:
    """Answer logits for every site, with the path that produced them."""

    scores: Float[Tensor, "site answer"]
    plan: SweepPlan

    @property
    def path(self) -> Path:
        return self.plan.path

    @property
    def difference(self) -> Float[Tensor, " site"]:
        """Logit of the second answer minus the first."""
        return self.scores[:, 1] - self.scores[:, 0]


def plan_sweep(
    model: Model,
    n_sites: int,
    n_pos: int,
    n_tail: int,
    *,
    memory_budget: int | None = None,
    path: Path | Literal["auto"] = "auto",
) -> SweepPlan:
    """Choose path and batch size for a sweep over a base of `n_pos` slots, without running anything.

    Raises InputError when not even one row fits the budget.
    """
    if path not in ("auto", "shared", "plain"):
        raise InputError(f'path={path!r}: choose "auto", "shared" or "plain".')
    budget = default_budget(model.device) if memory_budget is None else memory_budget
    reason = ""
    if path == "auto":
        reason = shared.refusal(model)
        path = "plain" if reason else "shared"
    shape, size = model.shape, torch.finfo(model.dtype).bits // 8
    # Activations of one row in its widest layer: residual, query, key, value, and three MLP-wide tensors.
    widest = n_tail * (8 * shape.d_model + 4 * shape.d_mlp + 4 * shape.n_heads * shape.d_head) * size
    if path == "shared":
        per_row = widest
        rows = min(budget // per_row, shared.MAX_ROWS.get(model.device.type, 1024))
    else:
        kv = 2 * shape.n_layers * shape.n_kv_heads * shape.d_head * size * (n_pos + n_tail)
        # The copy that is patched, plus the concatenation that the model's own cache makes of it.
        per_row = 2 * kv + widest
        # The cap keeps batch shapes, and so the last bits, from following whatever memory happens to be free.
        rows = min(budget // per_row, PLAIN_ROWS)
    if rows < 1:
        raise InputError(
            f"one patched cache of {n_pos} positions takes {readable(per_row)}, more than the memory budget of "
            f"{readable(budget)}. Raise memory_budget, shorten the prompt, or use a smaller dtype."
        )
    return SweepPlan(path, n_sites, max(1, min(rows, n_sites)), per_row, budget, reason)


@torch.no_grad()
def sweep(
    model: Model,
    base: KVCache,
    donor: KVCache,
    sites: Sequence[Site],
    tail: Sequence[int] | Tensor,
    answers: Sequence[int],
    *,
    memory_budget: int | None = None,
    path: Path | Literal["auto"] = "auto",
    progress: Progress | None = None,
) -> SweepResult:
    """Read the decision from `base.patched(site, donor)` for every site.

    Args:
        base, donor: caches of exactly the tokens before the tail (batch 1); the tail is run behind `base.end`.
        sites: one patch per row; positions must lie before the tail. An empty site is the unpatched base.
        tail: `[tail]` tokens run on top of every patched cache, the decision token last.
        answers: token ids whose logits are read at the last tail token.
        memory_budget: bytes that all rows in flight may take; a quarter of what is free by default.
        path: "auto" uses the shared base where this model supports it and says so in the result.
        progress: called with the number of rows finished, as they finish.

    Returns scores `[site answer]` in at least float32, on the CPU.
    """
    ids, sites, answers = as_ids(model, tail), list(sites), whole_numbers("answers", answers)
    if ids.shape[0] != 1:
        raise InputError(f"the tail has {ids.shape[0]} rows; a sweep runs one on every patched cache.")
    for name, cache in (("base", base), ("donor", donor)):
        if not isinstance(cache, KVCache):
            raise InputError(f"{name} is {cache!r}: slots of a compact cache are no tokens and cannot be patched.")
        if cache.batch != 1:
            raise InputError(f"{name} has batch {cache.batch}; a sweep takes one base and one donor, each of batch 1.")
        model.require_own(cache, name)
        for layer, (key, module) in enumerate(zip(cache.keys, compat.layers(model.hf), strict=True)):
            device = compat.device_of(module)
            if key.dtype != model.dtype or device not in (None, key.device):
                raise InputError(
                    f"{name} is {key.dtype} on {key.device} in layer {layer}, the model {model.dtype} on {device}; "
                    "use cache.to(device=..., dtype=...)."
                )
    check_donor(base, donor, sites)
    places_of(model, ids, base.end, None)
    check_tokens(model, torch.as_tensor(list(answers)), "answers")
    plan = plan_sweep(model, len(sites), len(base), ids.shape[1], memory_budget=memory_budget, path=path)
    if not sites:
        return SweepResult(torch.empty(0, len(answers)), plan)
    if plan.path == "shared":
        if reason := shared.refusal(model):
            raise UnsupportedError(f"the shared path cannot serve {model.name}: {reason} Use path='plain'.")
        scores = shared.run(model, base, donor, sites, ids, answers, plan.batch_rows, progress)
    else:
        scores = _run_plain(model, base, donor, sites, ids, answers, plan.batch_rows, progress)
    bad = (~torch.isfinite(scores)).any(1).nonzero()
    if len(bad):
        for index in bad.flatten().tolist():  # read again alone, to say where it went wrong
            decide(model, base.patched(sites[index], donor), ids, answers)
        raise NotFiniteError(NOT_FINITE, f"{model.name}: a patched cache gave scores that are not finite.")
    return SweepResult(scores, plan)


def _run_plain(
    model: Model,
    base: KVCache,
    donor: KVCache,
    sites: Sequence[Site],
    tail: Tensor,
    answers: Sequence[int],
    rows: int,
    progress: Progress | None,
) -> Float[Tensor, "site answer"]:
    out = []
    for start in range(0, len(sites), rows):
        chunk = sites[start : start + rows]
        out.append(decide(model, _patched_rows(base, donor, chunk), tail, answers).cpu())
        if progress is not None:
            progress(len(chunk))
    return torch.cat(out)


def _patched_rows(base: KVCache, donor: KVCache, sites: Sequence[Site]) -> KVCache:
    """One row per site. Only layers that some row patches are copied."""
    wide = base.repeat(batch=len(sites))
    keys, values = list(wide.keys), list(wide.values)
    parts = [("k", keys, donor.keys), ("v", values, donor.values)]
    bias = None
    if base.bias is not None or donor.bias is not None:
        bias = list(full_bias(wide))
        parts.append(("k", bias, full_bias(donor)))
    for layer in range(base.n_layers):
        for part, mine, theirs in parts:
            rows = [
                (row, site)
                for row, site in enumerate(sites)
                if part in site.part and site.positions and layer in site.layers_of(base.n_layers)
            ]
            if not rows:
                continue
            fresh = mine[layer].clone(memory_format=torch.contiguous_format)
            for row, site in rows:
                pos = torch.tensor(site.positions, device=fresh.device)
                every = range(base.n_kv_heads) if site.kv_heads is None else site.kv_heads
                heads = torch.tensor(every, dtype=torch.long)
                at = (heads[:, None].to(fresh.device), pos)
                fresh[row][at] = theirs[layer][0][at]
            mine[layer] = fresh
    return replace(wide, keys=tuple(keys), values=tuple(values), bias=None if bias is None else tuple(bias))
