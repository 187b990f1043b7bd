"""Measure a trained organism and put it into the package: `python -m experiments.organisms.record runs/organism`."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import sys
from importlib.metadata import version
from pathlib import Path

from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from experiments.organisms.evaluate import accuracies
from kvnotes_interp.organisms import trained


def main() -> None:
    """Measure, write `trained.json`, copy the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="the OUT folder of a finished training run")
    parser.add_argument("--n", type=int, default=400, help="held-out instances per task and size")
    parser.add_argument("--to", type=Path, default=trained.FOLDER)
    given = parser.parse_args()
    source = given.run / "model"
    tokenizer = PreTrainedTokenizerFast.from_pretrained(source)
    model = LlamaForCausalLM.from_pretrained(source).eval()
    weights = source / "model.safetensors"
    run = json.loads((given.run / "run.json").read_text(encoding="utf-8"))
    record = {
        "weights": {
            "sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
            "bytes": weights.stat().st_size,
            "dtype": "float32",
            "parameters": sum(p.numel() for p in model.parameters()),
        },
        "training": run,
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "system": platform.system()},
        "versions": {
            "python": platform.python_version(),
            **{k: version(k) for k in ("torch", "transformers", "tokenizers")},
        },
        "held_out": {"n_each": given.n, "seed": 7, "accuracy": accuracies(model, tokenizer, n=given.n, seed=7)},
    }
    given.to.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        shutil.copyfile(file, given.to / file.name)
    (given.to / "trained.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    json.dump(record, sys.stdout, indent=1)


def _cpu() -> str:
    """The processor's name, as the system gives it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
