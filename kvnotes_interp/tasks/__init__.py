"""Tasks: families of counterfactual prompt pairs that differ only in one field.

    pairs = tasks.pronoun(n=64, seed=0)               # the same as tasks.load("pronoun", n=64, seed=0)
    pairs = tasks.load("my_family.yaml", split="test")
    encoded, set_aside = tasks.encode_all(tokenizer, pairs)

A family is one small file; `kvnotes_interp/tasks/family.py` describes the format. Families whose pairs are laid out in
documents (`biography_pairs`, `gate_documents`) are functions in a module of their own. Nothing here imports torch or
transformers: the tokenizer is passed in.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from kvnotes_interp.errors import InputError, nearest
from kvnotes_interp.tasks import biography_pairs as _biography_pairs
from kvnotes_interp.tasks import documents
from kvnotes_interp.tasks import gate_documents as _gate_documents
from kvnotes_interp.tasks.biography_pairs import biography_pairs
from kvnotes_interp.tasks.encode import EncodedPair, SetAside, encode, encode_all
from kvnotes_interp.tasks.gate_documents import gate_documents
from kvnotes_interp.tasks.pair import Kind, Message, Pair, Piece, Split
from kvnotes_interp.tasks.polarity_pairs import polarity_pairs

__all__ = [
    "EncodedPair",
    "FamilyInfo",
    "Message",
    "Pair",
    "Piece",
    "SetAside",
    "biography_pairs",
    "documents",
    "encode",
    "encode_all",
    "families",
    "gate_documents",
    "info",
    "load",
    "load_items",
    "polarity_pairs",
]

# Families that are made by a function: name -> module, function.
_MADE: dict[str, tuple[Any, Callable[..., list[Pair]]]] = {
    "biography_pairs": (_biography_pairs, biography_pairs),
    "gate_documents": (_gate_documents, gate_documents),
}


@dataclass(frozen=True)
class FamilyInfo:
    """What a family is.

    Args:
        name: as given to `load`.
        kind: "derived", "verbatim" or "control".
        about, source: one line each.
        chat: whether its prompts go through a chat template.
        options: options of `load` for this family, with their defaults.
        instances: number of distinct instances, filler lines and the order of old and new aside.
        contents: number of contents, the upper bound of the effective n.
    """

    name: str
    kind: Kind
    about: str
    source: str
    chat: bool
    options: dict[str, Any] = field(default_factory=dict)
    instances: int = 0
    contents: int = 0


class UnknownFamilyError(InputError, AttributeError):
    """There is no family of this name; also an AttributeError so that `hasattr(tasks, name)` works."""


def load(
    name_or_path: str | Path, *, n: int = 64, seed: int = 0, split: Split | None = None, **options: Any
) -> list[Pair]:
    """Draw `n` distinct pairs of a family.

    Args:
        name_or_path: a packaged family, or the path of a .yaml, .yml or .json family file.
        n: number of pairs. They are spread over contents, so a small `n` has about as many contents.
        seed: the same seed gives the same pairs on every machine; a smaller `n` gives a prefix of a larger one.
        split: "train", "test" or None for both in turn. No content is in both, whatever the seed.
        options: `fillers` (number of neutral rules) and `chat` (False: plain text), where the family has them; those
            in documents have options of their own, see `info`.

    Raises:
        InputError: unknown family or option, a faulty file, or fewer than `n` distinct instances.
    """
    from kvnotes_interp.tasks.family import find
    from kvnotes_interp.tasks.sampling import sample

    if name_or_path in _MADE:
        _check_options(str(name_or_path), options)
        return _MADE[str(name_or_path)][1](n=n, seed=seed, split=split, **options)
    return sample(find(name_or_path), n=n, seed=seed, split=split, options=options)


def load_items(
    name_or_path: str | Path, *, n: int = 64, seed: int = 0, split: Split | None = None, **options: Any
) -> list[Pair] | list[documents.Question]:
    """Pairs of a family, or questions of a document task; see `load` and `documents.load`.

    Raises InputError for a name that is neither.
    """
    from kvnotes_interp.tasks.family import FILE_TYPES

    name, known = str(name_or_path), (*documents.names(), *documents.names_from_files())
    if name not in (*known, *_names()) and "/" not in name and not name.endswith(FILE_TYPES):
        raise InputError(
            f'There is no task family "{name}".{nearest(name, [*known, *_names()])} Families of pairs: '
            f"{', '.join(_names())}; document tasks: {', '.join(known)}; or give the path of a family file."
        )
    if name in known:
        return documents.load(name, n=n, seed=seed, split=split, **options)
    return load(name_or_path, n=n, seed=seed, split=split, **options)


def info(name_or_path: str | Path) -> FamilyInfo:
    """Describe one family, packaged or from a file."""
    from kvnotes_interp.tasks.family import find
    from kvnotes_interp.tasks.sampling import count_instances, default_options

    if name_or_path in _MADE:
        name, module = str(name_or_path), _MADE[str(name_or_path)][0]
        return FamilyInfo(name, module.KIND, module.ABOUT, module.SOURCE, False, _options(name), *module.counts())
    file = find(name_or_path)
    spec = file.spec
    instances, contents = count_instances(file)
    return FamilyInfo(
        file.name, spec.kind, spec.about, spec.source, spec.chat, default_options(file), instances, contents
    )


def families() -> dict[str, FamilyInfo]:
    """All packaged families by name."""
    return {name: info(name) for name in _names()}


def _names() -> tuple[str, ...]:
    from kvnotes_interp.tasks.family import packaged

    return tuple(sorted((*packaged(), *_MADE)))


def _options(name: str) -> dict[str, Any]:
    """Options of a family that a function makes, with their defaults."""
    parameters = inspect.signature(_MADE[name][1]).parameters
    return {key: value.default for key, value in parameters.items() if key not in ("n", "seed", "split")}


def _check_options(name: str, given: Mapping[str, Any]) -> None:
    known = _options(name)
    for option in given:
        if option not in known:
            raise InputError(
                f'Family "{name}" has no option "{option}".{nearest(option, known)} Its options: {", ".join(known)} '
                "(besides n, seed and split)."
            )


def __getattr__(name: str) -> Callable[..., list[Pair]]:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    names = _names()
    if name not in names:
        raise UnknownFamilyError(
            f'There is no task family "{name}".{nearest(name, names)} Families: {", ".join(names)}.'
        )
    return partial(load, name)


def __dir__() -> list[str]:
    return sorted({*__all__, "info", *_names()})
