"""What a run would cost, before it runs: cells, bytes, arithmetic, time. Needs no weights and no network.

Prompts are tokenised by the model's own tokenizer when it is already on this machine, else by a stand-in that splits
text much as byte-pair tokenizers do; the report says which.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvnotes_interp import sources
from kvnotes_interp.engine.budget import default_budget, readable
from kvnotes_interp.errors import InputError
from kvnotes_interp.sites import Site
from kvnotes_interp.tasks import EncodedPair, Pair, encode_all


@dataclass(frozen=True)
class DryRun:
    """The plan of a run."""

    model: str
    n_pairs: int
    n_encoded: int
    tokens: tuple[int, int]
    cells: int
    cache_bytes: int
    weight_bytes: int
    memory_budget: int
    flops: float
    flops_per_second: float
    tokenizer: str
    dtype: str

    @property
    def seconds(self) -> float:
        """Arithmetic over the matmul rate measured just now; a real run reaches about half of that rate."""
        return 2 * self.flops / self.flops_per_second

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**vars(self), "tokens": list(self.tokens), "seconds": self.seconds}

    def __rich__(self) -> Any:
        from rich.table import Table

        table = Table(title=f"plan for {self.model} (nothing was run)", show_header=False, title_justify="left")
        low, high = self.tokens
        for name, value in (
            ("pairs", f"{self.n_pairs}, of which {self.n_encoded} align"),
            ("tokens per prompt", f"{low} to {high} ({self.tokenizer})"),
            ("patched decisions", f"{self.cells:,}"),
            ("weights", f"{readable(self.weight_bytes)} in {self.dtype}"),
            ("both caches of a pair", readable(self.cache_bytes)),
            ("memory for rows in flight", f"up to {readable(self.memory_budget)}"),
            ("arithmetic", f"{self.flops / 1e12:,.2f} TFLOP"),
            ("measured matmul rate here", f"{self.flops_per_second / 1e9:,.0f} GFLOP/s"),
            ("estimated time here", readable_time(self.seconds)),
        ):
            table.add_row(name, value)
        return table


def plan(
    probe: str,
    options: Mapping[str, Any],
    name: str,
    pairs: Sequence[Pair],
    *,
    seed: int = 0,
    device: str | None = None,
    dtype: str | None = None,
    revision: str | None = None,
) -> DryRun:
    """Plan a probe with its own options, as the probe's function takes them.

    Raises InputError for a probe that is not made of single patches, or questions: there is nothing to count.
    """
    if probe not in ("local_patching", "suffix_concentration"):
        raise InputError(
            f"a dry run counts patched decisions, and {probe} is not made of them; try it with a small n first. "
            "It says what it takes before it runs."
        )
    from kvnotes_interp.probes import concentration, patching
    from kvnotes_interp.probes.making import Making

    rest = {name: value for name, value in options.items() if name != "path"}
    making = Making(**{name: rest.pop(name) for name in ("operator", "blocks", "tail") if name in rest})
    mapped = {pair.key for pair in pairs[: rest.pop("map_pairs", 0)]}

    def cells(pair: EncodedPair, n_layers: int) -> list[Site]:
        pair = making.aligned(pair)
        if probe == "local_patching":
            views = [v for v in rest["views"] if v != "layer_position" or pair.pair.key in mapped]
            made = patching.cells_of(pair, n_layers, seed=seed, **{**rest, "views": views})
        else:
            made = concentration.all_cells(pair, n_layers, seed=seed, **rest)
        return [site for _, site in made]

    return dry_run(name, pairs, cells, device=device, dtype=dtype, revision=revision)


def dry_run(
    name: str,
    pairs: Sequence[Pair],
    cells: Callable[[EncodedPair, int], Iterable[Site]],
    *,
    device: str | None = None,
    dtype: str | None = None,
    revision: str | None = None,
) -> DryRun:
    """Plan any set of patches. `cells(pair, n_layers)` gives the sites to patch for one encoded pair.

    Every pair is taken for competent; the controls, a few cells per pair, are left out.
    """
    how = sources._load_options(device, dtype, None, False)  # the same answers and refusals as a real load
    target, kind = (how["device_map"] or {"": torch.device("cpu")})[""], how["dtype"]
    shape = sources.shape_of(name, revision)
    size = torch.finfo(kind).bits // 8
    tokenizer = sources.local_tokenizer(name)
    encoded, _ = encode_all(tokenizer or StandIn(), pairs)
    # Multiplications of one token through all layers, embeddings aside.
    per_layer = 2 * (
        shape.d_model * shape.d_head * (2 * shape.n_heads + 2 * shape.n_kv_heads) + 3 * shape.d_model * shape.d_mlp
    )
    flops, count = 0.0, 0
    for pair in encoded:
        flops += 2 * per_layer * shape.n_layers * pair.length
        sites = list(cells(pair, shape.n_layers))
        count += len(sites)
        flops += sum(per_layer * _layers_run(site, shape.n_layers) for site in sites)
    lengths = [pair.length for pair in encoded] or [0]
    return DryRun(
        model=name,
        n_pairs=len(pairs),
        n_encoded=len(encoded),
        tokens=(min(lengths), max(lengths)),
        cells=count,
        cache_bytes=2 * shape.kv_bytes(max(lengths), bytes_per_number=size),
        weight_bytes=shape.n_params * size,
        memory_budget=default_budget(target),
        flops=flops,
        flops_per_second=matmul_rate(target, kind),
        tokenizer="its own tokenizer" if tokenizer is not None else "estimated: its tokenizer is not on this machine",
        dtype=str(kind).removeprefix("torch."),
    )


def _layers_run(site: Site, n_layers: int) -> int:
    return n_layers - min(site.layers) if site.layers else n_layers if site.positions else 0


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP per second of a square matrix product on this device, the best of five."""
    n = 4096 if device.type == "cuda" else 768
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        out = a @ b
        float(out[0, 0])  # waits for the device
        best = min(best, time.perf_counter() - start)
    return 2 * n**3 / best


def readable_time(seconds: float) -> str:
    """Seconds as a person reads them: `40 s`, `12 min`, `3.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class StandIn:
    """A tokenizer for counting only: words with their leading space, digits in threes, signs and newlines alone."""

    is_fast = True
    chat_template = "stand-in"
    bos_token_id = None
    all_special_ids: tuple[int, ...] = ()
    _PATTERN = re.compile(r" ?[^\W\d_]+| ?\d{1,3}|\n+| ?[^\w\s]+|\s+|_")

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def __call__(self, text: str, **_: Any) -> dict[str, Any]:
        found = list(self._PATTERN.finditer(text))
        ids = [self._ids.setdefault(m.group(), len(self._ids)) for m in found]
        return {"input_ids": ids, "offset_mapping": [m.span() for m in found]}

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids."""
        names = list(self._ids)
        return "".join(names[i] for i in ids)

    def apply_chat_template(self, turns: Sequence[dict[str, str]], **_: Any) -> str:
        """A ChatML-like rendering: a few tokens of template round each turn."""
        body = "".join(f"<{t['role']}>\n{t['content']}</{t['role']}>\n" for t in turns)
        return body + "<assistant>\n"
