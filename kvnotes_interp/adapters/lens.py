"""TransformerLens: a `TransformerBridge` as the model, its activations under our names, and its heads' attributions.

    from kvnotes_interp.adapters import lens
    model = lens.from_bridge(bridge)                # a Model like any other
    bridge = lens.to_bridge(model)                  # the other way round, over the same weights
    lens.parity(bridge, model).require()            # every activation below against this package's
    lens.head_attribution(bridge, ids, (old, new))  # [layer head]

A bridge puts modules of its own in place of the model's, and those ignore the attention function that sweeps and
captures run through. So `from_bridge` builds the plain transformers model again over the bridge's weights.

What the parity check does not prove: that hooks which you add do what you mean, or that another prompt length, dtype
or device agrees as well; run it where it matters.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kvnotes_interp import compat, engine
from kvnotes_interp.adapters import parity as checking
from kvnotes_interp.adapters.parity import Gap, Parity, gap, gaps_by_layer
from kvnotes_interp.engine.forward import TokenIds, as_ids
from kvnotes_interp.errors import InputError, UnsupportedError, nearest

if TYPE_CHECKING:
    from kvnotes_interp.model import Model

PACKAGES = ("transformer-lens", "transformers")
WANTS = ("keys", "values", "patterns", "heads", "residual")
_HOOKS = {"values": "attn.hook_v", "patterns": "attn.hook_pattern", "heads": "attn.hook_z"}
_INNER = "._original_component"  # where a bridge's module keeps the one that it stands for


@dataclass(frozen=True)
class Activations:
    """One full pass of a bridge, one tensor per layer, None where it was not asked for.

    Attributes:
        logits: `[batch pos vocab]`, as the bridge gives them.
        keys, values: `[batch kv_head pos d_head]`, keys after norm and rotation, as a `KVCache` holds them.
        patterns: attention probabilities `[batch head pos key]`.
        heads: head outputs before the output projection (`hook_z`), `[batch pos head d_head]`.
        residual: what each layer reads and, last, what the final norm reads: n_layers + 1 of `[batch pos d_model]`.
    """

    logits: Float[Tensor, "batch pos vocab"]
    keys: tuple[Tensor, ...] | None = None
    values: tuple[Tensor, ...] | None = None
    patterns: tuple[Tensor, ...] | None = None
    heads: tuple[Tensor, ...] | None = None
    residual: tuple[Tensor, ...] | None = None


def is_bridge(thing: Any) -> bool:
    """Whether this is a TransformerBridge; imports nothing."""
    return any(c.__name__ == "TransformerBridge" for c in type(thing).__mro__)


def to_bridge(model: Model) -> Any:
    """A TransformerBridge over the weights of `model`, which itself stays as it is. No memory is taken for weights.

    Raises InputError without TransformerLens or without a tokenizer (a bridge needs one that can be loaded again by
    its `name_or_path`), UnsupportedError for an architecture that TransformerLens does not know.
    """
    try:
        from transformer_lens.model_bridge import TransformerBridge
    except ImportError as error:
        raise checking.not_installed("transformer-lens", "lens") from error
    if model.tokenizer is None:
        raise InputError(f"{model.name} was loaded without a tokenizer, which a TransformerBridge needs.")
    inner = checking.twin(model.hf)
    if not getattr(inner.config, "architectures", None):
        inner.config.architectures = [type(inner).__name__]  # a model built from a config has not named it
    try:
        return TransformerBridge.boot_transformers(
            model.name,
            hf_model=inner,  # pyright: ignore[reportArgumentType]
            tokenizer=model.tokenizer,
            dtype=model.dtype,
            device=model.device,
        )
    except ValueError as error:
        reason = str(error).split(". ")[0]  # what follows is a list of everything that it knows
        raise UnsupportedError(f"TransformerLens cannot take {type(inner).__name__}: {reason}.") from error


def from_bridge(bridge: Any, *, tokenizer: Any = None, check: bool = True) -> Model:
    """The model underneath a bridge as a `Model`, over the same weights.

    Weights are taken as the bridge holds them, so after `enable_compatibility_mode()` they are the folded and centred
    ones: the same function up to a constant in the logits, which no logit difference sees.

    Args:
        tokenizer: in place of the bridge's own, which TransformerLens reloads with `add_bos_token=True`: it may put a
            BOS token in front of prompts where the model's own tokenizer does not.
        check: run the checks of `kv.load` and the parity check, and refuse a model or a version pair that fails.

    Raises:
        InputError: this is no bridge, or it does not hold a transformers model.
        UnsupportedError: the model's cache cannot be worked on, its layers are spread over several devices, or bridge
            and engine disagree; the message names versions, layer and gap.
    """
    from kvnotes_interp import model as models

    if not is_bridge(bridge):
        raise InputError(f"{type(bridge).__name__} is not a TransformerBridge.")
    hf = plain_model(bridge)
    name = str(getattr(bridge.cfg, "model_name", "") or hf.config.name_or_path or type(hf).__name__)
    hf.config.name_or_path = name  # of this copy of the config; TransformerLens may have been given weights by a path
    model = models.load(hf, tokenizer=bridge.tokenizer if tokenizer is None else tokenizer, check=check)
    note = f"unwrapped from a TransformerBridge of transformer-lens {checking.installed('transformer-lens')}"
    model = replace(model, source=replace(model.source, note=note))
    if check:
        parity(bridge, model).require()
    return model


def unwrapped(bridge: Any, tokenizer: Any = None) -> tuple[Any, Any]:
    """The plain transformers model of a bridge and its tokenizer, after the parity check: what `kv.load(bridge)` loads.

    Raises as `from_bridge` does.
    """
    model = from_bridge(bridge, tokenizer=tokenizer, check=False)
    parity(bridge, model).require()
    return model.hf, model.tokenizer


def plain_model(bridge: Any) -> Any:
    """A transformers model of the class that the bridge wraps, holding the bridge's own parameters and buffers."""
    from transformers import PreTrainedModel

    wrapped = bridge.original_model
    if not isinstance(wrapped, PreTrainedModel):
        raise InputError(f"this bridge holds a {type(wrapped).__name__}, not a transformers PreTrainedModel.")
    where = {str(p.device) for p in wrapped.parameters()}
    if len(where) > 1:
        raise UnsupportedError(
            f"this bridge's layers lie on several devices ({', '.join(sorted(where))}): load the model itself, with "
            "kv.load(..., device_map=...)."
        )
    config = copy.deepcopy(wrapped.config)
    config._attn_implementation = None  # the bridge asks for eager; let transformers choose
    with torch.device("meta"):
        fresh = type(wrapped)._from_config(config)
    parameters = {_plain_name(n): p for n, p in wrapped.named_parameters(remove_duplicate=False)}
    buffers = {_plain_name(n): b for n, b in wrapped.named_buffers(remove_duplicate=False)}
    for path, module in fresh.named_modules():
        for kind, found in ((module._parameters, parameters), (module._buffers, buffers)):
            for name, empty in kind.items():
                full = f"{path}.{name}" if path else name
                if empty is None:
                    continue
                if full not in found or found[full].shape != empty.shape:
                    raise UnsupportedError(
                        f"this bridge holds no {full} of shape {tuple(empty.shape)}, which {type(fresh).__name__} "
                        f"needs ({checking.versions(*PACKAGES)})."
                    )
                kind[name] = found[full]  # type: ignore[assignment]
    fresh.generation_config = wrapped.generation_config
    return fresh.eval()


def _plain_name(name: str) -> str:
    return name.replace(_INNER, "")


@torch.no_grad()
def activations(bridge: Any, token_ids: TokenIds, *, want: Sequence[str] = WANTS) -> Activations:
    """One pass of the bridge from nothing over `[batch pos]` or `[pos]` token ids.

    Memory: "patterns" is layers x heads x pos x pos; ask for less on long prompts.

    Keys are read from `hook_rot_k`. Where the bridge has none (fused query-key-value projections: Phi-3, GPT-NeoX)
    they are what the bridge itself puts into a cache in a second pass.

    Raises InputError on an unknown `want`; UnsupportedError naming the hook that the bridge did not run.
    """
    for name in want:
        if name not in WANTS:
            raise InputError(f"want holds {name!r}; choose from {', '.join(WANTS)}.{nearest(name, WANTS)}")
    ids = _ids(bridge, token_ids)
    n_layers = len(bridge.blocks)
    names = {f"blocks.{layer}.{hook}" for kind, hook in _HOOKS.items() if kind in want for layer in range(n_layers)}
    if "keys" in want:
        names |= {f"blocks.{layer}.attn.hook_rot_k" for layer in range(n_layers)}
    if "residual" in want:
        names |= {f"blocks.{layer}.hook_resid_pre" for layer in range(n_layers)} | {"ln_final.hook_in"}
    logits, cache = bridge.run_with_cache(ids, names_filter=lambda name: name in names)
    kept = cache.cache_dict

    def layers(hook: str) -> tuple[Tensor, ...]:
        return tuple(_hooked(kept, f"blocks.{layer}.{hook}") for layer in range(n_layers))

    found: dict[str, tuple[Tensor, ...]] = {kind: layers(hook) for kind, hook in _HOOKS.items() if kind in want}
    if "values" in found:
        found["values"] = tuple(v.transpose(1, 2) for v in found["values"])
    if "keys" in want:
        if "blocks.0.attn.hook_rot_k" in kept:
            found["keys"] = tuple(k.transpose(1, 2) for k in layers("attn.hook_rot_k"))
        else:
            found["keys"] = _cached_keys(bridge, ids)
    if "residual" in want:
        found["residual"] = (*layers("hook_resid_pre"), _hooked(kept, "ln_final.hook_in"))
    return Activations(logits, **found)


def _cached_keys(bridge: Any, ids: Tensor) -> tuple[Tensor, ...]:
    cache = compat.new_cache()
    bridge(ids, past_key_values=cache, use_cache=True, return_type="logits")
    if len(cache.layers) != len(bridge.blocks):
        raise UnsupportedError(
            f"{checking.versions(*PACKAGES)}: the bridge filled {len(cache.layers)} of {len(bridge.blocks)} layers of "
            "the cache it was given, and has no hook_rot_k, so its keys cannot be read."
        )
    return compat.read_cache(cache)[0]


@torch.no_grad()
def parity(bridge: Any, model: Model | None = None, token_ids: TokenIds | None = None) -> Parity:
    """The bridge's activations against this package's, kind by kind and layer by layer; `require()` refuses.

    Keys and values against `engine.prefill`, the rest against `engine.capture`, on `token_ids` or on 24 fixed random
    ones. Logits are compared after their mean is taken off: compatibility mode shifts all of them by a constant.

    Args:
        model: the same weights as a Model; `from_bridge(bridge)`, unchecked, by default.
    """
    model = from_bridge(bridge, check=False) if model is None else model
    ids = as_ids(model, checking.sample_ids(model, 24) if token_ids is None else token_ids)
    limit = checking.limit_of(model)
    cache = engine.prefill(model, ids)
    ours = engine.capture(model, None, ids, want=("residual", "heads", "patterns"))
    assert ours.residual is not None
    assert ours.heads is not None
    assert ours.patterns is not None
    gaps = []
    try:
        theirs = activations(bridge, ids)
    except UnsupportedError as error:
        gaps.append(Gap("a full pass", None, math.inf, limit, str(error)))
    else:
        gaps += gaps_by_layer("keys", theirs.keys, cache.keys, limit)
        gaps += gaps_by_layer("values", theirs.values, cache.values, limit)
        gaps += gaps_by_layer("patterns", theirs.patterns, ours.patterns, limit)
        gaps += gaps_by_layer("heads", theirs.heads, ours.heads, limit)
        gaps += gaps_by_layer("residual", theirs.residual, ours.residual, limit)
        mine = compat.unembed(model.hf, ours.hidden)
        logits, mine = (t - t.mean(-1, keepdim=True) for t in (theirs.logits.to(mine), mine))
        gaps.append(gap("logits", None, logits, mine, limit))
    return Parity(model.name, checking.versions(*PACKAGES), tuple(gaps))


def _hooked(kept: dict[str, Tensor], name: str) -> Tensor:
    if name not in kept:
        raise UnsupportedError(f"{checking.versions(*PACKAGES)}: the bridge did not run the hook {name}.")
    return kept[name]


def _ids(bridge: Any, token_ids: TokenIds) -> Tensor:
    device = next(bridge.original_model.parameters()).device
    ids = torch.as_tensor(token_ids, dtype=torch.long, device=device)
    ids = ids[None] if ids.ndim == 1 else ids
    if ids.ndim != 2 or ids.shape[1] == 0:
        raise InputError(f"token ids of shape {tuple(ids.shape)}: expected [batch pos] with at least one token.")
    return ids


# --- attribution -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LogitParts:
    """A logit difference taken apart, with every norm's scale held at the run's own value.

    `heads` `[layer head]`; `attention` `[layer]` is what attention adds besides its heads (an output bias); `mlp`
    `[layer]`; `embed` and `bias` (of the final norm and the unembedding) are numbers. All of it adds up to `total`, the
    difference before any soft-capping of the logits.
    """

    heads: Float[Tensor, "layer head"]
    attention: Float[Tensor, " layer"]
    mlp: Float[Tensor, " layer"]
    embed: float
    bias: float
    total: float


def head_attribution(bridge: Any, token_ids: TokenIds, answers: Sequence[int]) -> Float[Tensor, "layer head"]:
    """Direct logit attribution of every head at the last position: `logit[answers[1]] - logit[answers[0]]`, its share.

    See `logit_parts`, which also gives what is not a head's. In at least float32, on the CPU.
    """
    return logit_parts(bridge, token_ids, answers).heads


@torch.no_grad()
def logit_parts(bridge: Any, token_ids: TokenIds, answers: Sequence[int]) -> LogitParts:
    """Take the logit difference of the last position apart, through the bridge's hooks (one prompt).

    A head's part is its output through its slice of the output projection, the norm behind that where the family has
    one (Gemma 2 and 3, OLMo 2), the final norm and the difference of two unembedding columns; norm scales are those of
    this run. What it does not show: what a head does through later layers, which is most of what early heads do.

    Raises InputError unless there is one prompt and two answers; UnsupportedError when the parts do not add up to what
    the bridge itself computed, naming the place: its modules then do something that is not accounted for here.
    """
    ids = _ids(bridge, token_ids)
    if ids.shape[0] != 1 or len(answers) != 2:
        raise InputError(f"{ids.shape[0]} prompts and {len(answers)} answers: attribution takes one and two.")
    n_layers = len(bridge.blocks)
    ends = ("hook_z", "hook_attn_out", "hook_mlp_out", "ln1_post.hook_scale", "unembed.hook_out", "attn.hook_out")
    wanted = lambda name: name.endswith(ends) or name in _FINAL  # noqa: E731
    kept = bridge.run_with_cache(ids, names_filter=wanted)[1].cache_dict
    exact = torch.promote_types(next(bridge.original_model.parameters()).dtype, torch.float32)
    read = lambda name: _hooked(kept, name)[0, -1].to(exact)  # noqa: E731

    # The final norm and the unembedding, as one linear map from the residual stream to the logit difference.
    norm, config = bridge.ln_final, compat.text_config(bridge.original_model)
    factor = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    columns = (bridge.W_U[:, answers[1]] - bridge.W_U[:, answers[0]]).to(exact) * factor
    final_scale = read("ln_final.hook_scale")
    project = lambda x: _normed(norm, x, final_scale) @ columns  # noqa: E731

    heads, rest, mlps, written = [], [], [], [read("blocks.0.hook_resid_pre")]
    for layer in range(n_layers):
        block, at = bridge.blocks[layer], f"blocks.{layer}"
        outputs = read(f"{at}.attn.hook_z")
        by_head = torch.einsum("hd,hdm->hm", outputs, block.attn.W_O.to(exact))
        bias = getattr(block.attn.o, "bias", None)
        bias = torch.zeros_like(by_head[0]) if bias is None else bias.to(exact)
        _same(f"the heads of layer {layer} and attn.hook_out", by_head.sum(0) + bias, read(f"{at}.attn.hook_out"))
        if f"{at}.ln1_post.hook_scale" in kept:
            scale = read(f"{at}.ln1_post.hook_scale")
            by_head = _normed(block.ln1_post, by_head, scale)
        by_head = by_head * (getattr(config, "residual_multiplier", None) or 1.0)
        attention, mlp = read(f"{at}.hook_attn_out"), read(f"{at}.hook_mlp_out")
        heads.append(project(by_head))
        rest.append(project(attention - by_head.sum(0)))
        mlps.append(project(mlp))
        written += [attention, mlp]
    total = torch.stack(written).sum(0)
    _same("all writes and what the final norm reads", total, read("ln_final.hook_in"))
    normed = read("ln_final.hook_out")
    shift = normed - _normed(norm, total, final_scale)  # the norm's own bias, and nothing else:
    norm_bias = getattr(norm.original_component, "bias", None)
    _same("the final norm and its bias", shift, torch.zeros_like(shift) if norm_bias is None else norm_bias, of=normed)
    difference = _difference(read("unembed.hook_out"), answers) * factor
    b_u = getattr(bridge.unembed.original_component, "bias", None)
    bias = float(shift @ columns) + (0.0 if b_u is None else float(_difference(b_u.to(exact), answers) * factor))
    found = LogitParts(
        torch.stack(heads).cpu(),
        torch.stack(rest).cpu(),
        torch.stack(mlps).cpu(),
        float(project(written[0])),
        bias,
        float(difference),
    )
    parts = found.heads.sum() + found.attention.sum() + found.mlp.sum() + found.embed + found.bias
    size = read("unembed.hook_out").abs().max().cpu() * abs(factor)
    _same("the parts and the logit difference", parts, difference.cpu(), of=size)
    return found


_FINAL = frozenset({"blocks.0.hook_resid_pre", *(f"ln_final.hook_{n}" for n in ("in", "scale", "out"))})


def _difference(logits: Tensor, answers: Sequence[int]) -> Tensor:
    return logits[..., answers[1]] - logits[..., answers[0]]


def _normed(norm: Any, x: Tensor, scale: Tensor) -> Tensor:
    """A norm without its bias and with its scale held: linear in `x` `[*rows d_model]`."""
    if not norm.uses_rms_norm:
        x = x - x.mean(-1, keepdim=True)
    weight = getattr(norm.original_component, "weight", None)
    if not isinstance(weight, nn.Parameter | Tensor):
        return x / scale
    return x / scale * (weight.to(x.dtype) + (1.0 if norm.uses_weight_offset else 0.0))


def _same(what: str, a: Tensor, b: Tensor, *, of: Tensor | None = None) -> None:
    size = float((b if of is None else of).abs().max().clamp_min(1e-12))
    off = float((a - b).abs().max()) / size
    limit = checking.LIMITS[a.dtype]
    if not off <= limit:
        raise UnsupportedError(
            f"{checking.versions(*PACKAGES)}: {what} differ by {off:.2g} of their size, limit {limit:.2g}; attribution "
            "would not account for what this model computes."
        )
