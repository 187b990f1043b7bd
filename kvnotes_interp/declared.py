"""What a model file declares about its rotary positions, worked out here, against what the loaded model does.

The frequencies are computed from the declared numbers alone, with formulas of this file: nothing of transformers' rope
code is called. They are compared with the cos and sin that the live rotary module gives at two positions, so that a
field which was dropped on the way, or a buffer that was changed afterwards, shows as a number. Angles are radians per
token; frequencies are float64.

What this does *not* prove: that attention uses these angles. `Model.check()` proves that with the keys themselves.

Sources: linear (Chen et al. 2023, arXiv 2306.15595), YaRN (Peng et al. 2023, arXiv 2309.00071), and the llama3 rule of
the Llama 3.1 release.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kvnotes_interp import compat
from kvnotes_interp.errors import UnsupportedError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvnotes_interp.checks import Check
    from kvnotes_interp.model import Model

NAME = "rotary angles are those declared"
LIMIT = 1e-4  # relative; float32 frequencies are within 1e-6, and bfloat16 ones are 4e-3 off
FACTORS = "frequency_factors"  # our own key in `rope_parameters`: what a GGUF file divides each frequency by
_ALWAYS = {
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "mrope_section",
    "mrope_interleaved",
    "finetuned",
}
_SCALED = _ALWAYS | {"factor", "original_max_position_embeddings"}
# rope_type -> the keys of `rope_parameters` that mean something to it (or nothing at all)
KNOWN: dict[str, set[str]] = {
    "default": _ALWAYS | {"original_max_position_embeddings"},
    "linear": _SCALED,
    "dynamic": _SCALED,
    "proportional": _SCALED,
    "llama3": _SCALED | {"low_freq_factor", "high_freq_factor"},
    "yarn": _SCALED | {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    "longrope": _SCALED | {"attention_factor", "short_factor", "long_factor", "short_mscale", "long_mscale"},
}
_FAR = 100  # a second position, at which a module that changes its frequencies with length would differ


@dataclass(frozen=True, eq=False)
class Turn:
    """How one kind of layer turns: `inv_freq` `[rotary_dim/2]` float64, and what cos and sin are multiplied by."""

    inv_freq: Tensor
    scale: float = 1.0


def turn(parameters: Mapping[str, Any], *, d_head: int, max_positions: int | None = None) -> Turn:
    """The frequencies that `parameters` (rope_type, rope_theta, factor, ...) stand for.

    Args:
        parameters: one flat set, as in `config.rope_parameters`; `frequency_factors` divides each frequency.
        d_head: width of a head; `partial_rotary_factor` of it is turned.
        max_positions: stands in for a missing `original_max_position_embeddings`.

    Raises:
        UnsupportedError: a rope_type that is not known here, or one that lacks a number.
    """
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    part = parameters.get("partial_rotary_factor")
    dim = int(d_head * (1.0 if part is None else part))
    if kind == "proportional":
        turned = int((1.0 if part is None else part) * d_head // 2)
        inv = torch.zeros(d_head // 2, dtype=torch.float64)
        inv[:turned] = _plain(parameters, d_head)[:turned]
        return Turn(inv / float(parameters.get("factor") or 1.0))
    inv, scale = _plain(parameters, dim), 1.0
    if kind == "linear":
        inv = inv / _number(parameters, "factor")
    elif kind == "llama3":
        inv = _llama3(parameters, inv, max_positions)
    elif kind == "yarn":
        inv, scale = _yarn(parameters, inv, dim, max_positions)
    elif kind != "default":
        raise UnsupportedError(f"rope_type {kind!r} is not known here, so its angles cannot be worked out")
    if (factors := parameters.get(FACTORS)) is not None:
        inv = inv / torch.tensor(factors, dtype=torch.float64)
    return Turn(inv, scale)


def declared(config: Any) -> dict[str | None, Mapping[str, Any]]:
    """The sets of rotary parameters of a text config, by layer type; under None where there is one for all."""
    found = getattr(config, "rope_parameters", None) or {}
    nested = {key: value for key, value in found.items() if isinstance(value, Mapping)}
    return {k: v for k, v in nested.items() if v} or ({None: found} if found else {})


def head_width(config: Any) -> int:
    """Width of a head, as a text config gives it."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def produced(module: nn.Module, position: int, kind: str | None) -> tuple[Tensor, Tensor]:
    """cos and sin `[rotary_dim/2]` that a rotary module gives at one position, in float64.

    Raises UnsupportedError for a module that gives something else.
    """
    buffer = next(module.buffers())
    x = torch.zeros(1, 1, 1, device=buffer.device)
    at = torch.tensor([[position]], device=buffer.device)
    takes = inspect.signature(module.forward).parameters
    options = {"layer_type": kind} if kind is not None and "layer_type" in takes else {}
    try:
        with torch.no_grad():
            pair = module(x, at, **options)
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        raise UnsupportedError(f"{type(module).__name__} does not run on one position ({error})") from error
    if not (isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(p, Tensor) for p in pair)):
        raise UnsupportedError(f"{type(module).__name__} does not give cos and sin")
    cos, sin = (p.detach().flatten().cpu().double() for p in pair)
    return _once(cos), _once(sin)


def gap(hf: PreTrainedModel, sets: Mapping[str | None, Mapping[str, Any]]) -> tuple[float, str]:
    """The largest relative difference between the live angles and those of `sets`, and what it is in words.

    Raises UnsupportedError where they cannot be compared, saying why.
    """
    config = compat.text_config(hf)
    width, longest = head_width(config), getattr(config, "max_position_embeddings", None)
    worst, about = 0.0, ""
    for module in compat.rotary_modules(hf):
        for kind, parameters in sets.items():
            if kind is not None and not hasattr(module, f"{kind}_inv_freq") and len(sets) > 1:
                continue  # a module of another kind of layer
            want = turn(parameters, d_head=width, max_positions=longest)
            found, words = _compare(module, kind, want)
            if found > worst or not about:
                worst, about = found, words + f"; declared by {_short(parameters)}"
    if not about:
        raise UnsupportedError("no rotary module was found for what the config declares")
    return worst, about


def checks(model: Model) -> list[Check]:
    """The row for `Model.check()`: the live rotary angles are those that the config declares.

    A kind of rotation that cannot be worked out here passes, and the row's detail says that it was not compared.
    """
    from kvnotes_interp.checks import Check

    sets = declared(compat.text_config(model.hf))
    try:
        if not sets:
            raise UnsupportedError("the config declares no rope_parameters")
        value, about = gap(model.hf, sets)
    except UnsupportedError as error:
        return [Check(NAME, True, 0.0, LIMIT, f"not compared: {error}")]
    buffers = [b for m in compat.rotary_modules(model.hf) for b in m.buffers(recurse=False)]
    if any(b.dtype in (torch.float16, torch.bfloat16) for b in buffers):
        about += ". The frequencies were rounded when the live model was cast: load it with dtype= instead"
    return [Check(NAME, math.isfinite(value) and value <= LIMIT, value, LIMIT, about if not value <= LIMIT else "")]


# --- formulas ------------------------------------------------------------------------------------------------------


def _plain(parameters: Mapping[str, Any], dim: int) -> Tensor:
    theta = _number(parameters, "rope_theta")
    return torch.tensor([theta ** (-2 * i / dim) for i in range((dim + 1) // 2)], dtype=torch.float64)


def _llama3(parameters: Mapping[str, Any], inv: Tensor, max_positions: int | None) -> Tensor:
    factor, low, high = (_number(parameters, k) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    original = _original(parameters, max_positions)
    out = []
    for f in inv.tolist():
        turns = original * f / (2 * math.pi)  # how often this dimension comes round within the original length
        if turns > high:
            out.append(f)
        elif turns < low:
            out.append(f / factor)
        else:
            smooth = (turns - low) / (high - low)
            out.append((1 - smooth) * f / factor + smooth * f)
    return torch.tensor(out, dtype=torch.float64)


def _yarn(parameters: Mapping[str, Any], inv: Tensor, dim: int, max_positions: int | None) -> tuple[Tensor, float]:
    theta, original = _number(parameters, "rope_theta"), _original(parameters, max_positions)
    factor = parameters.get("factor") or (max_positions or original) / original

    def dimension(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(float(parameters.get("beta_fast") or 32))
    high = dimension(float(parameters.get("beta_slow") or 1))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if high == low else high
    ramp = ((torch.arange(len(inv), dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return inv / factor * ramp + inv * (1 - ramp), yarn_scale(parameters, float(factor))


def yarn_scale(parameters: Mapping[str, Any], factor: float) -> float:
    """What YaRN multiplies cos and sin with: the given attention factor, or the one it follows from."""
    if (given := parameters.get("attention_factor")) is not None:
        return float(given)

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    up, down = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return scale(up) / scale(down) if up and down else scale(1.0)


def _original(parameters: Mapping[str, Any], max_positions: int | None) -> float:
    return float(parameters.get("original_max_position_embeddings") or max_positions or _number(parameters, "original"))


def _number(parameters: Mapping[str, Any], key: str) -> float:
    value = parameters.get(key)
    if not isinstance(value, int | float):
        raise UnsupportedError(f"rotary parameters {_short(parameters)} give no number for {key!r}")
    return float(value)


# --- the live side -------------------------------------------------------------------------------------------------


def _once(values: Tensor) -> Tensor:
    """Each frequency once: a module gives them twice over, behind one another or as neighbours."""
    half = len(values) // 2
    if len(values) % 2 == 0 and torch.equal(values[:half], values[half:]):
        return values[:half]
    if len(values) % 2 == 0 and torch.equal(values[0::2], values[1::2]):
        return values[0::2]
    return values


def _compare(module: nn.Module, kind: str | None, want: Turn) -> tuple[float, str]:
    where = f"{kind} layers" if kind else "the rotary module"
    cos, sin = produced(module, 1, kind)
    if len(cos) != len(want.inv_freq):
        words = f"{where}: {2 * len(cos)} dimensions of a head are turned, and {2 * len(want.inv_freq)} are declared"
        return math.inf, words
    live, scale = torch.atan2(sin, cos), float(torch.hypot(cos, sin).mean())
    gaps = (live - want.inv_freq).abs() / want.inv_freq.abs().clamp_min(1e-9)
    at = int(gaps.argmax())
    found = (
        float(gaps[at]),
        (
            f"{where}: pair {at} turns by {float(live[at]):.6g} per token (inv_freq of the live model), and "
            f"{float(want.inv_freq[at]):.6g} is declared"
        ),
    )
    off = abs(scale / want.scale - 1)
    if off > found[0]:
        found = off, f"{where}: cos and sin are multiplied by {scale:.6g}, and {want.scale:.6g} is declared"
    far = produced(module, _FAR, kind)
    angle = live * _FAR
    drift = max(float((far[0] - scale * angle.cos()).abs().max()), float((far[1] - scale * angle.sin()).abs().max()))
    if drift > max(found[0], LIMIT):
        found = drift, f"{where}: the angle at position {_FAR} is not {_FAR} times that at position 1"
    return found


def _short(parameters: Mapping[str, Any]) -> str:
    shown = {k: (f"{len(v)} numbers" if isinstance(v, list) else v) for k, v in parameters.items()}
    return "rope_parameters " + ", ".join(f"{k}={v}" for k, v in shown.items())
