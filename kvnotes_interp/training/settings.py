"""Everything that decides a training run besides the method, the model and the questions."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from pydantic import Field

from kvnotes_interp.settings import StrictSettings


class Settings(StrictSettings):
    """Settings of `distill`; the defaults are SemPIC's (arXiv 2607.28069, released training config).

    Attributes:
        epochs: passes over the training questions. steps: optimizer steps, in place of `epochs`.
        batch: questions per forward pass. accumulate: forward passes per step, whose gradients are added.
        lr: learning rate of AdamW at the first step; it falls linearly to 0. weight_decay: of AdamW.
        clip: largest norm of the gradient of all parameters together.
        tau: temperature of teacher and student; the loss is multiplied by tau squared.
        seed: of the order of the questions, and of torch while the loop runs.
        validate_every: steps between validations; None: a tenth of the run. The first and last state always are.
        patience: stop after so many validations without a lower KL; None: never.
        checkpoint_every: steps between checkpoints; every validation writes one too.
        autocast: "bf16" runs writer and reader in bfloat16 (CUDA only); loss and validation stay in full precision.
        max_new_tokens: longest answer, of the teacher and in validation.
        top: tokens of the teacher's distribution that are kept, with one bucket for the rest; None: all.

    Raises InputError that names the setting, its value, and the nearest right name.
    """

    of: ClassVar[str] = "training"

    epochs: int = Field(default=5, ge=1)
    steps: int | None = Field(default=None, ge=1)
    batch: int = Field(default=16, ge=1)
    accumulate: int = Field(default=1, ge=1)
    lr: float = Field(default=5e-4, gt=0, allow_inf_nan=False)
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    clip: float = Field(default=1.0, gt=0)
    tau: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    seed: int = 0
    validate_every: int | None = Field(default=None, ge=1)
    patience: int | None = Field(default=None, ge=1)
    checkpoint_every: int = Field(default=50, ge=1)
    autocast: Literal["bf16"] | None = None
    max_new_tokens: int = Field(default=64, ge=1)
    top: int | None = Field(default=256, ge=1)

    def total_steps(self, n: int) -> int:
        """Optimizer steps of the whole run over `n` questions."""
        return self.steps or math.ceil(self.epochs * n / (self.batch * self.accumulate))

    def validation_interval(self, n: int) -> int:
        """Steps between two validations."""
        return self.validate_every or math.ceil(self.total_steps(n) / 10)
