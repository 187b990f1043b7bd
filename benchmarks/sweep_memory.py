"""Peak memory of a sweep against its rows, each measured in a process of its own.

python -m benchmarks.sweep_memory ROWS TOKENS prints one JSON object.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.report import Table, mib


def run(*, rows: Sequence[int] = (64, 4096), tokens: int = 2048, model: str = "") -> tuple[Table, dict[str, Any]]:
    """A table over `rows`; the ratio of the last to the first, with and without the two prompts' caches."""
    found = {n: _in_subprocess(n, tokens, model) for n in rows}
    last, first = found[rows[-1]], found[rows[0]]
    alone = last["peak"] / first["peak"]
    whole = (last["peak"] + last["caches"]) / (first["peak"] + first["caches"])
    table = Table(
        f"Peak memory of one sweep, {tokens:,} tokens, weights excluded",
        ("rows", "taken by the sweep", "with the two prompts' caches"),
        tuple((f"{n:,}", mib(r["peak"]), mib(r["peak"] + r["caches"])) for n, r in found.items()),
        (
            f"From {rows[0]:,} to {rows[-1]:,} rows: {alone:.2f} times what the sweep itself takes, {whole:.2f} times "
            f"with the caches. Copying the cache per row would take {mib(first['caches'] / 2 * rows[-1])}.",
            f"Each in a fresh process, after loading, prefill and a sweep of one row ({first['how']}).",
        ),
    )
    return table, {"by_rows": found, "ratio": alone, "ratio_with_caches": whole, "tokens": tokens}


def _in_subprocess(rows: int, tokens: int, model: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.sweep_memory", str(rows), str(tokens), *([model] if model else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()[-800:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def measure(rows: int, tokens: int, model: str = "") -> dict[str, Any]:
    """Peak of one sweep of `rows` cells, in this process."""
    import torch

    import kvnotes_interp as kv
    from benchmarks.memory import peak_of
    from benchmarks.methods.ours import Run
    from benchmarks.patch_sweep import threads
    from benchmarks.problem import english

    torch.set_num_threads(threads())
    problem = english(kv.load(model or "smollm2-135m", check=False), tokens)
    ours = Run(problem)  # prefills both prompts and sweeps one row
    cells = problem.sample(rows, seed=0)
    peak, how = peak_of(lambda: ours.scores(cells), problem.model.device)
    caches = problem.base.nbytes + problem.donor.nbytes
    return {"rows": rows, "peak": peak, "caches": caches, "how": how}


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:4])))
