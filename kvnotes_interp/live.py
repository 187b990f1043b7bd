"""What must hold of a live model in every pass, since a user can change it between two.

Checked when a model is loaded and again before each forward pass: it is in eval mode (dropout would make every number
random), and nothing of it is compiled, traced or scripted (hooks and a registered attention function are then left out
without a word).
"""

from __future__ import annotations

import torch
from torch import nn

from kvnotes_interp.errors import UnsupportedError

# Modules of torch that do the same in both modes, and so may be new in a model that was loaded before.
_STEADY = tuple(f"torch.nn.modules.{part}" for part in ("activation", "container", "linear", "normalization", "sparse"))


def require(hf: nn.Module) -> None:
    """Raise UnsupportedError, naming the module and what to do, where a pass could not be trusted."""
    stack = [hf]
    while stack:  # without names, which are made where they are needed: this runs before every pass
        module = stack.pop()
        about = module.__dict__
        if about.get("training") and not _is_steady(module):
            _refuse(hf, module, "is in training mode: dropout would make every number random. Call model.hf.eval()")
        if about.get("_compiled_call_impl") is not None or _is_compiled(module, about):
            _refuse(
                hf,
                module,
                "is compiled, traced or scripted, and what is compiled runs past hooks and past the attention function "
                "that edits and records. Use the model as it was before torch.compile, or load it again",
            )
        stack += [part for part in about["_modules"].values() if part is not None]


def require_dtype(hf: nn.Module) -> None:
    """Raise UnsupportedError under torch.autocast: numbers would be of another dtype than the one that is recorded."""
    device = next(hf.parameters()).device.type
    if torch.is_autocast_enabled(device):
        raise UnsupportedError(
            f"torch.autocast is on: {type(hf).__name__} would compute in {torch.get_autocast_dtype(device)} "
            "and be recorded in the dtype of its weights. Leave the autocast context, or load the model in that dtype."
        )


def _is_steady(module: nn.Module) -> bool:
    """Whether training mode changes nothing in this module itself: what an adapter adds comes in training mode."""
    kind = type(module)
    if isinstance(module, nn.Dropout):
        return module.p == 0
    return kind.__module__ in _STEADY or kind.__module__.startswith("peft.")


def _is_compiled(module: nn.Module, about: dict[str, object]) -> bool:
    own = about.get("forward")
    return (
        isinstance(module, torch.jit.ScriptModule | torch.fx.GraphModule)
        or type(module).__name__ == "OptimizedModule"
        or (own is not None and hasattr(own, "_torchdynamo_orig_callable"))
        or hasattr(type(module).forward, "_torchdynamo_orig_callable")
    )


def _refuse(hf: nn.Module, module: nn.Module, why: str) -> None:
    name = next((name for name, part in hf.named_modules() if part is module), "")
    here = f"{type(hf).__name__}: " + (f"{name} ({type(module).__name__})" if module is not hf else "the model")
    raise UnsupportedError(f"{here} {why}.")
