"""Where the trained organism's decision sits: `python -m experiments.organisms.locality`.

Local patching on held-out pairs of the gated and of the verbatim family, printed as JSON.
"""

from __future__ import annotations

import argparse
import json

import kvnotes_interp as kv
from kvnotes_interp.organisms import trained


def main() -> None:
    """Patch and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--n", type=int, default=16, help="pairs of the test split per family")
    parser.add_argument("--fillers", type=int, default=12, help="neutral lines between rule and decision")
    given = parser.parse_args()
    hf, tokenizer = trained.build()
    model = kv.load(hf, tokenizer=tokenizer)
    found = {}
    for name in ("gate", "badge"):
        pairs = kv.tasks.load(name, n=given.n, split="test", fillers=given.fillers)
        result = kv.probes.local_patching(
            model, pairs, parts=("kv",), views=("region", "position", "random"), progress=False
        )
        found[name] = {"passed": result.summary().passed, **result.summary().to_dict()}
    print(json.dumps(found, indent=1, default=str))


if __name__ == "__main__":
    main()
