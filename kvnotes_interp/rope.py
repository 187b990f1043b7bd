"""Rotary geometry, read from the live model, and the rotation that moves a cached key to another position.

A cached key is `R(p) k`: the key of its hidden state, turned by its position p. Moving it to p + d is one more turn by
d times the model's own inverse frequencies. The turn is computed with unit cos/sin, never with the model's rotary
module, which for yarn multiplies by an attention factor that the cached key already carries. Angles are taken in
float64, the turn in at least float32, and the result is cast once. (Notes, arXiv 2606.17107, composition.)

What this does *not* prove: a moved key equals the re-prefilled one only if the hidden state it came from is the same,
which holds when a whole prefix moves together and not when it is put behind other text.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from kvnotes_interp import compat
from kvnotes_interp.errors import InputError, UnsupportedError


@dataclass(frozen=True, eq=False)
class LayerRope:
    """How one layer turns its keys. `inv_freq` `[rotary_dim/2]` is None in a layer without rotary positions."""

    inv_freq: Tensor | None
    interleaved: bool = False

    @property
    def rotary_dim(self) -> int:
        """How many leading dimensions of a head are turned."""
        return 0 if self.inv_freq is None else 2 * self.inv_freq.numel()


@dataclass(frozen=True, eq=False)
class RopeGeometry:
    """The rotary geometry of every layer of a model."""

    layers: tuple[LayerRope, ...]

    def same_as(self, other: RopeGeometry) -> bool:
        """True when a key of one may stand in a cache of the other."""

        def equal(a: LayerRope, b: LayerRope) -> bool:
            if a.inv_freq is None or b.inv_freq is None:
                return a.inv_freq is b.inv_freq
            return a.interleaved == b.interleaved and torch.equal(a.inv_freq, b.inv_freq)

        return len(self.layers) == len(other.layers) and all(
            equal(a, b) for a, b in zip(self.layers, other.layers, strict=True)
        )


def rotate(
    keys: Float[Tensor, "*lead pos d_head"], delta: Int[Tensor, "*head pos"] | int, layer: LayerRope
) -> Float[Tensor, "*lead pos d_head"]:
    """Turn each key by `delta` positions (positive: later), the same in every head or `[kv_head pos]`.

    Returns `keys` itself when there is nothing to turn.
    """
    if layer.inv_freq is None:
        return keys
    steps = torch.atleast_1d(torch.as_tensor(delta)).cpu()  # on the CPU: not every device has float64
    if not bool(steps.any()):
        return keys
    if layer.rotary_dim > keys.shape[-1]:
        raise InputError(f"rotary_dim {layer.rotary_dim} is larger than d_head {keys.shape[-1]} of these keys.")
    dtype = torch.promote_types(keys.dtype, torch.float32)
    angle = steps.double()[..., None] * layer.inv_freq.cpu().double()  # [*head pos rotary_dim/2]
    cos, sin = angle.cos().to(dtype).to(keys.device), angle.sin().to(dtype).to(keys.device)
    turned = keys[..., : layer.rotary_dim].to(dtype)
    if layer.interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = turned.chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((turned.to(keys.dtype), keys[..., layer.rotary_dim :]), dim=-1)


def read_geometry(hf: PreTrainedModel) -> RopeGeometry:
    """Read the geometry from the live model: its buffers, its `rotate_half`, and four tokens run at two places.

    The run tells which layers turn no keys at all, which families mark in ways of their own. The reading is a claim;
    `Model.check()` proves it on a longer prompt, far away. Raises UnsupportedError for a model without rotary keys, or
    one whose rotation is neither half-split nor interleaved.
    """
    modules = compat.rotary_modules(hf)
    if not modules:
        raise UnsupportedError(
            f"{type(hf).__name__} holds no rotary inverse frequencies; models with learned, ALiBi or no positions "
            "cannot have their keys moved."
        )
    interleaved, sign = _convention(hf)
    kinds = getattr(compat.text_config(hf), "layer_types", None) or []
    here, there = _keys_at(hf, 0), _keys_at(hf, 1)
    out = []
    for index, (a, b) in enumerate(zip(here, there, strict=True)):
        kind = kinds[index] if index < len(kinds) else "full_attention"
        turning = LayerRope(sign * _inv_freq(hf, modules, kind), interleaved)
        still = (b - a).norm() < (b - rotate(a, 1, turning)).norm()
        out.append(LayerRope(None, interleaved) if bool(still) else turning)
    return RopeGeometry(tuple(out))


@torch.no_grad()
def _keys_at(hf: PreTrainedModel, start: int) -> list[Tensor]:
    cache = compat.new_cache()
    ids = torch.arange(3, 7, device=hf.device)[None]
    compat.forward(hf, ids, cache, torch.arange(start, start + 4))
    return [key.float() for key in compat.read_cache(cache)[0]]


def _inv_freq(hf: PreTrainedModel, modules: list[torch.nn.Module], kind: str) -> Tensor:
    for module in modules:
        for name in (f"{kind}_inv_freq", "inv_freq"):
            found = getattr(module, name, None)
            if isinstance(found, Tensor):
                return found.detach().float().cpu().clone()
    raise UnsupportedError(f"{type(hf).__name__}: no inverse frequencies for a layer of type {kind!r}.")


def _convention(hf: PreTrainedModel) -> tuple[bool, float]:
    """Which dimensions a rotation pairs (True: neighbours), and its sense (-1: clockwise, as in NanoChat)."""
    function = compat.modeling_function(hf, "rotate_half")
    if function is None:
        raise UnsupportedError(f"{type(hf).__name__}: its file defines no rotate_half, so its rotation is unknown.")
    turned = function(torch.arange(1.0, 5.0)[None, None, None])[0, 0, 0].tolist()
    known = {
        (-3.0, -4.0, 1.0, 2.0): (False, 1.0),
        (-2.0, 1.0, -4.0, 3.0): (True, 1.0),
        (3.0, 4.0, -1.0, -2.0): (False, -1.0),
    }
    if tuple(turned) not in known:
        raise UnsupportedError(f"{type(hf).__name__}: rotate_half is neither half-split nor interleaved ({turned}).")
    return known[tuple(turned)]
