"""Compactors: ways to turn a cache into one of fewer slots, each in a small file, with an account of its cost.

    compacted = eviction.find("snapkv")(model, cache, budget=64)
    compacted.cache, compacted.layer_tokens
    eviction.find("streaming@8")            # NAME@VALUE: a compactor with the one option of its name set

A compactor is a function `(model, cache, *, budget, sliding, options) -> Compacted`, for a `KVCache` or a
`CompactCache`; add it to `COMPACTORS`. `budget` is a number of slots per KV head, for all layers or one per layer;
`budget_of(cache, 8)` is that of 8x compression. A budget of all slots gives the cache unchanged, and `end`, the next
token's position, stays what it was (unless an option says so). Nothing heavy is imported until one is used.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvnotes_interp.errors import InputError, nearest

if TYPE_CHECKING:
    from kvnotes_interp.compact import Cache
    from kvnotes_interp.model import Model
    from kvnotes_interp.operators.eviction.compacted import Budget
    from kvnotes_interp.operators.eviction.compacted import Compacted as Compacted
    from kvnotes_interp.operators.eviction.compacted import budget_of as budget_of


@dataclass(frozen=True)
class Compactor:
    """A compactor by name: `compactor(model, cache, budget=64) -> Compacted`.

    Args:
        name: how it is called in tables and on the command line.
        module, function: where it is defined, relative to `kvnotes_interp.operators`.
        about: one line. source: the paper, where there is one.
        setting: the option that NAME@VALUE sets, or an empty string. options: those that this name stands for.
        number: int or float, where that option is a number; it is told here, so that asking imports nothing heavy.
    """

    name: str
    module: str
    function: str
    about: str
    source: str = ""
    setting: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    number: type[int] | type[float] | None = None

    def __call__(self, model: Model, cache: Cache, *, budget: Budget, **options: Any) -> Compacted:
        """Run it; `options` go on top of the name's own."""
        return self._implementation(model, cache, budget=budget, **{**self.options, **options})

    def takes(self, option: str) -> bool:
        """Whether it has this option ("seed"; "observe": token ids whose attention decides)."""
        return option in inspect.signature(self._implementation).parameters

    def value(self, text: str) -> Any:
        """What NAME@`text` sets the option to: a number where it is one, else the text. Raises InputError."""
        if self.number is None:
            return text
        try:
            value = self.number(text)
        except ValueError:
            value = None
        if value is None or not 0 <= value < math.inf:
            raise InputError(
                f"compactor {self.name}@{text}: {self.setting} is a number, not {text!r}; give one from 0."
            )
        return value

    @property
    def _implementation(self) -> Callable[..., Compacted]:
        return getattr(importlib.import_module(f"kvnotes_interp.operators.{self.module}"), self.function)


COMPACTORS: dict[str, Compactor] = {
    compactor.name: compactor
    for compactor in (
        Compactor(
            "random",
            "eviction.random_slots",
            "random_slots",
            "slots drawn at random (control)",
            "",
            "sinks",
            number=int,
        ),
        Compactor(
            "streaming",
            "eviction.streaming",
            "streaming",
            "the first slots and the last ones: @sinks",
            "StreamingLLM, arXiv 2309.17453",
            "sinks",
            number=int,
        ),
        Compactor(
            "key_norm",
            "eviction.key_norm",
            "key_norm",
            "slots whose keys have the lowest norm",
            "Devoto et al., arXiv 2406.11430",
        ),
        Compactor(
            "h2o",
            "eviction.h2o",
            "h2o",
            "slots that drew most attention from all tokens, and recent ones: @recent share",
            "H2O, arXiv 2306.14048",
            "recent",
            number=float,
        ),
        Compactor(
            "snapkv",
            "eviction.snapkv",
            "snapkv",
            "slots that the last tokens attend to, and these tokens: @window",
            "SnapKV, arXiv 2404.14469",
            "window",
            number=int,
        ),
        Compactor(
            "attention_matching",
            "eviction.attention_matching",
            "attention_matching",
            "keys of highest attention, biases and values fitted to attend as the whole: @references",
            "Attention Matching, arXiv 2602.16284",
            "references",
            number=int,
        ),
        Compactor(
            "trained_cache",
            "eviction.trained_cache",
            "trained_cache",
            "slots trained on this one context by gradient descent, slow: @steps",
            "Cartridges, arXiv 2506.06266",
            "steps",
            number=int,
        ),
        Compactor(
            "still",
            "still.operator",
            "still",
            "slots written by a trained Perceiver per layer: @folder",
            "Still, arXiv 2606.07878",
            "adapter",
        ),
        Compactor(
            "scorer",
            "scorer.operator",
            "scorer",
            "slots that a trained scorer per KV head chooses: @folder",
            "KV-Distill, arXiv 2503.10337",
            "adapter",
        ),
    )
}

__all__ = ["COMPACTORS", "Compacted", "Compactor", "budget_of", "find", "names"]


def names() -> tuple[str, ...]:
    """Names of all compactors."""
    return tuple(COMPACTORS)


def find(name: str) -> Compactor:
    """The compactor of this name, or of NAME@VALUE: that compactor with the one option of its name set to the value.

    Raises InputError with the nearest right name.
    """
    base, at, text = str(name).partition("@")
    if base not in COMPACTORS:
        raise InputError(
            f"there is no compactor {name!r}.{nearest(base, COMPACTORS)} Compactors: {', '.join(COMPACTORS)}."
        )
    found = COMPACTORS[base]
    if not at:
        return found
    if not found.setting:
        raise InputError(f"compactor {name!r}: {base} has no option to set; write {base}.")
    return replace(found, name=name, options={**found.options, found.setting: found.value(text)})


def __getattr__(name: str) -> Any:
    if name not in ("Compacted", "budget_of"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{nearest(name, __all__)}")
    value = getattr(importlib.import_module(f"{__name__}.compacted"), name)
    globals()[name] = value
    return value
