"""What trained compactors share: modules per layer, settings, the model they belong to, and their files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from kvnotes_interp.errors import InputError

if TYPE_CHECKING:
    from kvnotes_interp.model import Model


@dataclass(frozen=True, eq=False)
class TrainedModules:
    """Modules of one model, one per layer.

    Attributes:
        layers: in at least float32.
        settings: what they were made with (pydantic).
        model_id: of the model that they belong to. source: that model's, as manifests record it.
    """

    title: ClassVar[str]
    """What messages call it."""

    layers: nn.ModuleList
    settings: Any
    model_id: str
    source: Mapping[str, str] = field(default_factory=dict)

    def parameters(self) -> dict[str, nn.Parameter]:
        """What is trained, by name."""
        return dict(self.layers.named_parameters())

    @property
    def n_parameters(self) -> int:
        """How many numbers are trained; the model's own are `model.shape.n_params`."""
        return sum(parameter.numel() for parameter in self.layers.parameters())

    @property
    def fingerprint(self) -> str:
        """Sixteen hex digits of everything that decides what it does: settings and trained numbers."""
        digest = hashlib.sha256(json.dumps([self.model_id, self.settings.model_dump()], sort_keys=True).encode())
        for name, parameter in sorted(self.parameters().items()):
            digest.update(f"{name}|{parameter.dtype}".encode())
            digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]

    def check(self, model: Model) -> None:
        """Raise InputError unless it belongs to the model."""
        if self.model_id != model.model_id:
            raise InputError(
                f"this {self.title} belongs to {self.model_id!r}, the model at hand is {model.model_id!r}: its numbers "
                "are for other keys. Load that model, or train one for this model."
            )
        for what in ("revision", "sha256"):
            mine, theirs = self.source.get(what, ""), getattr(model.source, what)
            if mine and theirs and mine != theirs:
                raise InputError(f"this {self.title} was trained on {what} {mine}, the model is {theirs}.")

    def set(self, tensors: Mapping[str, Tensor]) -> None:
        """Set all parameters, in place, to the tensors of these names. Raises InputError when they are others."""
        own = self.parameters()
        wrong = set(own) ^ set(tensors) or {n for n, p in own.items() if p.shape != tensors[n].shape}
        if wrong:
            raise InputError(f"these are not the {len(own)} tensors of this {self.title}: {sorted(wrong)[0]} differs.")
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(tensors[name])
