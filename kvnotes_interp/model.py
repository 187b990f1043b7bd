"""`load()`: a model ready for cache work, checked before it is handed over."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from kvnotes_interp import compat, rope, sources
from kvnotes_interp.errors import UnsupportedError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvnotes_interp.checks import CheckReport


_ELSEWHERE = ("_name_or_path", "transformers_version")  # in a config, and no property of the model


@dataclass(frozen=True, eq=False)
class Model:
    """A causal language model and what cache work needs to know of it.

    Attributes:
        hf: the transformers model, in eval mode, its weights frozen.
        tokenizer: may be None for a live model given without one (tasks then cannot be encoded).
        source: where the weights came from, as it goes into every manifest.
        shape: layers, heads, widths.
        rope: rotary geometry per layer.
        model_id: name and fingerprint of config and weights; a cache remembers which model wrote it.
    """

    hf: PreTrainedModel = field(repr=False)
    tokenizer: Any = field(repr=False)
    source: sources.ModelSource
    shape: sources.ModelShape
    rope: rope.RopeGeometry = field(repr=False)
    model_id: str

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def device(self) -> torch.device:
        return self.hf.device

    @property
    def dtype(self) -> torch.dtype:
        return self.hf.dtype

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """End-of-sequence tokens, from the generation config."""
        config = getattr(self.hf, "generation_config", None)
        found = getattr(config, "eos_token_id", None)
        if found is None:
            found = compat.text_config(self.hf).eos_token_id
        return tuple(found) if isinstance(found, list | tuple) else () if found is None else (found,)

    def check(self, *, full: bool = True) -> CheckReport:
        """Prove on this model that its cache can be forked, moved and patched; see `checks.py`."""
        from kvnotes_interp.checks import check

        return check(self, full=full)


def wrap(hf: PreTrainedModel, tokenizer: Any, source: sources.ModelSource) -> Model:
    """A Model around loaded weights, refused by name when its cache cannot be supported."""
    compat.refuse_unsupported(hf)
    hf.eval().requires_grad_(False)
    return Model(
        hf,
        tokenizer,
        source,
        sources.shape_of_config(hf.config),
        rope.read_geometry(hf),
        _model_id(hf, source),
    )


def load(
    name: Any = sources.DEFAULT,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    device_map: Any = None,
    revision: str | None = None,
    tokenizer: Any = None,
    trust_remote_code: bool = False,
    check: bool = True,
) -> Model:
    """Load a model by alias, hub id, local folder or `.gguf` path, or take a live `PreTrainedModel`.

    A live model is put into eval mode and its weights are frozen; nothing else of it changes.

    Args:
        name: an alias of `kvprobe models`, a hub id, a path, or a live model (give its `tokenizer` too).
        device: "cuda" when there is one, else "cpu", unless given.
        dtype: float32 on a CPU, bfloat16 on CUDA, unless given.
        device_map: handed to transformers to spread the layers over several devices.
        revision: a hub commit or branch, in place of the pinned one.
        trust_remote_code: run code that comes with a hub model; off unless you ask.
        check: run the short form of `Model.check()` and refuse a model that fails it.

    Raises:
        InputError: unknown name, nothing cached and no hub, gated without access; the message says what to run.
        UnsupportedError: the model's cache is not one key and value per token and layer, or a check failed.
    """
    hf, tok, source = sources.fetch(
        name,
        tokenizer=tokenizer,
        device=device,
        dtype=dtype,
        device_map=device_map,
        revision=revision,
        trust_remote_code=trust_remote_code,
    )
    model = wrap(hf, tok, source)
    if check:
        report = model.check(full=False)
        if not report.passed:
            raise UnsupportedError(
                f"{model.name} failed {len(report.failures)} of the checks run at load: "
                + "; ".join(f"{f.name}: {f.value:.3g}, limit {f.limit:.3g} {f.detail}" for f in report.failures)
                + ". Its cache cannot be worked on as it is; `kvprobe check` gives the full report."
            )
    return model


def _model_id(hf: PreTrainedModel, source: sources.ModelSource) -> str:
    # Not where the files lie, nor which version read them: the same weights are the same model on every machine.
    about = {k: v for k, v in compat.text_config(hf).to_dict().items() if k not in _ELSEWHERE}
    digest = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode())
    embedding = next(hf.get_input_embeddings().parameters())
    for weight in (embedding, *compat.layers(hf)[-1].parameters()):
        row = weight.detach().flatten()[:64].float().cpu()
        digest.update(row.numpy().tobytes())
    return f"{source.name}#{digest.hexdigest()[:12]}"
