"""KV gradient checkpointing: compile long documents differentiably without keeping every activation.

    with kv_checkpointing(writer.network(model)):
        caches = writer.compile(model, chunks)       # keys and values carry gradients as ever

Each decoder layer is run under `torch.utils.checkpoint`: of a layer only its input, and the keys and values that it
wrote, are kept; everything between is computed again in backward. Keys and values are outputs of the checkpointed
function, so that the loss, which reads nothing else, reaches the parameters. (SemPIC, arXiv 2607.28069, KV gradient
checkpointing. There the adapter is switched on again inside the recompute; here it cannot be off, since the Reader has
none: see `operators/writer.py`.)

What this does not save: keys and values themselves, and the layers' inputs, grow with the document as before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import Cache

from kvnotes_interp import compat
from kvnotes_interp.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextmanager
def kv_checkpointing(hf: PreTrainedModel) -> Iterator[None]:
    """Checkpoint every decoder layer of `hf` in passes that start from nothing, and put all back on the way out.

    Backward may come after the block has ended. Passes without gradients run as ever. A layer whose cache already
    holds keys raises InputError: those would be read again from a cache that has grown since.
    """
    with ExitStack() as stack:
        for index, layer in enumerate(compat.layers(hf)):
            stack.enter_context(_replaced(layer, _checkpointed(layer.forward, index)))
        yield


def _checkpointed(plain: Callable[..., Any], index: int) -> Callable[..., Any]:
    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        names = [name for name, value in kwargs.items() if isinstance(value, Cache)]
        if not torch.is_grad_enabled() or not names:
            return plain(*args, **kwargs)
        # The caller's cache holds this layer's outputs: a closure over it would be a ring that is not freed.
        cache, rest = kwargs[names[0]], {name: value for name, value in kwargs.items() if name not in names}
        if seen := cache.get_seq_length(index):
            raise InputError(
                f"KV checkpointing needs a pass that starts from nothing; layer {index} already holds {seen} keys."
            )

        def again(*args: Any) -> tuple[Any, Tensor, Tensor]:
            own = compat.OneLayerCache()
            return plain(*args, **rest, **dict.fromkeys(names, own)), *own.written

        out, keys, values = checkpoint(again, *args, use_reentrant=False)
        cache.update(keys, values, index)
        return out

    return forward


@contextmanager
def _replaced(layer: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    before = layer.__dict__.get("forward")
    layer.forward = forward
    try:
        yield
    finally:
        if before is None:
            del layer.forward
        else:
            layer.forward = before


def saved_bytes(fn: Callable[[], Iterable[Tensor]], *, apart_from: Iterable[Tensor] = ()) -> int:
    """Bytes that `fn` leaves in memory for backward: all tensors saved on the way, and the tensors it returns.

    Args:
        fn: a forward pass; run once. apart_from: what is there anyway (weights).

    Tensors that share storage are counted once, at the storage's size. Not counted: what lives only for a moment, in
    forward or while a layer is recomputed, so that this is no peak.
    """
    there = {_storage(t)[0] for t in apart_from}
    found: dict[tuple[torch.device, int], int] = {}

    def keep(tensor: Tensor) -> Tensor:
        where, size = _storage(tensor)
        if where not in there:
            found[where] = size
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = [keep(tensor) for tensor in fn()]
        # Read while everything is alive: a freed address may be given out again.
        total = sum(found.values())
    del out
    return total


def _storage(tensor: Tensor) -> tuple[tuple[torch.device, int], int]:
    storage = tensor.untyped_storage()
    return (tensor.device, storage.data_ptr()), storage.nbytes()
