"""Whether the weights of a loaded model are plain floating-point numbers, found by looking at the modules.

A config need not say that a model is quantised: torchao swaps the tensors, torch.ao and bitsandbytes swap the modules,
and a user's own code may do either. Caches of such models are refused, because their rounding differs between batch
shapes and because the code that reads weights would read packed numbers. An adapter (LoRA) over float weights is no
such thing.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from kvnotes_interp.errors import UnsupportedError

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
ADVICE = "Load the model in float32, bfloat16 or float16, without quantisation."
# Where the modules of quantisation libraries live; the base classes of a module count too.
_LIBRARIES = (
    "torch.ao",
    "torch.nn.quantized",
    "torch.nn.intrinsic",
    "torch.nn.qat",
    "torchao",
    "bitsandbytes",
    "quanto",
    "optimum.quanto",
    "auto_gptq",
    "gptqmodel",
    "auto_round",
    "awq",
    "autoawq",
    "hqq",
    "aqlm",
    "eetq",
    "vptq",
    "spqr_quant",
    "flute",
    "fbgemm_gpu",
    "compressed_tensors",
    "quark",
    "llmcompressor",
    "transformer_engine",
    "transformers.integrations",
    "transformers.quantizers",
    "peft.tuners.lora.bnb",
    "peft.tuners.lora.gptq",
    "peft.tuners.lora.awq",
    "peft.tuners.lora.aqlm",
    "peft.tuners.lora.hqq",
    "peft.tuners.lora.eetq",
    "peft.tuners.lora.torchao",
    "peft.tuners.lora.inc",
)
_NOT_QUANTISED = ("transformers.integrations.moe", "transformers.integrations.hub_kernels", "torch.ao.nn.sparse")
# What families call the modules that multiply by one matrix.
_MATRICES = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "query_key_value", "dense", "out_proj", "c_proj", "c_attn"),
    *("gate_proj", "up_proj", "down_proj", "gate_up_proj", "fc1", "fc2", "c_fc", "dense_h_to_4h", "dense_4h_to_h"),
    *("lm_head", "embed_out", "embed_tokens", "embed_in"),
)
_PACKED = ("qweight", "qzeros", "weight_packed", "packed_weight", "_packed_params", "W_q", "codes", "codebooks")


def refuse_quantised(model: nn.Module, name: str = "") -> None:
    """Raise UnsupportedError, naming module, type and what to do, unless every weight is a plain float tensor."""
    found = next(quantised(model), None)
    if found is not None:
        raise UnsupportedError(
            f"{name or type(model).__name__} is quantised or packed: {found}. Caches of such models are not supported, "
            f"as their rounding differs between batch shapes. {ADVICE}"
        )


def quantised(model: nn.Module) -> Iterator[str]:
    """What in this model is not a plain floating-point weight, in words, one at a time."""
    for path, module in model.named_modules():
        where = path or type(model).__name__
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        library = _library(module)
        if library:
            yield f"module {where} is a {kind}, of {library}"
        for name, parameter in module.named_parameters(recurse=False):
            yield from _tensor(f"{where}.{name}", parameter)
        for name, buffer in module.named_buffers(recurse=False):
            if type(buffer) not in (Tensor, nn.Buffer) and type(buffer.data) is not Tensor:
                yield f"buffer {where}.{name} is a {_type(buffer)}"
            elif buffer.ndim >= 2 and _packed(buffer.dtype) and any(n in name for n in ("weight", *_PACKED)):
                yield f"buffer {where}.{name} of {kind} holds {str(buffer.dtype).removeprefix('torch.')} numbers"
        if path.rsplit(".", 1)[-1] in _MATRICES and not _own_weight(module):
            yield f"module {where} is a {kind} without a floating-point weight"


def _tensor(where: str, tensor: Tensor) -> Iterator[str]:
    if type(tensor) not in (nn.Parameter, Tensor) or type(tensor.data) is not Tensor:
        yield f"weight {where} is a {_type(tensor)}, not a plain tensor"
    elif tensor.is_quantized or tensor.layout is not torch.strided or tensor.dtype not in FLOATS:
        yield f"weight {where} holds {str(tensor.dtype).removeprefix('torch.')} numbers"


def _type(tensor: Tensor) -> str:
    kind = type(tensor) if type(tensor) not in (nn.Parameter, Tensor, nn.Buffer) else type(tensor.data)
    return f"{kind.__module__}.{kind.__qualname__}"


def _packed(dtype: torch.dtype) -> bool:
    return dtype not in FLOATS and dtype is not torch.bool


def _library(module: nn.Module) -> str:
    for base in type(module).__mro__:
        if base is nn.Module:
            return ""
        home = base.__module__
        inside = next((lib for lib in _LIBRARIES if home == lib or home.startswith(lib + ".")), "")
        if inside and not home.startswith(_NOT_QUANTISED):
            return inside
    return ""


def _own_weight(module: nn.Module) -> bool:
    """Whether a module that multiplies by one matrix has it as a floating-point tensor, its own or its base layer's."""
    if isinstance(base := getattr(module, "base_layer", None), nn.Module):
        return _own_weight(base)
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dtype in FLOATS
