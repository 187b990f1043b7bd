"""The two weight edits of weight_edits.py: LoRA on one decision, and a rank-one update in the manner of ROME.

Both are context managers: the model is edited inside and put back on the way out. `check_restored` proves it.
Sources: LoRA by PEFT; ROME: Meng et al., arXiv 2202.05262. Unlike ROME, the key is that of the one prompt, not a mean
over prefixes, nothing holds the subject's other facts in place, and the second moment is regularised by a ridge because
it is taken over few tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from kvnotes_interp import compat
from kvnotes_interp.errors import ControlError, UnsupportedError
from kvnotes_interp.model import Model
from kvnotes_interp.tasks import EncodedPair


def bits(hf: nn.Module) -> dict[str, Tensor]:
    """A copy of every weight and buffer."""
    return {name: tensor.detach().clone() for name, tensor in hf.state_dict().items()}


def check_restored(hf: nn.Module, before: dict[str, Tensor]) -> None:
    """Raise ControlError unless every weight and buffer is what it was, bit for bit, and no other is there."""
    now = hf.state_dict()
    if now.keys() != before.keys():
        raise ControlError(f"the model has other weights than before: {sorted(now.keys() ^ before.keys())[:4]}.")
    for name, tensor in before.items():
        if not torch.equal(now[name].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)):
            raise ControlError(f"the weights {name} were not put back as they were.")


@dataclass(frozen=True)
class Trained:
    """Settings of LoRA. `enough`: it stops when the new answer has this probability."""

    rank: int = 8
    alpha: int = 16
    targets: tuple[str, ...] = ("q_proj", "v_proj", "down_proj")
    lr: float = 1e-3
    steps: int = 20
    enough: float = 0.95
    seed: int = 0


@contextmanager
def lora(model: Model, pair: EncodedPair, plan: Trained = Trained()) -> Iterator[tuple[int, Any]]:
    """LoRA trained on the one decision; yields (steps, the PEFT model) and takes the adapter out again.

    `with peft_model.disable_adapter():` inside is the untouched model.
    """
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=plan.rank, lora_alpha=plan.alpha, lora_dropout=0.0, target_modules=list(plan.targets), bias="none"
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(plan.seed)
        wrapped: Any = get_peft_model(model.hf, config)
    try:
        weights = [p for p in wrapped.parameters() if p.requires_grad]
        optimiser = torch.optim.AdamW(weights, lr=plan.lr, weight_decay=0.0)
        step = 0
        for step in range(1, plan.steps + 1):
            loss = -_log_p(model, pair)
            if float(loss.detach().neg().exp()) >= plan.enough:
                step -= 1
                break
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        yield step, wrapped
    finally:
        wrapped.unload()
        model.hf.__dict__.pop("peft_config", None)
        model.hf.requires_grad_(False)


def _log_p(model: Model, pair: EncodedPair) -> Tensor:
    """Log probability of the new answer after the old prompt, with gradients."""
    ids = torch.tensor([pair.old_ids], device=model.device)
    logits = model.hf(input_ids=ids, use_cache=False).logits[0, -1].float()
    return -cross_entropy(logits[None], torch.tensor([pair.answer_new_id], device=model.device))


def down_projection(model: Model, layer: int) -> nn.Linear:
    """The MLP's last projection. Raises UnsupportedError where it is not an unbiased `mlp.down_proj`."""
    found = getattr(getattr(compat.layers(model.hf)[layer], "mlp", None), "down_proj", None)
    if not isinstance(found, nn.Linear) or found.bias is not None:
        raise UnsupportedError(f"layer {layer} of {model.name} has no unbiased mlp.down_proj, which ROME rewrites.")
    return found


@contextmanager
def _inputs(modules: dict[int, nn.Linear]) -> Iterator[dict[int, Tensor]]:
    """Inputs of these modules in the last forward pass, by layer."""
    seen: dict[int, Tensor] = {}

    def keep(layer: int) -> Callable[..., None]:
        return lambda module, given: seen.__setitem__(layer, given[0].detach())

    handles = [module.register_forward_pre_hook(keep(layer)) for layer, module in modules.items()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def second_moments(model: Model, texts: Sequence[Sequence[int]], layers: Sequence[int]) -> dict[int, Tensor]:
    """Mean of k k^T over all tokens of `texts`, `[d_mlp d_mlp]` in float64, k the input of the down projection."""
    modules = {layer: down_projection(model, layer) for layer in layers}
    total = {layer: torch.zeros(m.in_features, m.in_features, dtype=torch.float64) for layer, m in modules.items()}
    count = 0
    with _inputs(modules) as seen:
        for ids in texts:
            model.hf(input_ids=torch.tensor([list(ids)], device=model.device), use_cache=False)
            count += len(ids)
            for layer, given in seen.items():
                keys = given[0].double().cpu()
                total[layer] += keys.T @ keys
    return {layer: moment / count for layer, moment in total.items()}


@dataclass(frozen=True)
class Rewrite:
    """Settings of the rank-one update. `lr` and `reach` are in units of the norm of the MLP's own output there."""

    layers: tuple[int, ...]
    lr: float = 0.5
    reach: float = 4.0
    steps: int = 15
    enough: float = 0.95
    ridge: float = 0.01


def rank_one(
    weight: Float[Tensor, "out inner"], key: Float[Tensor, " inner"], value: Float[Tensor, " out"], moment: Tensor
) -> Float[Tensor, "out inner"]:
    """The weights nearest to `weight` in the metric of `moment` that answer `value` to `key`: W' k = v (ROME)."""
    w, k, v = weight.double(), key.double(), value.double()
    direction = torch.linalg.solve(moment.double(), k)
    return w + torch.outer(v - w @ k, direction / (direction @ k))


def wanted_value(model: Model, pair: EncodedPair, layer: int, plan: Rewrite) -> tuple[Tensor, Tensor, float, int]:
    """(key, value, probability, steps): what the MLP gets at the field's last token, and what it should answer there.

    The answer is its own plus a shift that makes the new answer likely, no longer than `reach` times its own norm.
    """
    module, slot = down_projection(model, layer), pair.field[1] - 1
    with _inputs({layer: module}) as seen, torch.no_grad():
        _log_p(model, pair)
    key = seen[layer][0, slot]
    own = module.weight @ key
    size = float(own.norm())
    shift = torch.zeros_like(own, requires_grad=True)

    def add(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        moved = output.clone()
        moved[0, slot] = moved[0, slot] + shift
        return moved

    # Adam moves every number by about lr per step, so a step is lr * size long.
    optimiser = torch.optim.Adam([shift], lr=plan.lr * size / own.numel() ** 0.5)
    handle = module.register_forward_hook(add)
    best, best_p, step = own.clone(), 0.0, 0
    try:
        for step in range(plan.steps + 1):
            log_p = _log_p(model, pair)
            if (p := float(log_p.detach().exp())) > best_p:
                best, best_p = own + shift.detach(), p
            if p >= plan.enough or step == plan.steps:
                break
            optimiser.zero_grad()
            (-log_p).backward()
            optimiser.step()
            with torch.no_grad():
                shift *= min(1.0, plan.reach * size / max(float(shift.norm()), 1e-12))
    finally:
        handle.remove()
    return key, best, best_p, step


@contextmanager
def rome(model: Model, pair: EncodedPair, moments: dict[int, Tensor], plan: Rewrite) -> Iterator[tuple[int, int]]:
    """The rank-one update where the new answer becomes likeliest; yields (steps, layer), then undoes it."""
    tries = {layer: wanted_value(model, pair, layer, plan) for layer in plan.layers}
    layer = max(tries, key=lambda one: tries[one][2])
    key, value = tries[layer][:2]
    moment = moments[layer]
    moment = moment + plan.ridge * moment.diagonal().mean() * torch.eye(len(moment), dtype=moment.dtype)
    weight = down_projection(model, layer).weight
    before = weight.detach().clone()
    try:
        with torch.no_grad():
            weight.copy_(rank_one(before.cpu(), key.cpu(), value.cpu(), moment))
        yield sum(one[3] for one in tries.values()), layer
    finally:
        with torch.no_grad():
            weight.copy_(before)
