"""Direct logit attribution: the score of a decision as a sum over what each part wrote to the residual stream.

The final residual is the embedding plus what every attention head and every MLP added to it. The final norm is not
linear, but with its scale held at the value it had in this run it is, and the score `logit[new] - logit[old]` becomes a
sum of one number per part. The sum is exact: `parts` proves it against the run's own score. A norm behind the output
projection (Gemma 2 and 3, OLMo 2 and 3, GLM 4) is held in the same way.

What this does not prove: that a head *causes* its part of the score. A head that only moves what later heads read has
no direct part, and the scale that is held would have moved. Hence the patches in `read_heads.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kvnotes_interp import compat, engine
from kvnotes_interp.engine import Captured
from kvnotes_interp.errors import ControlError

if TYPE_CHECKING:
    from kvnotes_interp.model import Model

WANT = ("residual", "attention", "mlp", "heads")


def record(found: Tensor | None) -> Tensor:
    """A record that was asked for."""
    assert found is not None, "this was not among the records wanted"
    return found


@dataclass(frozen=True)
class Held:
    """A norm with its scale held: `whole(x) = scale * gain * (x - mean of x, where it centres) + bias`.

    A part of `x` is turned by the same linear map without the bias; parts and bias sum to what the norm gave.
    """

    gain: Float[Tensor, " d_model"]
    scale: Float[Tensor, "rows 1"]
    centred: bool
    bias: Float[Tensor, " d_model"]
    gap: float

    def __call__(self, part: Float[Tensor, "*parts rows d_model"]) -> Float[Tensor, "*parts rows d_model"]:
        """What this part of the input became; leading axes are free."""
        if self.centred:
            part = part - part.mean(-1, keepdim=True)
        return self.scale * self.gain * part


def hold(module: nn.Module | None, x: Float[Tensor, "rows d_model"], y: Float[Tensor, "rows d_model"]) -> Held:
    """The linear map that took `x` to `y`; `module` is the norm between them, None where there is none.

    Families spell their norms differently (a gain of w or 1 + w, centred or not, with or without a bias). Rather than
    trusting a name, each form is tried on the run's own numbers and the one that reproduces `y` is kept; `gap` is the
    largest miss over the largest entry of `y`. One scale per row is fitted to d_model numbers, so a wrong form shows.
    """
    weight = getattr(module, "weight", None)
    ones = x.new_ones(x.shape[-1])
    gains = [ones] if weight is None else [weight.to("cpu", x.dtype), 1 + weight.to("cpu", x.dtype)]
    bias = getattr(module, "bias", None)
    bias = x.new_zeros(x.shape[-1]) if bias is None else bias.to("cpu", x.dtype)
    found: list[Held] = []
    for gain in gains:
        for centred in (False, True):
            shape = gain * (x - x.mean(-1, keepdim=True) if centred else x)
            norm = (shape * shape).sum(-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
            scale = (shape * (y - bias)).sum(-1, keepdim=True) / norm
            gap = (scale * shape + bias - y).abs().max() / y.abs().max().clamp_min(torch.finfo(x.dtype).tiny)
            found.append(Held(gain, scale, centred, bias, float(gap)))
    return min(found, key=lambda held: held.gap)


@dataclass(frozen=True)
class Parts:
    """The score of one decision, taken apart; in logits, before a final soft-cap.

    Attributes:
        heads: what each head adds. mlps: each MLP. embedding: the token itself.
        rest: biases of output projections and norms, and of the unembedding.
        score: the run's own score, which the others sum to.
    """

    heads: Float[Tensor, "layer head"]
    mlps: Float[Tensor, " layer"]
    embedding: float
    rest: float
    score: float

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return float(self.heads.sum() + self.mlps.sum()) + self.embedding + self.rest

    @property
    def weight(self) -> float:
        """Sum of the parts' sizes: what rounding errors are measured against."""
        return float(self.heads.abs().sum() + self.mlps.abs().sum()) + abs(self.embedding) + abs(self.rest)


def answer_direction(model: Model, answers: tuple[int, int]) -> tuple[Float[Tensor, " d_model"], float]:
    """`(w, b)` such that `logit[new] - logit[old] = w @ hidden + b`, before a final soft-cap.

    The derivative of the model's own unembedding at 0, where a soft-cap has slope 1; so every scaling of the logits is
    in it, whatever a family calls it.
    """
    dtype = torch.promote_types(model.dtype, torch.float32)
    hidden = torch.zeros(1, model.shape.d_model, dtype=dtype, device=model.device, requires_grad=True)
    with torch.enable_grad():
        logits = compat.unembed(model.hf, hidden, torch.tensor(answers))[0]
        score = logits[1] - logits[0]
        (slope,) = torch.autograd.grad(score, hidden)
    return slope[0].cpu(), float(score.detach())


def parts(model: Model, captured: Captured, answers: tuple[int, int]) -> Parts:
    """Take apart the score of the last new token of `captured`, of which it holds `WANT` (batch 1).

    Raises ControlError, naming the layer and the gap, where a part of the sum does not come out: heads do not sum to
    what attention added, a norm has an unknown form, or the whole misses the run's own score.
    """
    limit = _limit(model)
    residual, mlp = record(captured.residual), record(captured.mlp)
    hidden = captured.hidden[:, -1].to("cpu", residual.dtype)
    final = hold(compat.final_norm(model.hf), residual[-1, :, 0], hidden)
    if not final.gap <= limit:
        raise ControlError(
            f"the final norm of {model.name} ({type(compat.final_norm(model.hf)).__name__}) is not linear at a held "
            f"scale: off by {final.gap:.2g} of its output, limit {limit:.2g}. Its score cannot be attributed."
        )
    slope, offset = answer_direction(model, answers)
    slope = slope.to(hidden.dtype)

    def read(written: Tensor) -> Tensor:
        return final(written) @ slope

    attention = [attention_parts(model, captured, layer) for layer in range(model.shape.n_layers)]
    found = Parts(
        heads=torch.stack([read(by_head[:, 0]) for by_head, _ in attention]),
        mlps=read(mlp[:, 0]),
        embedding=float(read(residual[0, 0])),
        rest=sum(float(read(bias)) for _, bias in attention) + float(final.bias @ slope) + offset,
        score=float(hidden[0] @ slope) + offset,
    )
    tolerance = min(64 * torch.finfo(model.dtype).eps, 0.05) * max(1.0, found.weight)
    if not abs(found.total - found.score) <= tolerance:
        raise ControlError(
            f"the parts of a score on {model.name} ({model.dtype}) sum to {found.total:.4g}, not to {found.score:.4g}: "
            f"off by {abs(found.total - found.score):.2g}, tolerance {tolerance:.2g}. Something writes to its residual "
            "stream that is neither a head nor an MLP."
        )
    return found


def attention_parts(
    model: Model, captured: Captured, layer: int
) -> tuple[Float[Tensor, "head slot d_model"], Float[Tensor, "slot d_model"]]:
    """What each head of a layer added to the residual stream at the captured slots (batch 1), and what biases added.

    Behind a sandwich norm: its linear form at the held scale of each slot. The two sum to `captured.attention[layer]`;
    raises ControlError where they do not.
    """
    added, heads = record(captured.attention)[layer, 0], record(captured.heads)[layer, 0]
    module = compat.layers(model.hf)[layer]
    writes = engine.head_writes(model, layer, heads).transpose(0, 1)  # [head slot d_model]
    bias = compat.output_projection(module).bias
    scale = compat.residual_scale(module)
    shift = writes.new_zeros(writes.shape[-1]) if bias is None else bias.to("cpu", writes.dtype) * scale
    norm = compat.attention_write(module)
    held = hold(None if norm is compat.attention_module(module) else norm, writes.sum(0) + shift, added)
    limit = _limit(model)
    if not held.gap <= limit:
        raise ControlError(
            f"layer {layer} of {model.name}: its heads sum to something else than its attention adds, off by "
            f"{held.gap:.2g} of the largest entry, limit {limit:.2g}. Its heads cannot be told apart."
        )
    return held(writes), held(shift.expand_as(writes[0])) + held.bias


def _limit(model: Model) -> float:
    """How far a linear form may miss, relative to the largest entry: rounding of the dtype, never more than a tenth."""
    return max(256 * torch.finfo(torch.float32).eps, min(256 * torch.finfo(model.dtype).eps, 0.1))
