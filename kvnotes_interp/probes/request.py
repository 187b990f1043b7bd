"""What a run is of: its sources checked, and a request that holds everything which can change a number.

Two runs whose requests differ never share a row: the request of a resumed run is compared key by key.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch

from kvnotes_interp import fingerprint
from kvnotes_interp.errors import InputError
from kvnotes_interp.tasks import EncodedPair, Pair, SetAside
from kvnotes_interp.tasks.documents.question import Question

if TYPE_CHECKING:
    from kvnotes_interp.model import Model

P = ParamSpec("P")
R = TypeVar("R")

# Their versions decide numbers; those of other packages are kept in the manifest, for the record.
DECIDING = ("torch", "transformers", "numpy", "scikit-learn")
AT_SINK = "field at slot 0 (the attention sink)"
NOTHING_BETWEEN = "nothing between field and decision"
TOO_LONG = "longer than the model's positions"


def verb(function: Callable[P, R]) -> Callable[P, R]:
    """A probe whose keyword options are looked at before it: a generator becomes a tuple, a seed is a whole number.

    Raises InputError for a seed or a memory budget that is none.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name, value in kwargs.items():
            if isinstance(value, Iterator) and name != "pairs":
                kwargs[name] = tuple(value)
        seed, budget = kwargs.get("seed", 0), kwargs.get("memory_budget")
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise InputError(f"seed={seed!r}: give a whole number from 0.")
        if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int | float) or not budget >= 1):
            raise InputError(f"memory_budget={budget!r}: give bytes, or None for a quarter of what is free.")
        return function(*args, **kwargs)

    return call


def pairs_of(probe: str, pairs: Pair | Iterable[Pair]) -> list[Pair]:
    """The pairs as a list; one pair, or a generator of them, will do.

    Raises InputError for no pairs, for something else among them, and for a pair that is given twice.
    """
    if pairs is None or isinstance(pairs, str):
        raise InputError(f"{probe} takes counterfactual pairs and was given {pairs!r}; take some from tasks.load.")
    found: list[Any] = [pairs] if isinstance(pairs, Pair) else list(pairs)
    strangers = [type(p).__name__ for p in found if not isinstance(p, Pair)]
    if strangers:
        raise InputError(
            f"{probe} takes counterfactual pairs and was given a {strangers[0]}; take pairs from tasks.load(name, "
            "n=...). Document questions go to attention_deviation and splice_quality."
        )
    if not found:
        raise InputError("no pairs were given; take some from tasks.load(name, n=...).")
    once(found)
    return found


def once(sources: Sequence[Pair | Question]) -> None:
    """Raise InputError for a source that is given twice: it would count as two observations."""
    seen: set[str] = set()
    for source in sources:
        if source.key in seen:
            raise InputError(
                f"{source.key!r} of {source.family!r} is given twice, and would count as two observations; leave one "
                "out (keys must differ)."
            )
        seen.add(source.key)


def runnable(model: Model, encoded: Sequence[EncodedPair]) -> tuple[list[EncodedPair], list[SetAside]]:
    """(pairs that can be measured on this model, those that cannot, with the reason).

    A field at slot 0 is the attention sink, whose values hardly differ between two tokens in the upper layers: that a
    patch of it changes little says nothing about where a fact is read.

    Raises InputError for two pairs that are the same tokens and answers under different keys.
    """
    good: list[EncodedPair] = []
    aside: list[SetAside] = []
    seen: dict[tuple[Any, ...], str] = {}
    for pair in encoded:
        source, limit = pair.pair, model.n_positions
        reason = (
            TOO_LONG
            if limit is not None and pair.length > limit
            else AT_SINK
            if pair.field[0] == 0
            else NOTHING_BETWEEN
            if pair.downstream[0] >= pair.downstream[1]
            else ""
        )
        if reason:
            aside.append(SetAside(source.key, source.content, reason, f"{source.key}: {reason}"))
            continue
        same = (pair.old_ids, pair.new_ids, pair.answer_old_id, pair.answer_new_id)
        if same in seen:
            raise InputError(
                f"{seen[same]!r} and {source.key!r} are the same prompts and answers to {model.name}, and would count "
                "as two observations; leave one out."
            )
        seen[same] = source.key
        good.append(pair)
    return good, aside


def request_of(
    probe: str, model: Model, sources: Sequence[Pair] | Sequence[Question], options: dict[str, Any]
) -> dict[str, Any]:
    """Everything that decides the numbers of a run, but for its encoded items; see `with_items`."""
    return {
        "probe": probe,
        "model": model.source.to_dict(),
        "model_id": model.model_id,
        "weights": fingerprint.model_parts(model.hf),
        "tokenizer": None if model.tokenizer is None else fingerprint.tokenizer(model.tokenizer),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": device_kind(model),
        "attention": model.hf.config._attn_implementation,
        "matmul_precision": torch.get_float32_matmul_precision(),
        "stop_ids": list(model.stop_ids),
        "hooks": fingerprint.interference(model.hf),
        "code": fingerprint.code(),
        "versions": {name: metadata.version(name) for name in DECIDING},
        "tasks": sorted({source.family for source in sources}),
        "n": len(sources),
        "sources": fingerprint.of(list(sources)),
        "options": options,
    }


def with_items(request: dict[str, Any], encoded: Sequence[Any], aside: Sequence[Any] = ()) -> dict[str, Any]:
    """The request with digests of the prompts as they are run, aspect by aspect."""
    return {**request, "items": fingerprint.items(encoded, aside)}


def machine_of(model: Model) -> dict[str, Any]:
    """What the manifest says of the machine beside what `results.manifest` finds."""
    dtype = str(model.dtype).removeprefix("torch.")
    device = str(model.device)
    if model.device.type == "cuda":
        device = f"{device} ({torch.cuda.get_device_name(model.device)})"
    return {"device": device, "dtype": dtype, "threads": torch.get_num_threads()}


def device_kind(model: Model) -> str:
    """ "cpu", or the type and the product of an accelerator: kernels differ between them."""
    kind = model.device.type
    return f"{kind} ({torch.cuda.get_device_name(model.device)})" if kind == "cuda" else kind
