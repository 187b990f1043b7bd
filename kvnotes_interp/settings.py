"""Settings that are checked when they are made, and never changed."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError

from kvnotes_interp.errors import InputError, nearest


class StrictSettings(BaseModel):
    """Base of settings. Raises InputError that names the setting, its value, and the nearest right name."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    of: ClassVar[str]
    """What messages say they are settings of."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise InputError(self._explain(error)) from None

    @classmethod
    def _explain(cls, error: ValidationError) -> str:
        fault = error.errors()[0]
        name = str(fault["loc"][0])
        if fault["type"] == "extra_forbidden":
            known = cls.model_fields
            return f'{cls.of} has no setting "{name}".{nearest(name, known)} Settings: {", ".join(known)}.'
        return f"{cls.of} setting {name}={fault['input']!r}: {fault['msg'][0].lower()}{fault['msg'][1:]}."
