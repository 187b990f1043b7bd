"""`load()`: a model ready for cache work, checked before it is handed over."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from kvnotes_interp import attention, compat, fingerprint, live, rope, sources
from kvnotes_interp.errors import InputError, UnsupportedError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvnotes_interp.checks import CheckReport


class _LiveId:
    """The field `model_id`: what it was set to, until the live model is found to have changed; then a new one.

    Set to "", it is worked out from the look that is taken anyway, so that the weights are hashed once.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._key = f"_{name}"

    def __set__(self, model: Model, value: str) -> None:
        watch = fingerprint.Identity(model.hf)
        object.__setattr__(model, self._key, [value or _id(model.source, watch.parts), watch, {}])

    def __get__(self, model: Model | None, owner: type) -> str:
        if model is None:
            raise AttributeError  # so that the dataclass sees no default
        state = model.__dict__[self._key]
        if changed := state[1].changed():
            state[2][state[0]] = changed  # what told the model of that id from the one at hand
            state[0] = _id(model.source, state[1].parts)
        return state[0]


@dataclass(frozen=True, eq=False)
class Model:
    """A causal language model and what cache work needs to know of it.

    Attributes:
        hf: the transformers model, in eval mode, its weights frozen.
        tokenizer: may be None for a live model given without one (tasks then cannot be encoded).
        source: where the weights came from, as it goes into every manifest.
        shape: layers, heads, widths.
        rope: rotary geometry per layer.
        model_id: name and fingerprint of all weights, settings and the config, as they are now: an adapter that is
            switched off, or a weight that is edited, gives another one. A cache remembers which model wrote it.
    """

    hf: PreTrainedModel = field(repr=False)
    tokenizer: Any = field(repr=False)
    source: sources.ModelSource
    shape: sources.ModelShape
    rope: rope.RopeGeometry = field(repr=False)
    model_id: str = _LiveId()  # type: ignore[assignment]

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
    def n_positions(self) -> int | None:
        """How many positions the model was made for (max_position_embeddings); None where its config has no limit."""
        return getattr(compat.text_config(self.hf), "max_position_embeddings", None)

    def require_own(self, cache: Any, name: str = "this cache") -> None:
        """Raise InputError, with what was changed where that is known, unless this model wrote the cache."""
        if cache.model_id == self.model_id:
            return
        changed = self.__dict__["_model_id"][2].get(cache.model_id, ())
        since = (
            f"; since then {', '.join(changed[:3])} changed" + (", ..." if len(changed) > 3 else "") if changed else ""
        )
        raise InputError(
            f"{name} was written by {cache.model_id!r}; the model at hand is {self.model_id!r}{since}. Make it again "
            "with this model."
        )

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
    live.require(hf)
    attention.refusal(hf)  # tried now, while nobody else's hooks can see it
    shape, geometry = sources.shape_of_config(hf.config), rope.read_geometry(hf)
    return Model(hf, tokenizer, source, shape, geometry, "")


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


def id_of(hf: PreTrainedModel, source: sources.ModelSource) -> str:
    """Name and fingerprint of a live model as it is now; where its files lie, and who read them, is no part of it."""
    return _id(source, fingerprint.model_parts(hf))


def _id(source: sources.ModelSource, parts: dict[str, str]) -> str:
    return f"{source.name}#{fingerprint.of(parts)}"
