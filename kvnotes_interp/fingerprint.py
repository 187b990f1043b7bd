"""One fingerprint per kind of thing, each over all that decides a number.

A model's is over every parameter and buffer, over what its modules were set to (an adapter's state and scale, a window,
a soft-cap), and over its config. It is cheap enough to be taken again at every run. A live model can be edited between
two passes, so `Identity` watches it: a look at versions, addresses and a few numbers of every weight at each pass, and
the whole fingerprint again when one of these moved.

What it does not see: a single number changed through `.data` between the places that are looked at, until the next run
takes the whole fingerprint; and hooks and patched classes, which a run's request names instead (`interference`).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import Tensor, nn

from kvnotes_interp import compat
from kvnotes_interp.errors import InputError, UnsupportedError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ELSEWHERE = ("_name_or_path", "transformers_version", "_attn_implementation")  # in a config, and no property of it
# Attributes of modules that decide no number, or are looked at in another way.
_NO_SETTING = frozenset(
    {"training", "name_or_path", "gradient_checkpointing", "max_seq_len_cached", "all_tied_weights_keys", "inplace"}
    | {"warnings_issued", "model_tags", "hf_device_map", "is_parallelizable"}
)
_PRIVATE_SETTINGS = ("_disable_adapters", "_active_adapter")  # PEFT's, which decide whether an adapter is added
_ADAPTER_STATE = (*_PRIVATE_SETTINGS, "merged_adapters", "scaling", "active_adapter")
_LAYER = re.compile(r"(?:^|\.)((?:layers|h|blocks)\.\d+)\.")
_LOOKED_AT = 8  # numbers of every weight
_PLAIN = frozenset({int, float, bool, str})
_KNOWN = ("kvnotes_interp", "transformers", "accelerate")  # whose hooks record, or put weights where they are needed


def short(*parts: str | bytes) -> str:
    """Sixteen hex digits of these texts, in order."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:16]


def of(value: Any) -> str:
    """Sixteen hex digits of a plain value (dataclasses, mappings, sequences, texts, numbers), whole and in order."""
    return short(json.dumps(value, sort_keys=True, default=_plain, ensure_ascii=True))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    return repr(value)


# --- models ----------------------------------------------------------------------------------------------------------


def model_parts(hf: PreTrainedModel) -> dict[str, str]:
    """Digests of a model's parts: "config", one per decoder layer, and one per other module with weights.

    A part holds its parameters, buffers and settings. `of(parts)` is the fingerprint of the whole.
    """
    return _grouped(_details(hf))


def _grouped(details: Mapping[str, str]) -> dict[str, str]:
    groups: dict[str, dict[str, str]] = {}
    for name, digest in details.items():
        groups.setdefault(_part_of(name), {})[name] = digest
    return {part: of(groups[part]) for part in sorted(groups)}


def _details(hf: PreTrainedModel) -> dict[str, str]:
    """Digest of every tensor, of every module's settings, and of the config, by name."""
    about = {k: v for k, v in compat.text_config(hf).to_dict().items() if k not in _ELSEWHERE}
    found = {"config": of(about)}
    for name, tensor in _tensors(hf):
        found[name] = _tensor_digest(hf, name, tensor)
    for name, module in hf.named_modules():
        found[f"{name}.settings" if name else "settings"] = of([type(module).__name__, _settings(module)])
    return found


def _part_of(name: str) -> str:
    inside = _LAYER.search(name)
    if inside:
        return inside[1]
    parts = [p for p in name.split(".") if p not in ("weight", "bias", "settings", "model", "base_model")]
    return parts[0] if parts else "settings"


def _tensors(hf: nn.Module) -> list[tuple[str, Tensor]]:
    return [*hf.named_parameters(), *hf.named_buffers()]


def _tensor_digest(hf: nn.Module, name: str, tensor: Tensor) -> str:
    if tensor.is_meta:
        kept = _offloaded(hf, name)
        if kept is None:  # of a model that runs elsewhere: nothing to tell its weights by
            return f"{tensor.dtype}{tuple(tensor.shape)}meta"
        tensor = kept
    data = tensor.detach().cpu().contiguous().reshape(-1)
    digest = xxhash.xxh3_128(data.view(torch.uint8).numpy().data if data.numel() else b"").hexdigest()
    return f"{tensor.dtype}{tuple(tensor.shape)}{digest}"


def _offloaded(hf: nn.Module, name: str) -> Tensor | None:
    """A weight that accelerate keeps elsewhere while its module is not running; None where nobody does."""
    owner, _, leaf = name.rpartition(".")
    kept = getattr(getattr(hf.get_submodule(owner), "_hf_hook", None), "weights_map", None)
    return None if kept is None else kept[leaf]


def _settings(module: nn.Module) -> dict[str, Any]:
    """What a module was set to: its attributes that are plain values, and digests of those that are tensors."""
    found: dict[str, Any] = {}
    if isinstance(module, torch.jit.ScriptModule):
        return found  # no pass accepts it
    if (forward := _own_forward(vars(module))) is not None:
        found["forward"] = function(forward)
    for name, value in vars(module).items():
        if name in _NO_SETTING or (name.startswith("_") and name not in _PRIVATE_SETTINGS):
            continue
        if isinstance(value, Tensor):
            value = _tensor_digest(module, name, value)
        elif not _is_plain(value):
            continue
        found[name] = value
    return found


def _own_forward(about: Mapping[str, Any]) -> Any:
    """A forward that somebody put in place of a module's; None where there is none, or it is ours or accelerate's."""
    forward = about.get("forward")
    # Where it is written, whatever name `functools.wraps` gave it.
    ours = getattr(forward, "__globals__", {}).get("__name__", "").startswith("kvnotes_interp")
    return None if forward is None or ours or "_hf_hook" in about else forward


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(k, str) and _is_plain(v) for k, v in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


class Identity:
    """Watches a live model: which weights and settings it has now, and what was changed since it was last looked at.

    `changed()` is asked at every pass, and costs next to nothing while nothing did.
    """

    def __init__(self, hf: PreTrainedModel) -> None:
        self._hf = hf
        self._take()
        self._layers = len(compat.layers(hf))
        self._turning = {n: d for n, d in self._details.items() if n.endswith("inv_freq")}

    @property
    def parts(self) -> dict[str, str]:
        """`model_parts` as of the last look, without hashing anything again."""
        return _grouped(self._details)

    def _take(self) -> None:
        self._details = _details(self._hf)
        self._watched = _Watched(self._hf)

    def changed(self) -> tuple[str, ...]:
        """Names of what differs from the last look, the whole model compared where something moved; then remembers it.

        Raises UnsupportedError when rotary frequencies or the number of layers are other ones: what was read off the
        model when it was loaded is then wrong.
        """
        found: tuple[str, ...] = ()
        if not self._watched.same():
            before = self._details
            self._take()
            names = before.keys() | self._details.keys()
            found = tuple(sorted(n for n in names if before.get(n) != self._details.get(n)))
        # What was read off the model when it was loaded is compared every time: an error once seen stays one.
        turning = {n: d for n, d in self._details.items() if n.endswith("inv_freq")}
        n_layers = len(compat.layers(self._hf))
        if turning != self._turning or n_layers != self._layers:
            turned = [n for n in turning.keys() | self._turning.keys() if turning.get(n) != self._turning.get(n)]
            what = f"{min(turned)} was changed" if turned else f"it has {n_layers} layers instead of {self._layers}"
            raise UnsupportedError(
                f"{type(self._hf).__name__}: {what} after the model was loaded, so that its geometry is another one: "
                "load it again with kv.load(model.hf, tokenizer=...)."
            )
        return found


class _Watched:
    """What can be looked at quickly: identities, versions and a few numbers of all weights, settings and the config."""

    def __init__(self, hf: PreTrainedModel) -> None:
        self.hf = hf
        # Where to look: the dictionaries of every module, and the names of its settings.
        modules = [m for m in hf.modules() if not isinstance(m, torch.jit.ScriptModule)]
        self.places = [(m.__dict__, _watched_names(m.__dict__)) for m in modules]
        self.config = compat.text_config(hf).__dict__
        self.said = copy.deepcopy({k: v for k, v in self.config.items() if k[0] != "_"})
        self.tensors, self.marks, self.settings = self._look()  # tensors are held: no identity is used again
        self.views: dict[Any, list[Tensor]] = {}
        for tensor in self.tensors:
            if not tensor.is_meta and tensor.numel():
                self.views.setdefault((tensor.device, tensor.dtype), []).append(_few(tensor))
        self.numbers = self._numbers()

    def same(self) -> bool:
        if any(self.config.get(key) != value for key, value in self.said.items()):
            return False
        _, marks, settings = self._look()
        if marks != self.marks or settings != self.settings:
            return False
        return all(torch.equal(a, b) for a, b in zip(self._numbers(), self.numbers, strict=True))

    def _look(self) -> tuple[list[Tensor], list[Any], list[Any]]:
        found: list[Any] = []
        marks: list[Any] = []
        settings: list[Any] = [len(self.config)]
        for about, names in self.places:
            found += about["_parameters"].values()
            found += about["_buffers"].values()
            marks += map(id, about["_modules"].values())
            settings.append(len(about))
            settings += map(about.get, names)
            if (forward := _own_forward(about)) is not None:
                settings.append(id(forward))
            if "_disable_adapters" in about:
                settings.append(repr([about.get(name) for name in _ADAPTER_STATE]))
        tensors = [tensor for tensor in found if tensor is not None]
        marks += [(id(t), t._version, 0 if t.is_meta else t.data_ptr()) for t in tensors]
        return tensors, marks, settings

    def _numbers(self) -> list[Tensor]:
        # As bytes, so that NaN equals itself.
        return [torch.cat(views).view(torch.uint8) for views in self.views.values()]


def _watched_names(about: dict[str, Any]) -> tuple[str, ...]:
    return tuple(k for k, v in about.items() if v.__class__ in _PLAIN and k[0] != "_" and k not in _NO_SETTING)


def _few(tensor: Tensor) -> Tensor:
    """A view of a few numbers of a tensor, spread over all of it or, where that is no view, over its first row."""
    data = tensor.detach()
    if not data.is_contiguous():
        data = data[(0,) * (data.ndim - 1)] if data.ndim else data
    flat = data.reshape(-1) if data.is_contiguous() else data
    return flat[:: max(1, flat.numel() // _LOOKED_AT)][:_LOOKED_AT]


# --- what stands around a model --------------------------------------------------------------------------------------


def interference(hf: PreTrainedModel) -> dict[str, str]:
    """Hooks and replaced forwards that are not this package's or transformers', by module: name and code hash.

    They can change every number and no weight tells. What a hook closes over is seen as far as it is plain.
    """
    found: dict[str, str] = {}
    everywhere = torch.nn.modules.module
    everyone = [*everywhere._global_forward_pre_hooks.values(), *everywhere._global_forward_hooks.values()]
    if everyone:
        found["every module"] = ", ".join(map(function, everyone))
    for name, module in hf.named_modules():
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        if (own := _own_forward(vars(module))) is not None:
            hooks.append(own)
        home = next(c for c in type(module).__mro__ if "forward" in vars(c))
        if home.forward.__module__ != home.__module__:  # a class that somebody patched
            hooks.append(home.forward)
        foreign = [hook for hook in hooks if (getattr(hook, "__module__", "") or "").partition(".")[0] not in _KNOWN]
        if foreign:
            found[name or "model"] = ", ".join(map(function, foreign))
    return found


def function(given: Any) -> str:
    """A user's function: its name, and a hash of its code and of what it closes over, as far as that is plain."""
    while isinstance(given, functools.partial):
        given = given.func
    inner = getattr(given, "__func__", given)
    code = getattr(inner, "__code__", None)
    name = getattr(inner, "__qualname__", type(inner).__name__)
    if code is None:
        return name
    cells = [cell.cell_contents for cell in getattr(inner, "__closure__", None) or ()]
    cells += [*(getattr(inner, "__defaults__", None) or ()), *(getattr(inner, "__kwdefaults__", None) or {}).values()]
    plain = [c for c in cells if _is_plain(c)]
    tensors = [_tensor_digest(nn.Module(), "cell", c) for c in cells if isinstance(c, Tensor)]
    return f"{name}#{short(code.co_code, repr(code.co_consts), repr(plain), repr(tensors))}"


def tokenizer(tokenizer: Any) -> str:
    """Sixteen hex digits of everything that decides which tokens a text becomes, the chat template included.

    Of a fast tokenizer its whole definition, without the padding and truncation that calls leave behind; of a slow one
    its class and vocabulary. Raises InputError for None.
    """
    if tokenizer is None:
        raise InputError("the model was loaded without a tokenizer; pass kv.load(..., tokenizer=...).")
    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is not None:
        head, _, about = core.to_str().partition('"added_tokens":')  # padding and truncation stand before it
        assert '"vocab"' not in head, "the vocabulary stands before what is hashed"
    else:
        about = json.dumps([type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())])
    specials = {k: str(v) for k, v in (getattr(tokenizer, "special_tokens_map", None) or {}).items()}
    return short(about, of([getattr(tokenizer, "chat_template", None), specials]))


@functools.cache
def code() -> str:
    """Sixteen hex digits of this package's source and data files, as they were when first asked for."""
    found = {}

    def walk(folder: Any, prefix: str) -> None:
        for entry in sorted(folder.iterdir(), key=lambda e: e.name):
            if entry.is_dir():
                if entry.name != "__pycache__":
                    walk(entry, f"{prefix}{entry.name}/")
            elif entry.name.endswith((".py", ".yaml", ".txt", ".json", ".js")):
                found[prefix + entry.name] = hashlib.sha256(entry.read_bytes()).hexdigest()

    walk(resources.files("kvnotes_interp"), "")
    return of(found)


def items(encoded: Sequence[Any], aside: Sequence[Any] = ()) -> dict[str, str]:
    """Digests of the prompts of a run as they are run, one per aspect, so that a mismatch says what changed.

    `encoded` are `tasks.EncodedPair`s or `probes.items.Item`s; `aside` is what could not be encoded, with reasons.
    """
    from kvnotes_interp.tasks import EncodedPair

    pairs = [e if isinstance(e, EncodedPair) else None for e in encoded]
    return {
        "token_ids": of([[e.old_ids, e.new_ids] if isinstance(e, EncodedPair) else vars(e.blocks) for e in encoded]),
        "answers": of(
            [
                [e.answer_old_id, e.answer_new_id, e.pair.answer_old, e.pair.answer_new]
                if isinstance(e, EncodedPair)
                else [e.answer, e.answers, e.stops]
                for e in encoded
            ]
        ),
        "field_and_regions": of(
            [p and [p.field, p.regions, p.delimiter, p.anchors, p.documents, p.tail] for p in pairs]
        ),
        "excluded": of(list(aside)),
    }
