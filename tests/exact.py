"""Makes a float64 model compute in float64 where transformers would drop to float32 on the way.

Only float64 (and, in rotary modules, integer) inputs are affected, so that a float32 model in the same process runs as
ever. The package under test is never run under this mode: it wraps transformers' own functions and leaf modules.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

# Functions of a modeling file that cast to float32 inside: softmax in eager attention, Cohere's rotation.
_FUNCTIONS = ("eager_attention_forward", "apply_rotary_pos_emb", "_apply_rotary_emb")


class _Exact(TorchFunctionMode):
    """Turns "to float32" into "to float64" for float64 and integer tensors; a float32 tensor stays what it is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        x = args[0] if args and isinstance(args[0], Tensor) else kwargs.get("input")
        if isinstance(x, Tensor) and (x.dtype == torch.float64 or x.dtype == torch.int64):
            if func is Tensor.float:
                return x.double()
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in kwargs.items()}
        return func(*args, **kwargs)


def _under_mode(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _Exact():
            return function(*args, **kwargs)

    run.is_exact = True  # type: ignore[attr-defined]
    return run


def _attends(module: nn.Module) -> bool:
    return any(hasattr(m, "layer_idx") or isinstance(m, nn.ModuleList) for m in module.modules())


def make_exact(model: PreTrainedModel) -> None:
    """Lift norms, rotary angles, routers and eager attention of this model to float64, in place."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.dtype == torch.float32:  # the float32 values, held as float64
                module.register_buffer(name, buffer.double(), persistent=name not in module._non_persistent_buffers_set)
        source = type(module).__module__
        if not source.startswith("transformers."):
            continue
        for name in _FUNCTIONS:
            function = getattr(sys.modules[source], name, None)
            if function is not None and not hasattr(function, "is_exact"):
                setattr(sys.modules[source], name, _under_mode(function))
        if not _attends(module):
            module.forward = _under_mode(module.forward)
