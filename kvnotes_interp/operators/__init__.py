"""Operators: ways to make the cache of a prompt that is cut into blocks, each with an exact account of its cost.

    blocks = operators.cut_texts(model.tokenizer, prefix, documents, suffix).blocks
    made = operators.find("no_recompute")(model, blocks)
    made.cache, made.layer_tokens
    operators.find("cacheblend@0.3")        # NAME@VALUE: an operator with the one option of its name set
    operators.find("sempic@runs/bio")       # a learned one: the folder of its trained Writer

An operator is a pure function `(model, blocks, *, options) -> Made` in a small file of its own; add it to `OPERATORS`.
Nothing heavy is imported until one is used.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvnotes_interp.errors import InputError, nearest

if TYPE_CHECKING:
    from kvnotes_interp.model import Model
    from kvnotes_interp.operators.blocks import Blocks as Blocks
    from kvnotes_interp.operators.blocks import CutText as CutText
    from kvnotes_interp.operators.blocks import cut_pair as cut_pair
    from kvnotes_interp.operators.blocks import cut_texts as cut_texts
    from kvnotes_interp.operators.compose import full_recompute as full_recompute
    from kvnotes_interp.operators.compose import no_recompute as no_recompute
    from kvnotes_interp.operators.compose import precompile as precompile
    from kvnotes_interp.operators.made import Compiled as Compiled
    from kvnotes_interp.operators.made import Made as Made
    from kvnotes_interp.operators.skills import Skill as Skill
    from kvnotes_interp.operators.skills import SkillStore as SkillStore
    from kvnotes_interp.operators.skills import precompile_skill as precompile_skill
    from kvnotes_interp.operators.splice import Spliced as Spliced
    from kvnotes_interp.operators.splice import attach as attach
    from kvnotes_interp.operators.splice import splice_skills as splice_skills
    from kvnotes_interp.operators.writer import Writer as Writer
    from kvnotes_interp.operators.writer import new_writer as new_writer


@dataclass(frozen=True)
class Operator:
    """An operator by name: `operator(model, blocks) -> Made`.

    Args:
        name: how it is called in tables and on the command line.
        module, function: where it is defined, relative to this package.
        about: one line. source: the paper, where there is one.
        options: keyword arguments that this name stands for.
    """

    name: str
    module: str
    function: str
    about: str
    source: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, model: Model, blocks: Blocks, **options: Any) -> Made:
        """Run it; `options` go on top of the name's own."""
        return self._implementation(model, blocks, **{**self.options, **options})

    def takes(self, option: str) -> bool:
        """Whether it has this option ("compiled": caches made beforehand; "seed")."""
        return option in inspect.signature(self._implementation).parameters

    @property
    def adapter(self) -> str:
        """Folder of the trained Writer that compiles for this operator; empty where the plain model does."""
        return str(self.options.get("adapter", ""))

    def precompile(self, model: Model, blocks: Blocks) -> Compiled:
        """What this operator can be handed as `compiled`. Operators with the same `adapter` share it."""
        if "adapter" in self.options:
            from kvnotes_interp.operators import learned

            return learned.precompile(model, blocks, adapter=self.options["adapter"], kind=self.function)
        from kvnotes_interp.operators import compose

        return compose.precompile(model, blocks)

    @property
    def _implementation(self) -> Callable[..., Made]:
        return getattr(importlib.import_module(f"{__name__}.{self.module}"), self.function)


OPERATORS: dict[str, Operator] = {
    operator.name: operator
    for operator in (
        Operator("full_recompute", "compose", "full_recompute", "all tokens prefilled together: the reference"),
        Operator(
            "no_recompute",
            "compose",
            "no_recompute",
            "chunks prefilled alone, keys moved into place, joined",
            "SemPIC, arXiv 2607.28069",
        ),
        Operator(
            "no_recompute_unmoved",
            "compose",
            "no_recompute",
            "chunks prefilled alone and joined, keys not moved",
            "Notes, arXiv 2606.17107 (naive control)",
            {"move_keys": False},
        ),
        Operator(
            "splice",
            "splice",
            "splice",
            "no_recompute, then the first tokens of every chunk recomputed: @tokens, or @all",
            "Notes, arXiv 2606.17107",
            {"seam_repair": 8},
        ),
        Operator(
            "epic",
            "epic",
            "epic",
            "no_recompute, then a share of the tokens, the first of every chunk, recomputed: @share",
            "EPIC, arXiv 2410.15332",
            {"share": 0.15},
        ),
        Operator(
            "cacheblend",
            "cacheblend",
            "cacheblend",
            "no_recompute, then the share of the tokens that an early layer changes most recomputed: @share",
            "CacheBlend, arXiv 2405.16444",
            {"share": 0.15},
        ),
        Operator(
            "random_recompute",
            "random_recompute",
            "random_recompute",
            "no_recompute, then a random share of the tokens recomputed: @share",
            "SemPIC, arXiv 2607.28069 (control)",
            {"share": 0.15},
        ),
        Operator(
            "sempic",
            "sempic",
            "sempic",
            "chunks compiled by the model with a trained adapter, joined: @folder",
            "SemPIC, arXiv 2607.28069",
            {"adapter": ""},
        ),
        Operator(
            "packet",
            "packet",
            "packet",
            "chunks compiled between trained vectors, joined: @folder",
            "KV Packet, arXiv 2604.13226",
            {"adapter": ""},
        ),
        Operator(
            "joint",
            "joint",
            "joint",
            "both: the adapted model, and trained vectors around each chunk: @folder",
            "SemPIC, arXiv 2607.28069",
            {"adapter": ""},
        ),
    )
}

_NAMES = {
    "Blocks": "blocks",
    "CutText": "blocks",
    "cut_pair": "blocks",
    "cut_texts": "blocks",
    "Compiled": "made",
    "Made": "made",
    "full_recompute": "compose",
    "no_recompute": "compose",
    "precompile": "compose",
    "Skill": "skills",
    "SkillStore": "skills",
    "precompile_skill": "skills",
    "Spliced": "splice",
    "attach": "splice",
    "splice_skills": "splice",
    "Writer": "writer",
    "new_writer": "writer",
}

__all__ = ["OPERATORS", "Operator", "adapters", "find", "names", "setting", *_NAMES]  # pyright: ignore[reportUnsupportedDunderAll]


def names() -> tuple[str, ...]:
    """Names of all operators."""
    return tuple(OPERATORS)


def find(name: str) -> Operator:
    """The operator of this name, or of NAME@VALUE: that operator with the one option of its name set to the value.

    Raises InputError with the nearest right name, and for a learned operator without a folder.
    """
    base, at, value = str(name).partition("@")
    if base not in OPERATORS:
        raise InputError(f"there is no operator {name!r}.{nearest(base, OPERATORS)} Operators: {', '.join(OPERATORS)}.")
    found = OPERATORS[base]
    option = setting(found)
    if option == "adapter" and not value:
        raise InputError(f"operator {name!r} needs a trained Writer: {base}@FOLDER; kvprobe train {base} makes one.")
    if not at:
        return found
    if not option:
        raise InputError(f"operator {name!r}: {base} has no option to set; write {base}.")
    return replace(
        found,
        name=name,
        options={**found.options, option: value if option == "adapter" else _value(name, option, value)},
    )


def setting(operator: Operator) -> str:
    """The option that NAME@VALUE sets ("share", "seam_repair" or "adapter"), or an empty string."""
    return next((option for option in ("share", "seam_repair", "adapter") if option in operator.options), "")


def adapters(operators: Mapping[str, Any]) -> dict[str, str]:
    """The sha256 of the Writer behind every learned operator of `{label: operator}`, as manifests record it."""
    learned = {label: one for label, one in operators.items() if isinstance(one, Operator) and one.adapter}
    if not learned:
        return {}
    from kvnotes_interp.operators.learned import adapter_sha256

    return {label: adapter_sha256(one.adapter) for label, one in learned.items()}


def _value(name: str, option: str, text: str) -> int | float | str:
    """A share from 0 to 1, or a number of tokens from 0 ("all": every one). Raises InputError for another."""
    if text == "all" and option == "seam_repair":
        return text
    right = "a share from 0 to 1" if option == "share" else "a whole number of tokens from 0, or all"
    try:
        value = float(text) if "." in text or "e" in text else int(text)
    except ValueError:
        raise InputError(f"operator {name!r}, {option}={text!r}: {text!r} is no number; write {right}.") from None
    if not (0 <= value <= 1 if option == "share" else isinstance(value, int) and value >= 0):
        raise InputError(f"operator {name!r}, {option}={value!r}: out of range; write {right}.")
    return value


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{nearest(name, __all__)}")
    value = getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
    globals()[name] = value
    return value
