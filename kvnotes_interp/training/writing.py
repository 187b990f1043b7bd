"""The trained Writers (SemPIC, KV Packet, both) as a method of the loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from kvnotes_interp import engine
from kvnotes_interp.cache import KVCache
from kvnotes_interp.rope import rotate
from kvnotes_interp.training.checkpointing import kv_checkpointing
from kvnotes_interp.training.examples import Example

if TYPE_CHECKING:
    from kvnotes_interp.model import Model
    from kvnotes_interp.operators.writer import Writer


class Writing:
    """Caches as the operators of `writer` compose them: the Reader's prefix, then every document as compiled, in place.

    Args:
        checkpointing: recompute the Writer's activations in backward instead of keeping them (`kv_checkpointing`).

    The documents of all examples are compiled in one pass, and all keys are turned to their places at once.
    """

    def __init__(self, model: Model, writer: Writer, *, checkpointing: bool = False) -> None:
        writer.check(model)
        self.model, self.writer, self.checkpointing = model, writer, checkpointing
        self.name = writer.kind
        self._prefixes: dict[tuple[int, ...], KVCache] = {}

    def describe(self) -> dict[str, Any]:
        return {**self.writer.settings, "checkpointing": self.checkpointing}

    def parameters(self) -> dict[str, Parameter]:
        return self.writer.parameters()

    def save(self, folder: Path, *, training: Mapping[str, Any]) -> None:
        self.writer.save(folder, training=training)

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.parameters().items():
                parameter.copy_(tensors[name])

    def caches(self, examples: Sequence[Example]) -> list[KVCache]:
        model = self.model
        chunks = [chunk for example in examples for chunk in example.blocks.chunks]
        with kv_checkpointing(self.writer.network(model)) if self.checkpointing else nullcontext():
            compiled = iter(self.writer.compile(model, chunks))
        parts: list[KVCache] = []
        moves: list[Tensor] = []
        sizes: list[int] = []
        for example in examples:
            prefix = [self._prefix(example.blocks.prefix)] if example.blocks.prefix else []
            own = [*prefix, *(next(compiled) for _ in example.blocks.chunks)]
            end = 0
            for part in own:
                moves.append(torch.arange(end, end + len(part)) - part.positions)
                end += len(part)
            parts += own
            sizes.append(end)
        move = torch.cat(moves)
        keys, values = [], []
        for layer, rope in enumerate(model.rope.layers):
            key = torch.cat([part.keys[layer] for part in parts], dim=2).to(model.dtype)
            value = torch.cat([part.values[layer] for part in parts], dim=2).to(model.dtype)
            keys.append(rotate(key, move, rope).split(sizes, dim=2))
            values.append(value.split(sizes, dim=2))
        ids = torch.cat([part.token_ids for part in parts], dim=1).split(sizes, dim=1)
        return [
            KVCache(
                tuple(k[i] for k in keys),
                tuple(v[i] for v in values),
                ids[i],
                torch.arange(size),
                model.rope,
                model.model_id,
            )
            for i, size in enumerate(sizes)
        ]

    def _prefix(self, prefix: tuple[int, ...]) -> KVCache:
        """What the Reader makes of it: the same for all questions of a task, so it is run once."""
        if prefix not in self._prefixes:
            self._prefixes[prefix] = engine.prefill(self.model, prefix)
        return self._prefixes[prefix]
