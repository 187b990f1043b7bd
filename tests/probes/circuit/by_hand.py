"""Slow references for circuits: the models' own modules, hooks, eager attention. Nothing of kvnotes_interp."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

Head = tuple[int, int]


def layers_of(hf: PreTrainedModel) -> Sequence[nn.Module]:
    body = getattr(hf, "gpt_neox", None) or hf.model  # type: ignore[attr-defined]
    return list(body.layers)


def attention_of(layer: nn.Module) -> Any:
    return getattr(layer, "self_attn", None) or layer.attention


def projection_of(layer: nn.Module) -> nn.Linear:
    inner = attention_of(layer)
    return getattr(inner, "o_proj", None) or inner.dense


@contextmanager
def hooked(modules: Sequence[nn.Module], hook: Callable[[int], Any], *, before: bool) -> Iterator[None]:
    handles = [
        m.register_forward_pre_hook(hook(i)) if before else m.register_forward_hook(hook(i))
        for i, m in enumerate(modules)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def head_outputs(hf: PreTrainedModel, ids: Sequence[int], n_heads: int) -> list[Tensor]:
    """Inputs of every output projection, `[pos head d_head]` per layer, from one plain forward."""
    seen: list[Tensor] = []

    def hook(_index: int) -> Any:
        return lambda _m, args: seen.append(args[0][0].view(len(ids), n_heads, -1).clone())

    with hooked([projection_of(layer) for layer in layers_of(hf)], hook, before=True):
        hf(input_ids=torch.tensor([list(ids)]), use_cache=False)
    return seen


@contextmanager
def heads_replaced(
    hf: PreTrainedModel, outputs: Sequence[Tensor], heads: Collection[Head], positions: Sequence[int], n_heads: int
) -> Iterator[None]:
    """In every forward inside: outputs `[pos head d_head]` of these heads at these positions, one at a time."""

    def hook(index: int) -> Any:
        def replace(_m: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            z = args[0].clone().view(*args[0].shape[:2], n_heads, -1)
            for layer, head in heads:
                for p in positions if layer == index else ():
                    z[0, p, head] = outputs[index][p, head]
            return (z.view_as(args[0]),)

        return replace

    with hooked([projection_of(layer) for layer in layers_of(hf)], hook, before=True):
        yield


@torch.no_grad()
def score(hf: PreTrainedModel, ids: Sequence[int], answers: tuple[int, int]) -> float:
    """Logit of the second answer minus the first, after one plain forward without a cache."""
    logits = hf(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0, -1]
    return float(logits[answers[1]] - logits[answers[0]])


@torch.no_grad()
def score_with_edges_cut(
    hf: PreTrainedModel,
    kvs: Sequence[tuple[Tensor, Tensor]],
    tail: int,
    answers: tuple[int, int],
    keys: Sequence[int],
    *,
    layers: Collection[int] | None = None,
    heads: Collection[int] | None = None,
) -> float:
    """The tail token on a copied cache, with -inf written into the mask of eager attention for these keys."""
    cache = DynamicCache()
    for index, (key, value) in enumerate(kvs):
        cache.update(key.clone(), value.clone(), index)
    n_heads = hf.config.num_attention_heads
    n = kvs[0][0].shape[2]

    def cut(index: int) -> Any:
        def hook(_m: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            mask = kwargs.get("attention_mask")
            full = torch.zeros(1, n_heads, 1, n + 1, dtype=kvs[0][0].dtype)
            if mask is not None:
                full = full + mask[..., : n + 1]
            if layers is None or index in layers:
                for head in range(n_heads) if heads is None else heads:
                    for key in keys:
                        full[0, head, 0, key] = float("-inf")
            return args, {**kwargs, "attention_mask": full}

        return hook

    handles = [
        attention_of(layer).register_forward_pre_hook(cut(i), with_kwargs=True) for i, layer in enumerate(layers_of(hf))
    ]
    try:
        out = hf(input_ids=torch.tensor([[tail]]), position_ids=torch.tensor([[n]]), past_key_values=cache)
    finally:
        for handle in handles:
            handle.remove()
    return float(out.logits[0, -1, answers[1]] - out.logits[0, -1, answers[0]])
