"""How much memory a sweep may take."""

from __future__ import annotations

import torch


def default_budget(device: torch.device) -> int:
    """A quarter of the memory that is free on this device now, in bytes (at most 2 GiB on a CPU)."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free // 4
    return min(_available() // 4, 2 << 30)


def _available() -> int:
    """Bytes that can be had without swapping. Free pages alone would not do: file caches fill them and give way."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            facts = dict(line.split(":", 1) for line in file)
        return int(facts["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # not Linux
        return 4 << 30


def readable(n: float) -> str:
    """Bytes as a person reads them: `512 B`, `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    raise AssertionError
