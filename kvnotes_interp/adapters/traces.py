"""Forward passes through nnsight: the decision read from patched caches, and with head outputs replaced.

Everything that happens to a prompt happens in one `session`: both prompts are run, their caches patched and the last
token run on top, so that on a remote server no cache crosses the network; only the edits go there and final hidden
states come back. `remote` is handed on as it is: False runs here, True on NDIF, "local" here after the request was
serialised and read back as the server would do it.

The last token runs on a cache that is *already* patched, as `engine.sweep` does it. A patch of `k_proj` inside one full
forward asks something else: later tokens then read the patched key again and carry it upward.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import DynamicCache

from kvnotes_interp import compat
from kvnotes_interp.adapters import parity as checking
from kvnotes_interp.errors import InputError
from kvnotes_interp.sites import Site

if TYPE_CHECKING:
    from kvnotes_interp.model import Model

Remote = bool | str


@dataclass(frozen=True)
class HeadEdit:
    """One row of a batch: `outputs` `[layer head d_head]` stand in for the heads that `take` `[layer head]` names."""

    take: Bool[Tensor, "layer head"]
    outputs: Float[Tensor, "layer head d_head"]


@dataclass(frozen=True)
class Look:
    """The last token of a plain full forward: answer logits, and each head's output before the output projection."""

    logits: Float[Tensor, " answer"]
    heads: Float[Tensor, "layer head d_head"]


class Traced:
    """An nnsight model, the names of the modules that are read and edited, and how it is run.

    Args:
        nn: an `nnsight.TransformersModel`; its weights may be elsewhere (a meta model for remote runs).
        model: shape, tokenizer and config; its weights are not used.
        remote: see the module's docstring.
        rows: patched caches per batch; each holds a copy of the cache.
    """

    def __init__(self, nn: Any, model: Model, *, remote: Remote = False, rows: int = 16) -> None:
        if rows < 1:
            raise InputError(f"rows={rows}: at least one row per batch is needed.")
        self.nn, self.model, self.remote, self.rows = nn, model, remote, rows
        hf = nn._module
        names = {id(module): name for name, module in hf.named_modules()}
        self.norm = _envoy(nn, names[id(compat.final_norm(hf))])
        self.head = _envoy(nn, names[id(hf.get_output_embeddings())])
        self.outs = [_envoy(nn, names[id(compat.output_projection(layer))]) for layer in compat.layers(hf)]
        self.config = hf.config

    def decide(
        self,
        base: Sequence[int],
        donor: Sequence[int],
        last: int,
        sites: Sequence[Site],
        answers: Sequence[int],
        *,
        heads: Sequence[HeadEdit | None] = (),
    ) -> Float[Tensor, "site answer"]:
        """Answer logits after `last` was run on the cache of `base` patched at each site from the cache of `donor`.

        `heads` edits the head outputs of that last token, one edit (or None) per site; without it nothing is edited.
        Logits are computed here, in at least float32, from final hidden states.
        """
        for site in sites:
            if site.kv_heads is not None:
                raise InputError("a site with kv_heads cannot be patched through nnsight; patch all heads of a slot.")
            site.check(n_pos=len(base), n_layers=self.model.shape.n_layers, n_kv_heads=self.model.shape.n_kv_heads)
        if len(base) != len(donor) or len(heads) not in (0, len(sites)):
            raise InputError(f"{len(base)} and {len(donor)} tokens, {len(sites)} sites, {len(heads)} head edits.")
        steps = [
            self._step(sites[i : i + self.rows], heads[i : i + self.rows], last, len(base))
            for i in range(0, len(sites), self.rows)
        ]
        if not steps:
            return torch.empty(0, len(answers))
        prompts = [_prompt(base), _prompt(donor)]
        from nnsight import save

        nn, norm, head, outs, tokens = self.nn, self.norm, self.head, self.outs, list(answers)
        with nn.session(remote=self.remote):
            hidden, columns, caches = save([]), save([]), []
            with torch.no_grad():  # in here, so that a server runs without gradients too
                for prompt in prompts:
                    kept = []
                    with nn.trace(prompt, past_key_values=DynamicCache(), use_cache=True):
                        for layer in nn.output.past_key_values.layers:
                            kept.append((layer.keys, layer.values))
                    caches.append(kept)
                for inputs, patches, masks, values in steps:
                    rows = inputs["input_ids"].shape[0]
                    cache = DynamicCache()
                    for index in range(len(caches[0])):
                        k, v = caches[0][index][0].repeat(rows, 1, 1, 1), caches[0][index][1].repeat(rows, 1, 1, 1)
                        for row, slots, part in patches[index]:
                            if "k" in part:
                                k[row, :, slots] = caches[1][index][0][0, :, slots]
                            if "v" in part:
                                v[row, :, slots] = caches[1][index][1][0, :, slots]
                        cache.update(k, v, index)
                    with nn.trace(inputs, past_key_values=cache, use_cache=True):
                        for index in sorted(masks):
                            now = outs[index].input
                            mask, value = masks[index].to(now.device), values[index].to(now.device, now.dtype)
                            outs[index].input[:, -1] = torch.where(mask, value, now[:, -1])
                        hidden.append(norm.output[:, -1])
                        columns.append((head.weight[tokens], None if head.bias is None else head.bias[tokens]))
        return self._logits(torch.cat([h.cpu() for h in hidden]), *columns[0])

    def look(self, ids: Sequence[int], answers: Sequence[int]) -> Look:
        """Run the whole prompt in one plain forward, without a cache, and look at its last token."""
        from nnsight import save

        nn, norm, head, outs, tokens, prompt = self.nn, self.norm, self.head, self.outs, list(answers), _prompt(ids)
        with nn.session(remote=self.remote):
            found = save([])
            with torch.no_grad():  # noqa: SIM117 - nnsight reads the block of a `with` of its own
                with nn.trace(prompt, use_cache=False):
                    for out in outs:
                        found.append(out.input[0, -1])
                    found.append(norm.output[:, -1])
                    found.append((head.weight[tokens], None if head.bias is None else head.bias[tokens]))
        *heads, hidden, columns = found
        shape = self.model.shape
        by_head = torch.stack([h.cpu() for h in heads]).view(shape.n_layers, shape.n_heads, -1)
        return Look(self._logits(hidden.cpu(), *columns)[0], by_head)

    def cache(self, ids: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values per layer `[1 kv_head pos d_head]` after a prompt; they are fetched, so keep it short."""
        from nnsight import save

        nn, prompt = self.nn, _prompt(ids)
        with nn.session(remote=self.remote):
            found = save([])
            with torch.no_grad():  # noqa: SIM117 - nnsight reads the block of a `with` of its own
                with nn.trace(prompt, past_key_values=DynamicCache(), use_cache=True):
                    for layer in nn.output.past_key_values.layers:
                        found.append((layer.keys, layer.values))
        return [k for k, _ in found], [v for _, v in found]

    def _step(
        self, sites: Sequence[Site], heads: Sequence[HeadEdit | None], last: int, n_pos: int
    ) -> tuple[dict[str, Tensor], list[list[tuple[int, list[int], str]]], dict[int, Tensor], dict[int, Tensor]]:
        """What one batch needs: model inputs, patches per layer (row, slots, part), and head edits per layer."""
        n, layers = len(sites), self.model.shape.n_layers
        inputs = {
            "input_ids": torch.full((n, 1), last),
            "attention_mask": tail_mask(n, n_pos),
            "position_ids": torch.full((n, 1), n_pos),
        }
        patches: list[list[tuple[int, list[int], str]]] = [[] for _ in range(layers)]
        for row, site in enumerate(sites):
            for layer in site.layers_of(layers) if site.positions else ():
                patches[layer].append((row, list(site.positions), site.part))
        masks: dict[int, Tensor] = {}
        values: dict[int, Tensor] = {}
        for layer in range(layers):
            if any(edit is not None and bool(edit.take[layer].any()) for edit in heads):
                rows = [_row(edit, layer, self.model.shape.n_heads) for edit in heads]
                width = max(value.numel() for _, value in rows)
                masks[layer] = torch.stack([m.repeat_interleave(width // m.numel()) for m, _ in rows])
                values[layer] = torch.stack([v.flatten() if v.numel() else torch.zeros(width) for _, v in rows])
        return inputs, patches, masks, values

    def _logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Float[Tensor, "row answer"]:
        """Scaling and soft-capping as the model's own head has them; only the answers' columns were fetched."""
        columns = SimpleNamespace(weight=weight.cpu(), bias=None if bias is None else bias.cpu())
        answers_only = SimpleNamespace(get_output_embeddings=lambda: columns, config=self.config)
        return compat.unembed(answers_only, hidden)  # type: ignore[arg-type]


def open_nnsight(hf: Any, tokenizer: Any) -> Any:
    """An nnsight model over the weights of a transformers model, which itself stays as it is.

    Raises InputError without nnsight, or without a tokenizer, which nnsight wants.
    """
    _before_nnsight()
    try:
        from nnsight import TransformersModel
    except ImportError as error:
        raise checking.not_installed("nnsight", "nnsight") from error
    if tokenizer is None:
        raise InputError("nnsight needs a tokenizer: pass kv.load(..., tokenizer=...).")
    return TransformersModel(checking.twin(hf), tokenizer=tokenizer, task="text-generation")


def _before_nnsight() -> None:
    """Importing nnsight gives every object a `save`; anyio has classes that refuse to be made after that, so make them.

    anyio comes with HTTP clients and Jupyter, and makes these classes when they are first named.
    """
    with suppress(ImportError, TypeError):  # TypeError: nnsight was there before us
        from anyio.abc import SocketAttribute  # noqa: F401
        from anyio.streams.file import FileStreamAttribute  # noqa: F401
        from anyio.streams.tls import TLSAttribute  # noqa: F401


def tail_mask(rows: int, n_pos: int) -> Int[Tensor, "row key"]:
    """Cache and new token, spelled out. Left to itself nnsight masks the new token only for some argument names."""
    return torch.ones(rows, n_pos + 1, dtype=torch.long)


def _prompt(ids: Sequence[int]) -> dict[str, Tensor]:
    tokens = torch.tensor([list(ids)])
    places = torch.arange(tokens.shape[1])[None]
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "position_ids": places}


def _row(edit: HeadEdit | None, layer: int, n_heads: int) -> tuple[Tensor, Tensor]:
    if edit is None:
        return torch.zeros(n_heads, dtype=torch.bool), torch.zeros(0)
    return edit.take[layer], edit.outputs[layer]


def _envoy(nn: Any, path: str) -> Any:
    return reduce(lambda at, name: at[int(name)] if name.isdigit() else getattr(at, name), path.split("."), nn)
