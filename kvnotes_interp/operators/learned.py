"""What the learned operators share: finding their Writer, compiling with it, and the join.

A Writer that was loaded from a folder is kept for as long as the model is, so that a probe reads it once and not for
every item; a folder that was written anew is read anew.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from kvnotes_interp import engine
from kvnotes_interp.downloads import sha256
from kvnotes_interp.errors import InputError
from kvnotes_interp.operators.blocks import Blocks
from kvnotes_interp.operators.compose import no_recompute
from kvnotes_interp.operators.made import Compiled, Made
from kvnotes_interp.operators.writer import Writer, find_about

if TYPE_CHECKING:
    from kvnotes_interp.model import Model

Adapter = str | Path | Writer

_LOADED: WeakKeyDictionary[Model, dict[Path, tuple[str, Writer]]] = WeakKeyDictionary()


def writer_of(model: Model, adapter: Adapter, kind: str) -> Writer:
    """The Writer, read from its folder where `adapter` is one.

    Raises InputError when it is of another kind or model, or the folder does not hold it whole.
    """
    writer, where = (adapter, "the Writer given") if isinstance(adapter, Writer) else (_loaded(model, adapter), adapter)
    writer.check(model)
    if writer.kind != kind:
        raise InputError(f"{where} is of kind {writer.kind!r}, not {kind!r}: name the operator {writer.kind}.")
    return writer


def adapter_sha256(folder: str | Path) -> str:
    """Of `writer.json`, which holds the hashes of all other files. Raises InputError when it is not there."""
    return sha256(find_about(folder))


@torch.no_grad()
def precompile(model: Model, blocks: Blocks, *, adapter: Adapter, kind: str) -> Compiled:
    """The prefix prefilled by the Reader in its place; every chunk compiled alone by the Writer, one at a time."""
    writer = writer_of(model, adapter, kind)
    prefix = engine.prefill(model, blocks.prefix) if blocks.prefix else None
    return Compiled(prefix, tuple(writer.compile(model, [chunk])[0] for chunk in blocks.chunks))


def join_written(model: Model, blocks: Blocks, *, adapter: Adapter, kind: str, compiled: Compiled | None) -> Made:
    """Join what the Writer compiled, keys moved into place; nothing is recomputed. Wrapper slots count as positions."""
    ready = precompile(model, blocks, adapter=adapter, kind=kind) if compiled is None else compiled
    made = no_recompute(model, blocks, compiled=ready)
    return made if compiled is not None else replace(made, compiled_layer_tokens=ready.layer_tokens)


def _loaded(model: Model, adapter: str | Path) -> Writer:
    if not str(adapter):
        raise InputError(
            "a learned operator needs the folder of its trained Writer: write sempic@FOLDER, packet@FOLDER or "
            "joint@FOLDER; kvprobe train makes one."
        )
    folder, kept = Path(adapter).resolve(), _LOADED.setdefault(model, {})
    digest = adapter_sha256(folder)
    if folder not in kept or kept[folder][0] != digest:
        kept[folder] = (digest, Writer.load(folder, model))
    return kept[folder][1]
