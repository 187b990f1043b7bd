"""How much memory a sweep may take."""

from __future__ import annotations

import os

import torch


def default_budget(device: torch.device) -> int:
    """A quarter of the memory that is free on this device now, in bytes (at most 2 GiB on a CPU)."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free // 4
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # not every system tells
        free = 4 << 30
    return min(free // 4, 2 << 30)


def readable(n: float) -> str:
    """Bytes as a person reads them: `512 B`, `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    raise AssertionError
