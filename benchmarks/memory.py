"""Peak memory of one call: the process's high-water mark on a CPU, the allocator's on CUDA."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
from collections.abc import Callable
from pathlib import Path

import torch


def _status(name: str) -> int | None:
    """A line of /proc/self/status in bytes, or None where there is none."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)


def _reset() -> bool:
    """Set the high-water mark back to what is resident now. False where the system does not let us."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # or memory that was freed, and not given back, hides new use
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def resident() -> int:
    """Bytes resident now, or at worst so far where the system does not tell."""
    return _status("VmRSS") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_of(job: Callable[[], object], device: torch.device) -> tuple[int, str]:
    """Bytes that `job` took at most on top of what was there before it, and how that was measured."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        job()
        return torch.cuda.max_memory_allocated(device) - before, "CUDA allocator"
    exact = _reset()
    before = resident()
    job()
    high = _status("VmHWM") if exact else None
    if high is not None:
        return max(0, high - before), "high-water mark, reset before"
    return max(0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before), "ru_maxrss"
