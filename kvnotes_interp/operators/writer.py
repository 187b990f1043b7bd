"""Writers: what compiles a document into a cache that the frozen model can read wherever it is put.

    writer = new_writer(model, "sempic")                      # or "packet", "joint"; trained by training/
    caches = writer.compile(model, [ids_of_a, ids_of_b])      # one KVCache each, at positions 0, 1, ...
    writer.save("runs/bio"); writer = Writer.load("runs/bio", model)

Three kinds. "sempic": the model with a LoRA adapter, on while a document is compiled (SemPIC, arXiv 2607.28069).
"packet": the plain model, with trained vectors before and behind every document (KV Packet, arXiv 2604.13226). "joint":
both. The Reader is the frozen model itself.

The adapter sits on a twin that shares every weight and buffer of the model and nothing else. So the Reader has no
adapter that could be left on: not in a forward pass, not in backward, not in what is recomputed there.

What a Writer does not prove: that a cache holds what full recompute would write. It is trained to be answered from.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from kvnotes_interp import compat
from kvnotes_interp.cache import KVCache
from kvnotes_interp.downloads import sha256
from kvnotes_interp.errors import InputError, UnsupportedError, nearest
from kvnotes_interp.files import entry, faults_of, read_json, replacing

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from kvnotes_interp.model import Model

Kind = Literal["sempic", "packet", "joint"]
KINDS: tuple[Kind, ...] = ("sempic", "packet", "joint")
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
FORMAT, ABOUT = "writer/1", "writer.json"
PACKET_STD = 0.02  # of the first header and trailer (KV Packet, arXiv 2604.13226)
_ADAPTER = ("adapter/adapter_config.json", "adapter/adapter_model.safetensors")
_PACKET = "packet.safetensors"


@dataclass(frozen=True, eq=False)
class Writer:
    """A Writer of one model; make one with `new_writer` or `Writer.load`.

    Attributes:
        kind: "sempic", "packet" or "joint".
        peft: the twin with its adapter; None for "packet".
        header, trailer: `[token d_model]`, in at least float32, put where the token embeddings are; None for "sempic".
            They take the place of the embedding layer's output: a family that scales embeddings inside that layer
            (Gemma) does not scale them, one that scales what comes out of it (Granite) does.
        model_id: of the model that it belongs to. source: that model's, as manifests record it.
        settings: what `new_writer` was given.
    """

    kind: Kind
    peft: PeftModel | None
    header: Float[Tensor, "token d_model"] | None
    trailer: Float[Tensor, "token d_model"] | None
    model_id: str
    source: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def parameters(self) -> dict[str, nn.Parameter]:
        """What is trained, by name: LoRA matrices as PEFT names them, "header" and "trailer"."""
        found = {} if self.peft is None else {n: p for n, p in self.peft.named_parameters() if p.requires_grad}
        packet = {"header": self.header, "trailer": self.trailer}
        return found | {name: p for name, p in packet.items() if isinstance(p, nn.Parameter)}

    @property
    def fingerprint(self) -> str:
        """Sixteen hex digits of everything that decides what it compiles: kind, settings and trained numbers."""
        digest = hashlib.sha256(json.dumps([self.kind, self.model_id, dict(self.settings)], sort_keys=True).encode())
        for name, parameter in sorted(self.parameters().items()):
            digest.update(f"{name}|{parameter.dtype}".encode())
            digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]

    def network(self, model: Model) -> PreTrainedModel:
        """The transformers model that compiles: the twin with its adapter, or the plain model for a packet."""
        return model.hf if self.peft is None else self.peft.get_base_model()  # type: ignore[return-value]

    def compile(self, model: Model, chunks: Sequence[Sequence[int]]) -> tuple[KVCache, ...]:
        """Run every chunk alone, all in one right-padded batch, and keep its keys and values.

        One cache of batch 1 per chunk, at positions 0, 1, ...; slots of header and trailer are counted and have token
        id -1. Where gradients are enabled the caches carry them; use `torch.no_grad()` to compile for good.

        Raises InputError for another model, no chunk, or an empty one.
        """
        self.check(model)
        if not chunks or not all(len(chunk) for chunk in chunks):
            raise InputError(f"{len(chunks)} chunks to compile: give at least one, and none that is empty.")
        longest = max(map(len, chunks))
        ids = torch.zeros(len(chunks), longest, dtype=torch.long)
        for row, chunk in enumerate(chunks):
            ids[row, : len(chunk)] = torch.as_tensor(chunk)
        ids = ids.to(model.device)
        network, fork = self.network(model), compat.new_cache()
        # What stands behind a chunk cannot be seen from inside it, so that padding needs no mask.
        if self.header is None or self.trailer is None:
            before = behind = 0
            compat.forward(network, ids, fork, torch.arange(longest))
        else:
            before, behind = len(self.header), len(self.trailer)
            embedded = network.get_input_embeddings()(ids)
            header, trailer = self.header.to(embedded.dtype), self.trailer.to(embedded.dtype)
            wrapped = torch.stack(
                [
                    torch.cat((header, row[: len(chunk)], trailer, row[len(chunk) :]))
                    for row, chunk in zip(embedded, chunks, strict=True)
                ]
            )
            compat.forward(network, None, fork, torch.arange(wrapped.shape[1]), embeddings=wrapped)
        # Split, not sliced: in backward every slice would make a tensor of the whole batch.
        keys, values = ([t.split(1) for t in part] for part in compat.read_cache(fork))
        out = []
        for row, chunk in enumerate(chunks):
            n = before + len(chunk) + behind
            held = ids.new_full((1, n), -1)
            held[0, before : n - behind] = ids[row, : len(chunk)]
            mine = [tuple(t[row][:, :, :n] for t in part) for part in (keys, values)]
            out.append(KVCache(mine[0], mine[1], held, torch.arange(n), model.rope, model.model_id))
        return tuple(out)

    def check(self, model: Model) -> None:
        """Raise InputError unless this Writer belongs to the model."""
        if self.model_id != model.model_id:
            raise InputError(
                f"this {self.kind} Writer belongs to {self.model_id!r}, the model at hand is {model.model_id!r}: its "
                "caches would be of other keys. Load that model, or train a Writer for this one."
            )
        for what in ("revision", "sha256"):
            mine, theirs = self.source.get(what, ""), getattr(model.source, what)
            if mine and theirs and mine != theirs:
                raise InputError(f"this {self.kind} Writer was trained on {what} {mine}, the model is {theirs}.")

    def save(self, folder: str | Path, *, training: Mapping[str, Any] | None = None) -> Path:
        """Write `adapter/` (as PEFT saves it), `packet.safetensors` and, last, `writer.json`; returns the folder.

        Args:
            training: how it was trained, kept in `writer.json` as it is given.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        files = [*(_ADAPTER if self.peft is not None else ()), *((_PACKET,) if self.header is not None else ())]
        if self.peft is not None:
            self._save_adapter(folder / "adapter")
        if self.header is not None and self.trailer is not None:
            packet = {"header": self.header, "trailer": self.trailer}
            with replacing(folder / _PACKET) as temporary:
                save_file({name: t.detach().cpu().contiguous() for name, t in packet.items()}, temporary)
        about = {
            "format": FORMAT,
            "kind": self.kind,
            "model_id": self.model_id,
            "source": dict(self.source),
            "settings": dict(self.settings),
            "sha256": {name: sha256(folder / name) for name in files},
            "training": dict(training or {}),
        }
        with replacing(folder / ABOUT) as temporary:
            temporary.write_text(json.dumps(about, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return folder

    def _save_adapter(self, folder: Path) -> None:
        temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
        assert self.peft is not None
        try:
            # The embeddings are not trained; "auto" would ask the hub for the base model's config.
            self.peft.save_pretrained(str(temporary), save_embedding_layers=False)
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    @classmethod
    def load(cls, folder: str | Path, model: Model) -> Writer:
        """Read a Writer, from its own folder or from that of its training run, and check that it is this model's.

        Raises InputError when a file is missing or is not the one that was written, or for another model.
        """
        folder = find_about(folder).parent
        about = _read(folder / ABOUT)
        for name, digest in about["sha256"].items():
            if not (folder / name).is_file():
                raise InputError(f"{folder / name} is missing: the Writer in {folder} is not whole. Train it again.")
            if sha256(folder / name) != digest:
                raise InputError(f"{folder / name} is not the file that {ABOUT} describes (sha256). Train it again.")
        kind, files = about["kind"], set(about["sha256"])
        want = {*(_ADAPTER if kind != "packet" else ()), *((_PACKET,) if kind != "sempic" else ())}
        if kind not in KINDS or files != want:
            raise InputError(f"{folder / ABOUT} describes a Writer of kind {kind!r} with the files {sorted(files)}.")
        bare = cls(kind, None, None, None, about["model_id"], about["source"], about["settings"])
        bare.check(model)
        peft, packet = None, {}
        if kind != "packet":
            with _without_noise(), faults_of(f"the adapter in {folder}", "Train it again."):
                peft = _peft().PeftModel.from_pretrained(
                    _twin(model), str(folder / "adapter"), is_trainable=True, torch_device=str(model.device)
                )
            peft.eval()
        if kind != "sempic":
            try:
                packet = load_file(folder / _PACKET, device=str(model.device))
            except SafetensorError as error:
                raise InputError(f"{folder / _PACKET} is not a safetensors file: {error}") from error
        with faults_of(str(folder / _PACKET), "Train it again."):
            header, trailer = (nn.Parameter(packet[name]) if packet else None for name in ("header", "trailer"))
        return cls(kind, peft, header, trailer, bare.model_id, bare.source, bare.settings)


def find_about(folder: str | Path) -> Path:
    """`writer.json` of a folder, or of the best Writer of a training run. Raises InputError when there is neither."""
    found = next((p for p in (Path(folder) / ABOUT, Path(folder) / "best" / ABOUT) if p.is_file()), None)
    if found is None:
        raise InputError(f"there is no {ABOUT} in {folder}: no trained Writer is kept there. kvprobe train makes one.")
    return found


def _read(path: Path) -> dict[str, Any]:
    """What `writer.json` says. Raises InputError when it describes something else."""
    about = read_json(path, "description of a Writer", of=dict)
    if about.get("format") != FORMAT:
        raise InputError(f"{path} describes no Writer of format {FORMAT!r} (found {about.get('format')!r}).")
    for name, kind in (("kind", str), ("model_id", str), ("source", dict), ("settings", dict), ("sha256", dict)):
        entry(about, name, kind, str(path), "Train it again.")
    return about


def new_writer(
    model: Model,
    kind: Kind,
    *,
    rank: int = 8,
    alpha: float = 16,
    targets: Sequence[str] = TARGETS,
    wrapper_tokens: int = 8,
    seed: int = 0,
) -> Writer:
    """An untrained Writer. Its LoRA adds nothing yet (B = 0), so that it compiles what the plain model does.

    Args:
        rank, alpha, targets: of the LoRA, without dropout (SemPIC's values). Targets are some of q_proj, k_proj,
            v_proj and o_proj; families that call them otherwise, or fuse them, get the module that does the work.
        wrapper_tokens: vectors in the header, and as many in the trailer, drawn from N(0, 0.02) (KV Packet's values).
        seed: of all that is drawn.

    Raises InputError for an unknown kind, target or size; UnsupportedError where PEFT is not installed, or the
    attention's projections are not known.
    """
    if kind not in KINDS:
        raise InputError(f"kind={kind!r}: choose from {', '.join(KINDS)}.{nearest(str(kind), KINDS)}")
    settings: dict[str, Any] = {"seed": seed}
    peft = header = trailer = None
    if kind != "packet":
        if rank < 1:
            raise InputError(f"rank={rank}: give at least 1.")
        settings |= {"rank": rank, "alpha": float(alpha), "targets": list(targets)}
        library, twin = _peft(), _twin(model)
        config = library.LoraConfig(
            r=rank, lora_alpha=alpha, target_modules=_names(twin, targets), lora_dropout=0.0, task_type="CAUSAL_LM"
        )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            with _without_noise():
                peft = library.get_peft_model(twin, config)
        # The repository, not where it lies on this machine.
        peft.peft_config["default"].base_model_name_or_path = model.source.repo or model.source.name
        peft.eval()
    if kind != "sempic":
        if wrapper_tokens < 1:
            raise InputError(f"wrapper_tokens={wrapper_tokens}: give at least 1.")
        settings |= {"wrapper_tokens": wrapper_tokens}
        embedding = next(model.hf.get_input_embeddings().parameters())
        dtype = torch.promote_types(embedding.dtype, torch.float32)
        draw = torch.randn(2, wrapper_tokens, embedding.shape[1], generator=torch.Generator().manual_seed(seed))
        header, trailer = (nn.Parameter(t.to(embedding.device, dtype)) for t in draw * PACKET_STD)
    return Writer(kind, peft, header, trailer, model.model_id, model.source.to_dict(), settings)


@contextmanager
def _without_noise() -> Iterator[None]:
    """Without the warning that PEFT asks transformers by a name on its way out."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        yield


def _twin(model: Model) -> PreTrainedModel:
    """The model again, with modules of its own around the same weights and buffers."""
    hf = model.hf
    return copy.deepcopy(hf, {id(t): t for t in (*hf.parameters(), *hf.buffers())})


def _names(hf: PreTrainedModel, targets: Sequence[str]) -> list[str]:
    """Full names of the attention's projections that `targets` stand for, in every layer."""
    unknown = [target for target in targets if target not in TARGETS]
    if unknown or not targets:
        raise InputError(f"targets={tuple(targets)}: choose some of {', '.join(TARGETS)}.")
    wanted = {
        id(module)
        for layer in compat.layers(hf)
        for name, module in compat.attention_projections(layer).items()
        if name in targets
    }
    return [name for name, module in hf.named_modules() if id(module) in wanted]


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise UnsupportedError(
            'a Writer with a LoRA adapter needs PEFT, which is not installed: pip install "kvnotes-interp[train]"'
        ) from error
    return peft
