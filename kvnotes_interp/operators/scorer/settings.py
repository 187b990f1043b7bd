"""Everything that decides a scorer besides the model and its trained numbers."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvnotes_interp.errors import InputError, nearest


class ScorerSettings(BaseModel):
    """Settings of `new_scorer`. The number of slots that are kept is not among them: it is the budget, at every call.

    Attributes:
        hidden: width of the scorer's one hidden layer.
        update_rank: rank of the update of kept keys and values; 0: kept slots are copies.
        shared: one set of weights for all KV heads of a layer; off, one for each.
        seed: of all that is drawn.

    Raises InputError that names the setting, its value, and the nearest right name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    hidden: int = Field(default=64, ge=1)
    update_rank: int = Field(default=0, ge=0)
    shared: bool = False
    seed: int = 0

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise InputError(_explain(error)) from None


def _explain(error: ValidationError) -> str:
    fault = error.errors()[0]
    name = str(fault["loc"][0])
    if fault["type"] == "extra_forbidden":
        known = ScorerSettings.model_fields
        return f'a scorer has no setting "{name}".{nearest(name, known)} Settings: {", ".join(known)}.'
    return f"scorer setting {name}={fault['input']!r}: {fault['msg'][0].lower()}{fault['msg'][1:]}."
