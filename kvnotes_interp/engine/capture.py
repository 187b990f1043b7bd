"""One forward pass that records what happens at chosen slots and, if asked, interferes with it.

Everything a circuit analysis needs, and nothing is stored that was not asked for: the residual stream, what attention
and MLP add to it, head outputs, attention rows, queries. Interference is a value too (`Edits`): edges cut, head
outputs replaced, vectors added to the residual stream, writes replaced. A record says what the edited pass did.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from kvnotes_interp import attention, compat
from kvnotes_interp.attention import Cut
from kvnotes_interp.cache import KVCache
from kvnotes_interp.engine.forward import TokenIds, as_ids
from kvnotes_interp.errors import InputError, nearest

if TYPE_CHECKING:
    from kvnotes_interp.model import Model

WANTS = ("residual", "attention", "mlp", "heads", "patterns", "queries")
_BY_ATTENTION = frozenset({"patterns", "queries"})  # recorded by the attention function, the rest by hooks


@dataclass(frozen=True)
class HeadPatch:
    """Outputs of heads, as the output projection reads them, replaced at some slots.

    Per layer: `outputs` `[batch query head d_head]` and `take` `[batch query head]`, which says whose output is
    replaced; a batch of 1 stands for all rows. Layers that are not named stay as they are.
    """

    queries: tuple[int, ...]
    outputs: Mapping[int, Float[Tensor, "batch query head d_head"]]
    take: Mapping[int, Bool[Tensor, "batch query head"]]


@dataclass(frozen=True)
class ResidualPatch:
    """Vectors added to the residual stream where a layer reads it; index n_layers: behind the last layer.

    `add` per layer `[batch slot d_model]`; a batch of 1 stands for all rows.
    """

    slots: tuple[int, ...]
    add: Mapping[int, Float[Tensor, "batch slot d_model"]]


@dataclass(frozen=True)
class WritePatch:
    """What the attention or the MLP of a layer adds to the residual stream, replaced at some slots.

    `outputs` per layer `[batch slot d_model]`, as `Captured.attention` and `Captured.mlp` hold it.
    """

    part: Literal["attention", "mlp"]
    slots: tuple[int, ...]
    outputs: Mapping[int, Float[Tensor, "batch slot d_model"]]


@dataclass(frozen=True)
class Edits:
    """How a pass is interfered with. `cuts` is one list for all rows of the batch, or one list per row.

    In a layer, vectors are added first, then head outputs are replaced, then the attention's writes, then the MLP's.
    """

    cuts: Sequence[Cut] | Sequence[Sequence[Cut]] = ()
    heads: HeadPatch | None = None
    residual: ResidualPatch | None = None
    writes: Sequence[WritePatch] = ()


@dataclass(frozen=True)
class Captured:
    """What was recorded at `slots`, on the CPU, in at least float32; None where it was not asked for.

    Attributes:
        slots: the recorded slots: places in the whole sequence, cache first.
        cache: the cache grown by the new tokens, as the edited pass wrote it.
        hidden: final, normed hidden states of all new tokens; `compat.unembed` takes them.
        residual: what each layer reads, and last what the final norm reads.
        attention, mlp: what each layer's attention and MLP added to the residual stream.
        heads: head outputs as the output projection reads them. patterns: attention rows. queries: rotated queries.
    """

    slots: tuple[int, ...]
    cache: KVCache
    hidden: Float[Tensor, "batch pos d_model"]
    residual: Float[Tensor, "layer+1 batch slot d_model"] | None = None
    attention: Float[Tensor, "layer batch slot d_model"] | None = None
    mlp: Float[Tensor, "layer batch slot d_model"] | None = None
    heads: Float[Tensor, "layer batch slot head d_head"] | None = None
    patterns: Float[Tensor, "layer batch head slot key"] | None = None
    queries: Float[Tensor, "layer batch head slot d_head"] | None = None


@torch.no_grad()
def capture(
    model: Model,
    cache: KVCache | None,
    token_ids: TokenIds,
    *,
    slots: Sequence[int] | None = None,
    want: Sequence[str] = ("residual",),
    edits: Edits | None = None,
    positions: Sequence[int] | Tensor | None = None,
) -> Captured:
    """Run `token_ids` on top of `cache` (or from nothing) and record `want` at `slots`.

    Args:
        token_ids: `[pos]` or `[batch pos]`; a single row is run for every row of the cache.
        slots: places in the whole sequence, all among the new tokens; None records every new token.
        want: any of "residual", "attention", "mlp", "heads", "patterns", "queries".
        edits: how to interfere; None runs the model as it is.
        positions: rotary positions of the new tokens; they go on from `cache.end` by default.

    The pass runs under this package's attention function, in at least float32 inside attention, with and without
    edits; compare captures with captures, and their gap is due to the edits alone.

    Raises InputError on a slot that is not among the new tokens, or on an unknown record.
    """
    for name in want:
        if name not in WANTS:
            raise InputError(f"want holds {name!r}; choose from {', '.join(WANTS)}.{nearest(name, WANTS)}")
    edits = edits or Edits()
    ids = as_ids(model, token_ids)
    n_old = 0 if cache is None else len(cache)
    if cache is not None:
        if cache.model_id != model.model_id:
            raise InputError(f"this cache was written by {cache.model_id!r}; the model at hand is {model.model_id!r}.")
        if ids.shape[0] == 1:
            ids = ids.expand(cache.batch, -1)
        if ids.shape[0] != cache.batch:
            raise InputError(f"{ids.shape[0]} rows of tokens for a cache of batch {cache.batch}.")
    new = range(n_old, n_old + ids.shape[1])
    chosen = tuple(new) if slots is None else tuple(slots)
    _check_edits(edits, new, chosen, ids.shape[0])
    start = 0 if cache is None else cache.end
    if positions is None:
        positions = range(start, start + ids.shape[1])
    places = torch.as_tensor(positions, dtype=torch.long).cpu()

    recorder = attention.Recorder(chosen, frozenset(want) & _BY_ATTENTION)
    plan = attention.Plan(
        bias=None if cache is None else cache.bias,
        recorder=recorder if recorder.want else None,
        cuts=_by_row(edits.cuts),
    )
    fork = compat.new_cache() if cache is None else compat.new_cache(cache.keys, cache.values)
    hooks = _Hooks(model, n_old, chosen, edits, frozenset(want) - _BY_ATTENTION)
    with hooks, attention.using(model.hf, plan):
        hidden = compat.forward(model.hf, ids, fork, places)
    keys, values = compat.read_cache(fork)
    if cache is None:
        grown = KVCache(keys, values, ids, places, model.rope, model.model_id)
    else:
        grown = cache.appended(
            tuple(k[:, :, n_old:] for k in keys), tuple(v[:, :, n_old:] for v in values), ids, places
        )

    def stacked(found: Mapping[int, Tensor], name: str, n: int) -> Tensor | None:
        return torch.stack([found[i].cpu() for i in range(n)]) if name in want else None

    n = model.shape.n_layers
    return Captured(
        chosen,
        grown,
        hidden,
        residual=stacked(hooks.residual, "residual", n + 1),
        attention=stacked(hooks.attention, "attention", n),
        mlp=stacked(hooks.mlp, "mlp", n),
        heads=stacked(hooks.heads, "heads", n),
        patterns=stacked(recorder.patterns, "patterns", n),
        queries=stacked(recorder.queries, "queries", n),
    )


def answer_logits(model: Model, captured: Captured, answers: Sequence[int]) -> Float[Tensor, "batch answer"]:
    """Logits of the answer tokens after the last new token, in at least float32, on the CPU."""
    return compat.unembed(model.hf, captured.hidden[:, -1], torch.as_tensor(list(answers))).cpu()


@torch.no_grad()
def head_writes(
    model: Model, layer: int, outputs: Float[Tensor, "*rows head d_head"]
) -> Float[Tensor, "*rows head d_model"]:
    """What each head alone puts through the output projection; a bias, and a norm behind it, are left out.

    Without a norm behind the projection, the sum over heads plus the bias is what attention adds to the residual.
    """
    layer_module = compat.layers(model.hf)[layer]
    weight = compat.output_projection(layer_module).weight
    heads, d_head = outputs.shape[-2:]
    by_head = weight.to("cpu", outputs.dtype).view(weight.shape[0], heads, d_head)
    return torch.einsum("...hd,mhd->...hm", outputs, by_head) * compat.residual_scale(layer_module)


def _by_row(cuts: Sequence[Any]) -> tuple[tuple[Cut, ...], ...]:
    if not cuts:
        return ()
    if isinstance(cuts[0], Cut):
        return (tuple(cuts),)
    return tuple(tuple(row) for row in cuts)


def _check_edits(edits: Edits, new: range, slots: tuple[int, ...], batch: int) -> None:
    rows = _by_row(edits.cuts)
    if len(rows) not in (0, 1, batch):
        raise InputError(f"{len(rows)} lists of cuts for a batch of {batch}: give one for all rows, or one per row.")
    cuts = [c for row in rows for c in row]
    named = {
        "slots": slots,
        "cuts.queries": tuple(q for c in cuts for q in c.queries or ()),
        "heads.queries": edits.heads.queries if edits.heads else (),
        "residual.slots": edits.residual.slots if edits.residual else (),
        "writes.slots": tuple(s for w in edits.writes for s in w.slots),
    }
    for name, where in named.items():
        bad = [s for s in where if s not in new]
        if bad:
            raise InputError(f"{name} holds {bad[0]}; the new tokens stand at slots {new.start} to {new.stop - 1}.")
    keys = [k for c in cuts for k in c.keys if not 0 <= k < new.stop]
    if keys:
        raise InputError(f"cuts.keys holds {keys[0]}; the sequence has slots 0 to {new.stop - 1}.")


@dataclass
class _Hooks:
    """Forward hooks that record and edit the residual stream; gone when the `with` block ends."""

    model: Model
    n_old: int
    slots: tuple[int, ...]
    edits: Edits
    want: frozenset[str]
    residual: dict[int, Tensor] = field(default_factory=dict)
    attention: dict[int, Tensor] = field(default_factory=dict)
    mlp: dict[int, Tensor] = field(default_factory=dict)
    heads: dict[int, Tensor] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)
    _reads: dict[int, Tensor] = field(default_factory=dict)
    _writes: dict[int, Tensor] = field(default_factory=dict)

    def __enter__(self) -> _Hooks:
        layers = compat.layers(self.model.hf)
        if "heads" in self.want or self.edits.heads is not None:
            for index, layer in enumerate(layers):
                self._add(compat.output_projection(layer).register_forward_pre_hook, self._projected(index))
        if not self.want - {"heads"} and self.edits.residual is None and not self.edits.writes:
            return self
        for index, layer in enumerate(layers):
            self._add(layer.register_forward_pre_hook, self._before(index), with_kwargs=True)
            self._add(compat.attention_write(layer).register_forward_hook, self._wrote(index, layer))
            self._add(layer.register_forward_hook, self._after(index))
        norm = compat.final_norm(self.model.hf)
        self._add(norm.register_forward_pre_hook, self._before(len(layers)), with_kwargs=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _add(self, register: Callable[..., Any], hook: Callable[..., Any], **options: Any) -> None:
        self._stack.callback(register(hook, **options).remove)

    def _at(self, slots: Sequence[int], device: torch.device) -> Tensor:
        return torch.tensor([s - self.n_old for s in slots], device=device)

    def _kept(self, hidden: Tensor) -> Tensor:
        exact = torch.promote_types(hidden.dtype, torch.float32)
        return hidden[:, self._at(self.slots, hidden.device)].to(exact)

    def _before(self, index: int) -> Callable[..., Any]:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            hidden = args[0] if args else kwargs["hidden_states"]
            patch = self.edits.residual
            if patch is not None and index in patch.add:
                hidden = hidden.clone()
                hidden[:, self._at(patch.slots, hidden.device)] += patch.add[index].to(hidden.device, hidden.dtype)
                args, kwargs = ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})
            if "residual" in self.want:
                self.residual[index] = self._kept(hidden)
            self._reads[index] = hidden
            return args, kwargs

        return hook

    def _projected(self, index: int) -> Callable[..., Any]:
        n_heads = self.model.shape.n_heads

        def hook(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            outputs = args[0].unflatten(-1, (n_heads, -1))
            patch = self.edits.heads
            if patch is not None and index in patch.outputs:
                at, outputs = self._at(patch.queries, outputs.device), outputs.clone()
                theirs = patch.outputs[index].to(outputs.device, outputs.dtype)
                outputs[:, at] = torch.where(patch.take[index].to(outputs.device)[..., None], theirs, outputs[:, at])
            if "heads" in self.want:
                self.heads[index] = self._kept(outputs)
            return (outputs.flatten(-2), *args[1:])

        return hook

    def _wrote(self, index: int, layer: nn.Module) -> Callable[..., Any]:
        scale = compat.residual_scale(layer)

        def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
            written = output[0] if isinstance(output, tuple) else output
            for patch in self.edits.writes:
                if patch.part == "attention" and index in patch.outputs:
                    written = written.clone()
                    theirs = patch.outputs[index].to(written.device, written.dtype) / scale
                    written[:, self._at(patch.slots, written.device)] = theirs
            self._writes[index] = written * scale
            if "attention" in self.want:
                self.attention[index] = self._kept(written * scale)
            return (written, *output[1:]) if isinstance(output, tuple) else written

        return hook

    def _after(self, index: int) -> Callable[..., Any]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
            hidden = output[0] if isinstance(output, tuple) else output
            before = self._reads.pop(index) + self._writes.pop(index)
            for patch in self.edits.writes:
                if patch.part == "mlp" and index in patch.outputs:
                    at = self._at(patch.slots, hidden.device)
                    hidden = hidden.clone()
                    hidden[:, at] = before[:, at] + patch.outputs[index].to(hidden.device, hidden.dtype)
            if "mlp" in self.want:
                self.mlp[index] = self._kept(hidden) - self._kept(before)
            return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

        return hook
