"""The teacher: the model itself with the whole context. Its answers and distributions are computed once and kept.

One safetensors file holds the targets of `CHUNK` examples, under a hash of everything that made them; so a killed run
goes on where it was, and runs over the same questions share a folder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvnotes_interp import compat, engine, fingerprint
from kvnotes_interp.errors import InputError
from kvnotes_interp.files import replacing
from kvnotes_interp.probes.request import device_kind
from kvnotes_interp.progress import Bar
from kvnotes_interp.training.examples import Example

if TYPE_CHECKING:
    from kvnotes_interp.model import Model

CHUNK = 32


@dataclass(frozen=True, eq=False)
class Target:
    """What the teacher said to one example. A row predicts a token of the answer, the suffix's last row the first.

    Attributes:
        answer: the greedy answer, with the token that ended it.
        log_probs: log probabilities at temperature tau of the tokens that were kept, the most likely first, or of all
            tokens by id where `ids` is None.
        ids: which tokens they are. log_rest: log probability of all others together.
    """

    answer: tuple[int, ...]
    log_probs: Float[Tensor, "row token"]
    ids: Int[Tensor, "row token"] | None
    log_rest: Float[Tensor, " row"]


def teach(
    model: Model,
    examples: Sequence[Example],
    *,
    folder: str | Path,
    max_new_tokens: int = 64,
    top: int | None = 256,
    tau: float = 1.0,
    progress: bool = True,
) -> list[Target]:
    """The targets of all examples, read from `folder` where they are there, else computed and kept there.

    Args:
        max_new_tokens: longest answer. top: tokens kept per row; None, or the whole vocabulary, keeps all.
        tau: temperature of the distributions; the answer is greedy whatever it is.

    Raises InputError for a file that cannot be read.
    """
    folder, out = Path(folder), []
    vocabulary = compat.text_config(model.hf).vocab_size
    top = None if top is None or top >= vocabulary else top
    options = {
        "model_id": model.model_id,
        "dtype": str(model.dtype),
        "device": device_kind(model),
        "tokenizer": fingerprint.tokenizer(model.tokenizer),
        "stop_ids": list(model.stop_ids),
        "max_new_tokens": max_new_tokens,
        "top": top,
        "tau": tau,
    }
    with Bar(total=len(examples), description="teacher", enabled=progress) as bar:
        for start in range(0, len(examples), CHUNK):
            chunk = examples[start : start + CHUNK]
            path = folder / f"{_key(options, chunk)}.safetensors"
            if path.is_file():
                out += _read(path)
                bar.advance(len(chunk))
                continue
            made = []
            for example in chunk:
                made.append(_target(model, example, max_new_tokens, top, tau))
                bar.advance()
            _write(path, made)
            out += made
    return out


def _key(options: dict[str, Any], examples: Sequence[Example]) -> str:
    said = [[e.blocks.prefix, e.blocks.chunks, e.blocks.suffix, e.stops] for e in examples]
    return hashlib.sha256(json.dumps([options, said], sort_keys=True).encode()).hexdigest()[:32]


@torch.no_grad()
def _target(model: Model, example: Example, max_new_tokens: int, top: int | None, tau: float) -> Target:
    cache = engine.prefill(model, example.blocks.context)
    ids: Sequence[int] = example.blocks.suffix
    answer: list[int] = []
    rows: list[Tensor] = []
    while len(answer) < max_new_tokens:
        cache, hidden = engine.extend(model, cache, ids)
        rows.append(engine.logits_of(model, hidden[0, -1]).cpu())
        ids = [int(rows[-1].argmax())]
        answer += ids
        if ids[0] in model.stop_ids or any(stop in model.tokenizer.decode(answer) for stop in example.stops):
            break
    logits = torch.stack(rows) / tau
    log_probs = logits.log_softmax(-1)
    if top is None:
        return Target(tuple(answer), log_probs, None, log_probs.new_full((len(answer),), float("-inf")))
    kept = log_probs.topk(top, dim=-1)
    rest = log_probs.scatter(-1, kept.indices, float("-inf")).logsumexp(-1)
    return Target(tuple(answer), kept.values, kept.indices, rest)


def _write(path: Path, targets: Sequence[Target]) -> None:
    tensors = {
        "answers": torch.tensor([token for target in targets for token in target.answer]),
        "lengths": torch.tensor([len(target.answer) for target in targets]),
        "log_probs": torch.cat([target.log_probs for target in targets]),
        "log_rest": torch.cat([target.log_rest for target in targets]),
    }
    if targets[0].ids is not None:
        tensors["ids"] = torch.cat([target.ids for target in targets if target.ids is not None]).int()
    with replacing(path) as temporary:
        save_file(tensors, temporary)


def _read(path: Path) -> list[Target]:
    try:
        found = load_file(path)
        lengths = found["lengths"].tolist()
        split = {name: found[name].split(lengths) for name in ("answers", "log_probs", "log_rest")}
    except (SafetensorError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"{path} holds no teacher targets ({error}); delete it and they are computed again.") from None
    ids = found["ids"].long().split(lengths) if "ids" in found else [None] * len(lengths)
    return [
        Target(tuple(answer.tolist()), log_probs, which, rest)
        for answer, log_probs, which, rest in zip(
            split["answers"], split["log_probs"], ids, split["log_rest"], strict=True
        )
    ]
