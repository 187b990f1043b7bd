"""Everything that decides a Still compactor besides the model and its trained numbers."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from kvnotes_interp.settings import StrictSettings


class StillSettings(StrictSettings):
    """Settings of `new_still`. The number of latents is not among them: it is the budget, at every call.

    Attributes:
        blocks: Perceiver blocks, each a cross-attention to the whole cache and a self-attention among the latents.
        feed_forward: a two-layer network behind every block.
        shared: one set of weights for all KV heads of a layer; off, one for each.
        queries: learned first queries, interpolated over the span of the source. One is the same for every latent.
        bias: a head that gives every compact slot a bias of its own on the attention logits.
        outputs: positions that the compact keys are turned to: "spread" over the source, or the "last" before its end.
        init: "identity" copies at ratio 1; "plain" draws every matrix (the ablation).
        final_norm: an RMS norm behind the last block (the ablation; it cannot copy).
        seed: of all that is drawn.

    Raises InputError that names the setting, its value, and the nearest right name.
    """

    of: ClassVar[str] = "Still"

    blocks: int = Field(default=2, ge=1)
    feed_forward: bool = False
    shared: bool = True
    queries: int = Field(default=1, ge=1)
    bias: bool = False
    outputs: Literal["spread", "last"] = "spread"
    init: Literal["identity", "plain"] = "identity"
    final_norm: bool = False
    seed: int = 0
