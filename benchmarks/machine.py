"""Which machine, which versions, which day."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("torch", "transformers", "transformer-lens", "nnsight", "numpy")


def facts(device: torch.device) -> dict[str, Any]:
    """What a reader needs to judge the numbers; no host name, no path."""
    from kvnotes_interp import __version__

    versions = {"kvnotes-interp": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    found: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "versions": versions,
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
        found["cuda"] = torch.version.cuda
    return found


def cpu() -> str:
    """The CPU's name and what vector instructions it has."""
    name, flags = platform.processor() or platform.machine(), ""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                name = value.strip()
            elif key.strip() == "flags":
                flags = value
    except OSError:
        return name
    wide = [f for f in ("avx2", "avx512f", "amx_tile") if f in flags.split()]
    return f"{name} ({', '.join(wide) or 'no avx2'})"


def sentence(facts: dict[str, Any]) -> str:
    """One line for a table's foot."""
    gpu = f"{facts['gpu']} (CUDA {facts['cuda']}), " if "gpu" in facts else ""
    versions = ", ".join(f"{k} {v}" for k, v in facts["versions"].items())
    return (
        f"{facts['date']}; {gpu}{facts['cpu']}, {facts['cores']} cores, {facts['threads']} threads, load average "
        f"{facts['load_average']} at the start; {versions}."
    )
