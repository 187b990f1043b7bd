"""Everything that decides a scorer besides the model and its trained numbers."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from kvnotes_interp.settings import StrictSettings


class ScorerSettings(StrictSettings):
    """Settings of `new_scorer`. The number of slots that are kept is not among them: it is the budget, at every call.

    Attributes:
        hidden: width of the scorer's one hidden layer.
        update_rank: rank of the update of kept keys and values; 0: kept slots are copies.
        shared: one set of weights for all KV heads of a layer; off, one for each.
        seed: of all that is drawn.

    Raises InputError that names the setting, its value, and the nearest right name.
    """

    of: ClassVar[str] = "scorer"

    hidden: int = Field(default=64, ge=1)
    update_rank: int = Field(default=0, ge=0)
    shared: bool = False
    seed: int = 0
