"""`organism:trained`: a small Llama that learned four tasks from scratch, loaded from files beside this module.

It answers, from one token after the prompt: gated decisions (family `gate`), verbatim look-ups (`badge`), questions
about synthetic biographies, and a needle in a haystack (`kvnotes_interp.tasks.documents`), in prompts of up to 512
tokens.
Its mechanism is *not* known by construction: it was trained on the answers alone, and what it does is measured, not
given. `record()` says how it was trained and how often it is right on held-out instances; the script is
`experiments/organisms/train.py`.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvnotes_interp.errors import InputError

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

FOLDER = Path(__file__).with_name("trained")
"""Weights (float32 safetensors), config, tokenizer and `trained.json`."""


def build() -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """The model, in float32 on the CPU and in eval mode, and its tokenizer.

    The tokenizer has one token per word (its leading space included), sign or newline, adds no special tokens, and maps
    words outside the organism's tasks to `<unk>`.

    Raises:
        InputError: a file is missing or the weights are not those of the record.
    """
    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    expected = record()["weights"]["sha256"]
    if (found := sha256()) != expected:
        raise InputError(
            f"The weights {FOLDER / 'model.safetensors'} have sha256 {found[:12]}..., and trained.json names "
            f"{expected[:12]}.... Install the package again, or train and record anew: experiments/organisms/README.md."
        )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(FOLDER)
    model = LlamaForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    return model.eval(), tokenizer


def record() -> dict[str, Any]:
    """How the weights came to be and what they reach: plan, tokens, seconds, machine, versions, held-out accuracy."""
    file = FOLDER / "trained.json"
    if not file.is_file():
        raise InputError(f"The trained organism is not here: {file} is missing. Install the package again.")
    return json.loads(file.read_text(encoding="utf-8"))


def sha256() -> str:
    """Digest of the weights file that is in place."""
    file = FOLDER / "model.safetensors"
    if not file.is_file():
        raise InputError(f"The trained organism is not here: {file} is missing. Install the package again.")
    return hashlib.sha256(file.read_bytes()).hexdigest()
