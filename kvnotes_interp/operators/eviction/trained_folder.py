"""A trained compactor on disk, of any kind: `KIND.safetensors`, and `KIND.json` with what it is and whose.

    FOLDER = TrainedFolder("still", "Still compactor")
    FOLDER.write(compactor, "runs/bio/best", {"step": 240}); FOLDER.kept(model, "runs/bio", read)

A compactor is named by its own folder or by that of its training run, whose `best` is then meant.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import Parameter

from kvnotes_interp.downloads import sha256
from kvnotes_interp.errors import InputError
from kvnotes_interp.files import entry, read_json, replacing

if TYPE_CHECKING:
    from kvnotes_interp.model import Model

BEST = "best"
"""Where `training.distill` leaves the best state of a run, inside the run's folder."""


class Settings(Protocol):
    """Pydantic settings."""

    def model_dump(self) -> dict[str, Any]: ...


class TrainedCompactor(Protocol):
    """What is written: parameters by name, settings, and the model that they belong to."""

    @property
    def settings(self) -> Settings: ...
    @property
    def model_id(self) -> str: ...
    @property
    def source(self) -> Mapping[str, str]: ...
    @property
    def n_parameters(self) -> int: ...

    def parameters(self) -> dict[str, Parameter]: ...


@dataclass(frozen=True)
class TrainedFolder:
    """The files of one kind of compactor.

    Attributes:
        kind: as `kvprobe train KIND` and KIND@FOLDER have it; it names the files.
        title: what messages call it, such as "Still compactor".
    """

    kind: str
    title: str
    _kept: WeakKeyDictionary[Model, dict[Path, tuple[str, Any]]] = field(
        default_factory=WeakKeyDictionary, repr=False, compare=False
    )

    @property
    def about(self) -> str:
        """Name of the description."""
        return f"{self.kind}.json"

    @property
    def tensors(self) -> str:
        """Name of the file of numbers."""
        return f"{self.kind}.safetensors"

    @property
    def format(self) -> str:
        """What the description calls itself."""
        return f"{self.kind}/1"

    def write(self, compactor: TrainedCompactor, folder: Path, training: Mapping[str, Any]) -> Path:
        """Write both files, the description last; returns the folder."""
        with replacing(folder / self.tensors) as temporary:
            save_file({name: t.detach().cpu().contiguous() for name, t in compactor.parameters().items()}, temporary)
        about = {
            "format": self.format,
            "model_id": compactor.model_id,
            "source": dict(compactor.source),
            "settings": compactor.settings.model_dump(),
            "n_parameters": compactor.n_parameters,
            "sha256": {self.tensors: sha256(folder / self.tensors)},
            "training": dict(training),
        }
        with replacing(folder / self.about) as temporary:
            temporary.write_text(json.dumps(about, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return folder

    def find(self, folder: str | Path) -> Path:
        """The description in a folder, or in the `best` of a training run. Raises InputError when there is neither."""
        folder = Path(folder)
        found = next((p for p in (folder / self.about, folder / BEST / self.about) if p.is_file()), None)
        if found is None:
            raise InputError(
                f"there is no {self.about} in {folder} nor in its {BEST}: no trained {self.title} is kept there. "
                f"kvprobe train {self.kind} --out DIR makes one; name it {self.kind}@DIR."
            )
        return found

    def read_about(self, folder: str | Path) -> dict[str, Any]:
        """What the description says. Raises InputError when there is none or it describes something else."""
        path = self.find(folder)
        about = read_json(path, f"description of a {self.title}", of=dict)
        if about.get("format") != self.format:
            raise InputError(f"{path} describes no {self.title} of format {self.format!r} ({about.get('format')!r}).")
        for name, kind in (("model_id", str), ("source", dict), ("settings", dict), ("sha256", dict)):
            entry(about, name, kind, str(path), "Train it again.")
        return about

    def read_tensors(self, folder: str | Path) -> dict[str, Tensor]:
        """The numbers. Raises InputError when the file is missing or is not the one that was described."""
        about, folder = self.read_about(folder), self.find(folder).parent
        path = folder / self.tensors
        if not path.is_file():
            raise InputError(f"{path} is missing: the {self.title} in {folder} is not whole. Train it again.")
        if sha256(path) != about["sha256"].get(self.tensors):
            raise InputError(f"{path} is not the file that {self.about} describes (sha256). Train it again.")
        try:
            return load_file(path)
        except SafetensorError as error:
            raise InputError(f"{path} is not a safetensors file: {error}") from error

    def kept(self, model: Model, folder: str | Path, read: Callable[[Path, Model], Any]) -> Any:
        """The compactor of a folder, `read` once for as long as the model is there, and again when written anew.

        Raises InputError without a folder, and as `find` and `read` do.
        """
        if not str(folder):
            raise InputError(
                f"{self.kind} needs the folder of a trained {self.title}: write {self.kind}@FOLDER; kvprobe train "
                f"{self.kind} makes one."
            )
        about = self.find(folder).resolve()
        known, digest = self._kept.setdefault(model, {}), sha256(about)
        if about not in known or known[about][0] != digest:
            known[about] = (digest, read(about.parent, model))
        return known[about][1]
