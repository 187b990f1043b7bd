"""Does another library compute what this package computes? Gaps per kind of activation and layer, and the refusal.

A gap is the largest absolute difference over the largest absolute value of ours. Rounding explains up to
`checks.LIMITS` of the dtype; a missing rotation, a wrong mask or a cache that is ignored gives 0.1 to 1.

What agreement does not prove: that both are right. The engine is tested against plain forwards elsewhere.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvnotes_interp.checks import LIMITS
from kvnotes_interp.errors import InputError, UnsupportedError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvnotes_interp.model import Model


@dataclass(frozen=True)
class Gap:
    """One comparison. `layer` is None for what belongs to no layer; `detail` says what a number cannot."""

    kind: str
    layer: int | None
    value: float
    limit: float
    detail: str = ""

    @property
    def passed(self) -> bool:
        return math.isfinite(self.value) and self.value <= self.limit

    def __str__(self) -> str:
        where = "" if self.layer is None else f" in layer {self.layer}"
        more = f" ({self.detail})" if self.detail else ""
        return f"{self.kind}{where} off by {self.value:.2g} of ours, limit {self.limit:.2g}{more}"


@dataclass(frozen=True)
class Parity:
    """All comparisons of one model; `versions` name the pair that was compared."""

    model: str
    versions: str
    gaps: tuple[Gap, ...]

    @property
    def passed(self) -> bool:
        return all(g.passed for g in self.gaps)

    @property
    def failures(self) -> tuple[Gap, ...]:
        return tuple(g for g in self.gaps if not g.passed)

    def worst(self, kind: str) -> Gap:
        """The largest gap of one kind, over its layers. Raises InputError for a kind that was not compared."""
        here = [g for g in self.gaps if g.kind == kind]
        if not here:
            raise InputError(f"{kind!r} was not compared; these were: {', '.join(self.kinds)}.")
        return max(here, key=lambda g: g.value if math.isfinite(g.value) else math.inf)

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(g.kind for g in self.gaps))

    def require(self) -> Parity:
        """This report if every comparison passed; else UnsupportedError naming versions, layers and gaps."""
        if self.passed:
            return self
        kinds = dict.fromkeys(g.kind for g in self.failures)
        raise UnsupportedError(
            f"{self.versions} do not compute on {self.model} what this package computes: "
            + "; ".join(str(self._first(kind)) for kind in kinds)
            + ". Nothing read through that library can be trusted here; install the versions in constraints.txt, or "
            "use the package's own engine."
        )

    def _first(self, kind: str) -> Gap:
        """The earliest failure of a kind: later layers only inherit it."""
        return next(g for g in self.failures if g.kind == kind)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        gaps = [{**vars(g), "passed": g.passed} for g in self.gaps]
        return {"model": self.model, "versions": self.versions, "passed": self.passed, "gaps": gaps}

    def __str__(self) -> str:
        lines = [f"{self.versions} against this package on {self.model}: {'agree' if self.passed else 'DISAGREE'}"]
        return "\n".join([*lines, *(f"  {self.worst(kind)}" for kind in self.kinds)])


def gap(kind: str, layer: int | None, theirs: Tensor | None, ours: Tensor, limit: float) -> Gap:
    """Compare two tensors. What is missing, has another shape or is not finite counts as infinitely far off."""
    if theirs is None:
        return Gap(kind, layer, math.inf, limit, "not there")
    if theirs.shape != ours.shape:
        return Gap(kind, layer, math.inf, limit, f"shape {tuple(theirs.shape)}, ours {tuple(ours.shape)}")
    a, b = theirs.detach().cpu().double(), ours.detach().cpu().double()
    value = float((a - b).abs().max() / b.abs().max().clamp_min(1e-12)) if b.numel() else 0.0
    return Gap(kind, layer, value if math.isfinite(value) else math.inf, limit)


def gaps_by_layer(kind: str, theirs: Sequence[Tensor | None] | None, ours: Iterable[Tensor], limit: float) -> list[Gap]:
    """`gap` for each layer; `theirs=None` when the library gave nothing of this kind."""
    found = list(ours)
    others = [None] * len(found) if theirs is None else [*theirs, *[None] * (len(found) - len(theirs))]
    return [gap(kind, layer, a, b, limit) for layer, (a, b) in enumerate(zip(others, found, strict=False))]


def limit_of(model: Model) -> float:
    """What rounding explains in this model's dtype."""
    return LIMITS[model.dtype]


def sample_ids(model: Model, length: int, *, seed: int = 0) -> list[int]:
    """Token ids to compare on, the same on every machine."""
    top = min(model.shape.vocab, 4096)  # low ids are ordinary text in every tokenizer
    return torch.randint(3, top, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def versions(*packages: str) -> str:
    """`transformer-lens 4.3.0 and transformers 5.23.0`, as installed."""
    return " and ".join(f"{name} {installed(name) or '(not installed)'}" for name in packages)


def installed(package: str) -> str:
    """The installed version of a package, or an empty string."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def not_installed(package: str, extra: str) -> InputError:
    """The error for an adapter whose library is not there."""
    return InputError(f"{package} is not installed: pip install 'kvnotes-interp[{extra}]'.")


def twin(hf: PreTrainedModel) -> PreTrainedModel:
    """A second module tree over the same weights: both libraries rewrite the modules that they are given."""
    shared = {id(t): t for t in (*hf.parameters(), *hf.buffers())}
    return copy.deepcopy(hf, shared)
