"""What the loop needs of a method: parameters, and the caches they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor
from torch.nn import Parameter

from kvnotes_interp.compact import Cache
from kvnotes_interp.training.examples import Example


class Method(Protocol):
    """Makes caches from documents with parameters that can be trained.

    A method may have a loss of its own, beside that of the answers: an attribute `own_loss`, set by `caches`, the sum
    over the examples or None. It is trained on; `loss` in the metrics is of the answers alone, `own_loss` is this one.

    Attributes:
        name: as in tables, such as "sempic".
    """

    name: str

    def describe(self) -> dict[str, Any]:
        """Options that decide the numbers besides the parameters, as JSON values; they go into the manifest."""
        ...

    def parameters(self) -> dict[str, Parameter]:
        """What is trained, by names that stay the same from run to run."""
        ...

    def caches(self, examples: Sequence[Example]) -> Sequence[Cache]:
        """The context of every example as a cache of batch 1, differentiable where gradients are on.

        What is drawn at random is drawn from torch's global generators, whose state the checkpoints keep.
        """
        ...

    def save(self, folder: Path, *, training: Mapping[str, Any]) -> None:
        """Write the parameters to a new folder, as the method's operator reads them, with the record `training`."""
        ...

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Set all parameters, in place, to the tensors of these names."""
        ...
