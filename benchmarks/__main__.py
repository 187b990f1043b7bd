"""`python -m benchmarks`: run, print, and keep the numbers."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

# Before torch and transformers are imported.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_DISABLED", "true")

SECTIONS = ("sweep", "scaling", "memory", "startup", "ttft", "checkpointing", "compaction", "cuda")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small sample of everything, to see that it runs")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--methods", nargs="+", help="keys of the methods to time (default: all)")
    parser.add_argument("--tokens", nargs="+", type=int, help="prompt lengths (default: 128 512; 1k 4k 16k on CUDA)")
    parser.add_argument(
        "--device", default="cpu", help="cpu, or cuda for the sections cuda, checkpointing and compaction"
    )
    parser.add_argument("--model", help="model of the sections checkpointing and compaction (default: smollm2-135m)")
    parser.add_argument("--threads", type=int, help="CPU threads of every method (default: all cores)")
    parser.add_argument("--out", type=Path, help="folder for the raw JSON (default: benchmarks/results)")
    parser.add_argument("--write-readme", action="store_true", help="put the tables into benchmarks/README.md")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the chosen sections. 1 when two methods disagree."""
    args = arguments(argv)
    import torch
    from rich.console import Console

    from benchmarks import machine, patch_sweep
    from benchmarks.report import HERE, RESULTS, Section, write_readme

    warnings.filterwarnings("ignore", module="(wandb|transformer_lens|beartype)")
    torch.set_num_threads(args.threads or patch_sweep.threads())
    os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())  # for the processes started from here
    out = args.out or (HERE / "out" if args.quick else RESULTS)
    console = Console(width=None if sys.stdout.isatty() else 140)
    done = []
    facts = machine.facts(torch.device(args.device if torch.cuda.is_available() else "cpu"))
    console.print(machine.sentence(facts), highlight=False)
    model: Any = None
    for name in args.sections:
        if name in ("sweep", "scaling", "ttft") and model is None:
            import kvnotes_interp as kv

            model = kv.load(device="cpu")
        try:
            section = _run(name, args, model, facts, say=partial(console.print, highlight=False))
        except patch_sweep.Disagreement as error:
            console.print(f"[red]{error}")
            return 1
        console.print(*section.tables, sep="\n")
        if section.skipped:
            console.print(f"{name}: not run, {section.skipped}")
        else:
            section.save(out)
        done.append(section)
    if args.write_readme:
        kept = {s.name: s for s in done}
        for path in sorted(RESULTS.glob("*.json")):
            found = Section.load(path)
            if found.name not in kept or kept[found.name].skipped:
                kept[found.name] = found
        write_readme([kept[n] for n in SECTIONS if n in kept])
    return 0


def _run(
    name: str, args: argparse.Namespace, model: Any, facts: dict[str, Any], *, say: Callable[[str], object]
) -> Any:
    from benchmarks import big, checkpointing, compaction, patch_sweep, scaling, startup, sweep_memory, ttft
    from benchmarks.methods import METHODS
    from benchmarks.problem import english
    from benchmarks.report import Section

    quick: bool = args.quick
    if name == "sweep":
        tokens = args.tokens or ([128] if quick else [128, 512])
        found = []
        # What freezing costs is shown once, at the shortest prompt.
        every = [key for key, entry in METHODS.items() if entry.same or not quick]
        same = [key for key, entry in METHODS.items() if entry.same]
        for n in tokens:
            effort = patch_sweep.Effort(slow=8 if n <= 256 else 3)
            keys = args.methods or (every if n == min(tokens) else same)
            if quick:
                effort = patch_sweep.Effort(rounds=2, ours=480, batched=64, slow=2, loose=1, check=6)
            found.append(patch_sweep.run(english(model, n), keys=keys, effort=effort))
        return Section(name, tuple(t for t, _ in found), {"lengths": [r for _, r in found]}, machine=facts)
    if name == "scaling":
        options: dict[str, Any] = {}
        if quick:
            options = {"lengths": (64, 512), "cells": 240, "rows": (64, 256), "rounds": 2}
        tables, raw = scaling.run(model, **options)
        return Section(name, tables, raw, machine=facts)
    if name == "memory":
        table, raw = sweep_memory.run(**({"rows": (16, 256), "tokens": 512} if quick else {}))
        return Section(name, (table,), raw, machine=facts)
    if name == "startup":
        tables, raw = startup.run(quick=quick, n=2 if quick else 8)
        return Section(name, tables, raw, machine=facts)
    if name == "ttft":
        options = {"lengths": (128, 256), "chunks": (2,), "rounds": 1} if quick else {}
        options |= {"lengths": tuple(args.tokens)} if args.tokens else {}
        tables, raw = ttft.run(model, **options)
        return Section(name, tables, raw, machine=facts)
    if name == "checkpointing":
        import kvnotes_interp as kv

        options = {"lengths": (64, 128), "rounds": 1} if quick else {}
        options |= {"lengths": tuple(args.tokens)} if args.tokens else {}
        chosen = kv.load(args.model or kv.sources.DEFAULT, device=args.device)
        tables, raw = checkpointing.run(chosen, **options)
        return Section(name, tables, raw, machine=facts)
    if name == "compaction":
        import kvnotes_interp as kv

        options = {"points": compaction.points_of((64, 128)), "rounds": 1} if quick else {}
        options |= {"points": compaction.points_of(args.tokens)} if args.tokens else {}
        chosen = kv.load(args.model or ("organism:trained" if quick else kv.sources.DEFAULT), device=args.device)
        tables, raw = compaction.run(chosen, say=say, **options)
        return Section(name, tables, raw, machine=facts)
    if reason := big.missing(args.device):
        return Section(name, (), {}, skipped=reason, machine=facts)
    options = {"tokens": args.tokens} if args.tokens else {}
    tables, lengths = big.run(device=args.device, **options)
    return Section(name, tables, {"lengths": lengths}, machine=facts)


if __name__ == "__main__":
    sys.exit(main())
