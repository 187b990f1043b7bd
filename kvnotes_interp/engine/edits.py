"""How a pass is interfered with, as values, and what is refused before anything runs.

A slot, layer or head that does not exist, a shape that would be stretched to fit, a patch that another one overwrites:
each would leave part of an edit undone without a word, so each is an InputError that names it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvnotes_interp.attention_plan import Cut
from kvnotes_interp.errors import InputError, whole_numbers

if TYPE_CHECKING:
    from kvnotes_interp.registry import ModelShape


@dataclass(frozen=True)
class HeadPatch:
    """Outputs of heads, as the output projection reads them, replaced at some slots.

    Per layer: `outputs` `[batch query head d_head]` and `take` `[batch query head]`, which says whose output is
    replaced; a batch of 1 stands for all rows. Layers that are not named stay as they are.
    """

    queries: tuple[int, ...]
    outputs: Mapping[int, Float[Tensor, "batch query head d_head"]]
    take: Mapping[int, Bool[Tensor, "batch query head"]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "queries", whole_numbers("heads.queries", self.queries))
        object.__setattr__(self, "outputs", _by_layer("heads.outputs", self.outputs))
        object.__setattr__(self, "take", _by_layer("heads.take", self.take))


@dataclass(frozen=True)
class ResidualPatch:
    """Vectors added to the residual stream where a layer reads it; index n_layers: behind the last layer.

    `add` per layer `[batch slot d_model]`; a batch of 1 stands for all rows.
    """

    slots: tuple[int, ...]
    add: Mapping[int, Float[Tensor, "batch slot d_model"]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "slots", whole_numbers("residual.slots", self.slots))
        object.__setattr__(self, "add", _by_layer("residual.add", self.add))


@dataclass(frozen=True)
class WritePatch:
    """What the attention or the MLP of a layer adds to the residual stream, replaced at some slots.

    `outputs` per layer `[batch slot d_model]`, as `Captured.attention` and `Captured.mlp` hold it.
    """

    part: Literal["attention", "mlp"]
    slots: tuple[int, ...]
    outputs: Mapping[int, Float[Tensor, "batch slot d_model"]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "slots", whole_numbers("writes.slots", self.slots))
        object.__setattr__(self, "outputs", _by_layer("writes.outputs", self.outputs))


@dataclass(frozen=True)
class Edits:
    """How a pass is interfered with. `cuts` is one list for all rows of the batch, or one list per row.

    In a layer, vectors are added first, then head outputs are replaced, then the attention's writes, then the MLP's.
    """

    cuts: Sequence[Cut] | Sequence[Sequence[Cut]] = ()
    heads: HeadPatch | None = None
    residual: ResidualPatch | None = None
    writes: Sequence[WritePatch] = ()

    def __post_init__(self) -> None:
        for name, kind in (("cuts", Cut), ("writes", WritePatch)):
            value = getattr(self, name)
            if isinstance(value, kind):
                raise InputError(f"edits.{name} is one {kind.__name__}; give a list of them.")
            listed = tuple(row if isinstance(row, kind) or name == "writes" else tuple(row) for row in value)
            if len({isinstance(row, kind) for row in listed}) > 1:
                raise InputError(f"edits.{name} mixes {kind.__name__}s and lists of them; give one or the other.")
            object.__setattr__(self, name, listed)

    @property
    def rows(self) -> tuple[tuple[Cut, ...], ...]:
        """The cuts as one tuple for all rows, or one per row; empty without cuts."""
        if not self.cuts:
            return ()
        return (self.cuts,) if isinstance(self.cuts[0], Cut) else self.cuts  # type: ignore[return-value]


def _by_layer(name: str, given: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """The mapping with plain ints for layers. Raises InputError for another key, or for what is no real tensor."""
    found = dict(zip(whole_numbers(name, list(given)), given.values(), strict=True))
    for layer, tensor in found.items():
        if not isinstance(tensor, Tensor) or tensor.is_complex():
            what = f"{tensor.dtype}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise InputError(f"{name}[{layer}] is {what}; give a tensor of real numbers.")
    return found


def check(edits: Edits, shape: ModelShape, new: range, batch: int) -> None:
    """Raise InputError, naming the field and its value, unless all of `edits` can be applied.

    `new` are the slots of the new tokens, behind those of the cache.
    """
    _check_cuts(edits.rows, shape, new, batch)
    if edits.heads is not None:
        heads, take = edits.heads, edits.heads.take
        if set(heads.outputs) != set(take):
            odd = min(set(heads.outputs) ^ set(take))
            raise InputError(f"heads names layer {odd} in only one of outputs and take; give both for every layer.")
        check_slots("heads.queries", heads.queries, new)
        for layer, outputs in heads.outputs.items():
            _check_index("heads.outputs", "layer", layer, shape.n_layers)
            size = (len(heads.queries), shape.n_heads)
            _check_shape(f"heads.outputs[{layer}]", outputs, batch, size, "query head d_head")
            _check_shape(f"heads.take[{layer}]", take[layer], batch, size, "query head")
            if take[layer].dtype != torch.bool:
                raise InputError(f"heads.take[{layer}] is {take[layer].dtype}; give True where a head is replaced.")
    if edits.residual is not None:
        check_slots("residual.slots", edits.residual.slots, new)
        for layer, add in edits.residual.add.items():
            _check_index("residual.add", "layer", layer, shape.n_layers + 1)
            _check_shape(
                f"residual.add[{layer}]", add, batch, (len(edits.residual.slots), shape.d_model), "slot d_model"
            )
    taken: set[tuple[str, int, int]] = set()
    for patch in edits.writes:
        if patch.part not in ("attention", "mlp"):
            raise InputError(f'writes.part={patch.part!r}: choose "attention" or "mlp".')
        check_slots("writes.slots", patch.slots, new)
        for layer, outputs in patch.outputs.items():
            _check_index("writes.outputs", "layer", layer, shape.n_layers)
            _check_shape(f"writes.outputs[{layer}]", outputs, batch, (len(patch.slots), shape.d_model), "slot d_model")
            here = {(patch.part, layer, slot) for slot in patch.slots}
            if both := taken & here:
                part, where, slot = min(both)
                raise InputError(f"two writes replace the {part} of layer {where} at slot {slot}; keep one of them.")
            taken |= here


def check_slots(name: str, slots: Sequence[int], new: range) -> None:
    """Raise InputError unless these are different slots among the new tokens."""
    bad = [s for s in slots if s not in new]
    if bad:
        raise InputError(f"{name} holds {bad[0]}; the new tokens stand at slots {new.start} to {new.stop - 1}.")
    if len(set(slots)) < len(slots):
        raise InputError(f"{name} names a slot twice: {tuple(slots)}.")


def _check_cuts(rows: Sequence[Sequence[Any]], shape: ModelShape, new: range, batch: int) -> None:
    if len(rows) not in (0, 1, batch):
        raise InputError(f"{len(rows)} lists of cuts for a batch of {batch}: give one for all rows, or one per row.")
    for cut in (cut for row in rows for cut in row):
        for key in cut.keys:
            if not 0 <= key < new.stop:
                raise InputError(f"cuts.keys holds {key}; the sequence has slots 0 to {new.stop - 1}.")
        for what, values, size in (("layer", cut.layers, shape.n_layers), ("head", cut.heads, shape.n_heads)):
            for value in values or ():
                _check_index(f"cuts.{what}s", what, value, size)
        if cut.queries is not None:
            check_slots("cuts.queries", tuple(dict.fromkeys(cut.queries)), new)
        queries = new if cut.queries is None else cut.queries
        unseen = [key for key in cut.keys if queries and key > max(queries)]
        if unseen:
            raise InputError(
                f"a cut of key {unseen[0]} from queries {tuple(queries)} cuts nothing: no query sees what comes later."
            )


def _check_index(name: str, what: str, value: int, size: int) -> None:
    if not 0 <= value < size:
        raise InputError(f"{name} holds {what} {value}; there are {what}s 0 to {size - 1}.")


def _check_shape(name: str, tensor: Tensor, batch: int, inner: tuple[int, ...], axes: str) -> None:
    ndim = len(axes.split()) + 1
    if tensor.ndim != ndim or tensor.shape[0] not in (1, batch) or tuple(tensor.shape[1 : 1 + len(inner)]) != inner:
        raise InputError(
            f"{name} has shape {tuple(tensor.shape)}; expected [batch {axes}], a batch of 1 or {batch}, then "
            f"{' x '.join(map(str, inner))}."
        )
