"""Checkpoints: parameters, AdamW's state and the random generators as safetensors, the rest as JSON.

A checkpoint is a folder that is written under another name and renamed when it is whole; the one before it is removed
only then. So a run killed at any moment has one to go on from.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import Parameter
from torch.optim import AdamW

from kvnotes_interp.errors import InputError
from kvnotes_interp.files import entry, faults_of, read_json

_PART = ".part"


def save(
    folder: Path, step: int, parameters: Mapping[str, Parameter], optimizer: AdamW, state: Mapping[str, Any]
) -> None:
    """Write the checkpoint of `step` into `folder` and remove all others. `state` holds JSON values."""
    tensors = {f"parameter.{name}": parameter.detach() for name, parameter in parameters.items()}
    for name, parameter in parameters.items():  # a parameter without a gradient has no state
        tensors |= {f"adamw.{key}.{name}": value for key, value in optimizer.state.get(parameter, {}).items()}
    tensors["rng.cpu"] = torch.get_rng_state()
    if (device := _cuda(parameters)) is not None:
        tensors["rng.cuda"] = torch.cuda.get_rng_state(device)
    path = folder / f"step-{step:08d}"
    part = _emptied(path.with_suffix(_PART))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, part / "state.safetensors")
    (part / "state.json").write_text(json.dumps({"step": step, **state}, indent=2) + "\n", encoding="utf-8")
    for file in part.iterdir():
        with open(file, "rb") as written:
            os.fsync(written.fileno())
    part.rename(path)
    for other in folder.iterdir():
        if other != path:
            shutil.rmtree(other)


def latest(folder: Path) -> Path | None:
    """The newest whole checkpoint in `folder`, if there is one."""
    whole = sorted(p for p in folder.glob("step-*") if p.suffix != _PART)
    return whole[-1] if whole else None


def restore(path: Path, parameters: Mapping[str, Parameter], optimizer: AdamW) -> tuple[dict[str, Tensor], dict]:
    """(parameters by name, state) of a checkpoint; AdamW and the random generators are put back here.

    Raises InputError that names the checkpoint when a file of it is missing or is not what `save` wrote.
    """
    again = f"Remove {path} to go on from the run's beginning."
    state = read_json(path / "state.json", "checkpoint", of=dict)
    entry(state, "step", int, f'checkpoint "{path / "state.json"}"', again)
    values: dict[str, Tensor] = {}
    try:
        tensors = load_file(path / "state.safetensors", device="cpu")
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path / 'state.safetensors'} is not a safetensors file: {error}. {again}") from error
    with faults_of(f'checkpoint "{path}"', again):
        for name, tensor in tensors.items():
            kind, _, rest = name.partition(".")
            if kind == "parameter":
                values[rest] = tensor
            elif kind == "adamw":
                key, _, rest = rest.partition(".")
                parameter = parameters[rest]
                # AdamW counts its steps on the CPU, whatever device the parameter is on.
                optimizer.state[parameter][key] = tensor if key == "step" else tensor.to(parameter.device)
        for name, parameter in parameters.items():
            if values[name].shape != parameter.shape:
                raise ValueError(f"{name} is {tuple(values[name].shape)}, the method's {tuple(parameter.shape)}")
        torch.set_rng_state(tensors["rng.cpu"])
        if (device := _cuda(parameters)) is not None and "rng.cuda" in tensors:
            torch.cuda.set_rng_state(tensors["rng.cuda"], device)
    return values, state


def _cuda(parameters: Mapping[str, Parameter]) -> torch.device | None:
    return next((p.device for p in parameters.values() if p.device.type == "cuda"), None)


def _emptied(path: Path) -> Path:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path
