"""The tidy rows of an attention-deviation map: one prompt, one operator against full recompute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from kvnotes_interp import metrics
from kvnotes_interp.cache import KVCache
from kvnotes_interp.probes.deviation import reductions as red
from kvnotes_interp.probes.deviation.reductions import Binning
from kvnotes_interp.probes.items import Item


@dataclass(frozen=True)
class Arm:
    """One cache of a prompt and what the prompt's end makes of it.

    Attributes:
        name: of the operator. cache: prefix and chunks.
        rows: attention `[layer head row key]` of the chosen queries, at least float32.
        logits: `[token]` at the suffix's last token.
        text: greedy answer up to its stop; "" where none was decoded.
    """

    name: str
    cache: KVCache
    rows: Float[Tensor, "layer head row key"]
    logits: Float[Tensor, " token"]
    text: str = ""


@dataclass(frozen=True)
class Grain:
    """How chunks are aligned: number of bins, edge ratios, and which tokens belong to a stretch."""

    bins: int = 20
    edges: tuple[float, ...] = (0.1, 0.2, 0.3)
    binning: Binning = "overlap"


@dataclass(frozen=True)
class Cells:
    """Rows that share what `about` says: `columns` of equal length, "value" among them."""

    columns: dict[str, Sequence[Any]]
    about: dict[str, Any]


def compare(item: Item, arm: Arm, full: Arm, grain: Grain) -> list[Cells]:
    """What one operator's cache does differently: deviation, region, retrieval, retrieval_head, kv.

    A chunk that stands at slot 0 is left out: it is the prompt's own beginning, which no operator reuses out of place.
    Values are means over the other chunks, each weighing the same.
    """
    spans = [item.blocks.spans[i] for i in item.moved]
    return [
        *_attention(spans, arm, full, grain),
        *_retrieval(spans, arm, full),
        *_keys_and_values(spans, arm, full, grain),
    ]


def alone(item: Item, arm: Arm, full: Arm) -> list[Cells]:
    """What every cache, full recompute too, has of its own: sink (one row per chunk and layer) and readout."""
    return [*_sink(item, arm), _readouts(item, arm, full)]


def table(item: Item, cells: Sequence[Cells]) -> pd.DataFrame:
    """All rows as one frame, with the prompt's names; what a row does not say is missing.

    Made in one go: a frame per handful of rows would take longer than the model.
    """
    names = {"pair": item.key, "content": item.content, "family": item.family, "part": "kv"}
    wanted = dict.fromkeys(name for one in cells for name in (*names, *one.about, *one.columns))
    columns: dict[str, list[Any]] = {name: [] for name in wanted}
    for one in cells:
        n, said = len(one.columns["value"]), {**names, **one.about}
        for name, column in columns.items():
            column.extend(one.columns[name] if name in one.columns else [said.get(name)] * n)
    return pd.DataFrame(columns, dtype=object)


def within_deviation(item: Item, arm: Arm, full: Arm) -> float:
    """One number: renormalised absolute deviation, mean over tokens, layers and moved chunks."""
    spans = [item.blocks.spans[i] for i in item.moved]
    found = [red.deviation(arm.rows, full.rows, span, renormalise=True).nanmean() for span in spans]
    return float(torch.stack(found).nanmean())


def _attention(spans: Sequence[red.Span], arm: Arm, full: Arm, grain: Grain) -> list[Cells]:
    out = []
    for readout, renormalise in (("deviation", True), ("deviation_raw", False)):
        maps = [red.deviation(arm.rows, full.rows, span, renormalise=renormalise) for span in spans]
        out.append(_binned(maps, grain, view="deviation", site=arm.name, ranking=arm.name, readout=readout))
        for edge in grain.edges:
            weights = [red.region_weights(m.shape[-1], edge, grain.binning) for m in maps]
            # Layers weigh the same, then chunks.
            parts = [red.averaged(m, w).nanmean(dim=0) for m, w in zip(maps, weights, strict=True)]
            about = {"view": "region", "site": arm.name, "ranking": arm.name, "readout": readout, "edge": edge}
            out.append(grid(_over(parts), about, region=red.REGIONS))
    return out


def _retrieval(spans: Sequence[red.Span], arm: Arm, full: Arm) -> list[Cells]:
    layers: dict[str, list[Tensor]] = {}
    heads: dict[str, list[Tensor]] = {}

    def keep(into: dict[str, list[Tensor]], **found: Tensor) -> None:
        for name, value in found.items():
            into.setdefault(name, []).append(value)

    for span in spans:
        mine, theirs = (red.retrieved(one.rows, red.chunk_of(one.cache.values, span), span) for one in (arm, full))
        by_layer, by_head = red.retrieval_errors(mine, theirs)
        gap = (red.mass(arm.rows, span) - red.mass(full.rows, span)).abs()
        moved = red.within(arm.rows, span) - red.within(full.rows, span)
        keep(
            layers,
            **by_layer,
            mass_error=gap.mean(dim=(1, 2)),
            mass=red.mass(arm.rows, span).mean(dim=(1, 2)),
            total_variation=0.5 * moved.abs().sum(-1).nanmean(dim=(1, 2)),
        )
        keep(heads, **by_head, mass_error=gap.mean(dim=2))
    about = {"site": arm.name, "ranking": arm.name}
    out = []
    for name, chunks in layers.items():
        values = _over(chunks)
        out.append(grid(values, {**about, "view": "retrieval", "readout": name}, layer=range(len(values))))
    for name, chunks in heads.items():
        values = _over(chunks)
        axes = {"layer": range(values.shape[0]), "head": range(values.shape[1])}
        out.append(grid(values, {**about, "view": "retrieval_head", "readout": name}, **axes))
    return out


def _keys_and_values(spans: Sequence[red.Span], arm: Arm, full: Arm, grain: Grain) -> list[Cells]:
    out = []
    for part, mine, theirs in (("k", arm.cache.keys, full.cache.keys), ("v", arm.cache.values, full.cache.values)):
        for readout, measure in (("angle", red.angle), ("norm_ratio", red.norm_ratio)):
            maps = [measure(red.chunk_of(mine, span), red.chunk_of(theirs, span)) for span in spans]
            about = {"view": "kv", "site": arm.name, "ranking": arm.name, "part": part, "readout": readout}
            out.append(_binned(maps, grain, **about))
    return out


def _sink(item: Item, arm: Arm) -> list[Cells]:
    """Attention per token in the first token, the leading 10 % and the middle 80 % of every moved chunk, per layer."""
    out = []
    for index in item.moved:
        start, stop = span = item.blocks.spans[index]
        about = {"view": "sink", "site": arm.name, "ranking": arm.name, "position": index, "size": stop - start}
        for readout, values in red.sink_densities(red.density(arm.rows, span)).items():
            out.append(grid(values, {**about, "readout": readout}, layer=range(len(values))))
    return out


def _readouts(item: Item, arm: Arm, full: Arm) -> Cells:
    """What the cache makes the model say: distances to full recompute, and the answer against the right one."""
    found: dict[str, float] = {
        "kl": float(metrics.kl_divergence(full.logits, arm.logits)),
        "logit_cosine": float(metrics.logit_cosine(full.logits, arm.logits)),
        "top1_agreement": float(metrics.agreement(full.logits, arm.logits)),
        "answer_logprob": float(arm.logits.double().log_softmax(-1)[item.answer[0]]),
    }
    if item.pair is not None:
        right, wrong = arm.logits[item.pair.answer_old_id], arm.logits[item.pair.answer_new_id]
        found |= {"answer_margin": float(right - wrong), "answer_correct": float(right > wrong)}
    else:
        found |= {
            "answer_correct": float(metrics.exact_match(arm.text, item.answers)),
            "token_f1": metrics.token_f1(arm.text, item.answers),
            "same_answer": float(metrics.normalised(arm.text) == metrics.normalised(full.text)),
        }
    return numbers(found, view="readout", site=arm.name, ranking=arm.name)


def numbers(found: Mapping[str, float], **about: Any) -> Cells:
    """One row per named number."""
    return Cells({"readout": list(found), "value": list(found.values())}, about)


def grid(values: Tensor, about: dict[str, Any], **axes: Sequence[Any]) -> Cells:
    """One row per cell of `values`, whose dimensions are `axes` in order; cells without a value are left out."""
    cells = values.double().numpy()
    there = np.isfinite(cells).reshape(-1)
    index = np.indices(cells.shape).reshape(cells.ndim, -1)[:, there]
    columns: dict[str, Sequence[Any]] = {
        name: [labels[i] for i in index[axis]] for axis, (name, labels) in enumerate(axes.items())
    }
    return Cells({**columns, "value": cells.reshape(-1)[there].tolist()}, about)


def _binned(maps: Sequence[Tensor], grain: Grain, **about: Any) -> Cells:
    """Maps `[layer pos]` of several chunks as one, layer x bin; `relative` is the middle of the bin."""
    values = _over([red.averaged(m, red.bin_weights(m.shape[-1], grain.bins, grain.binning)) for m in maps])
    cells = grid(values, about, layer=range(values.shape[0]), position=range(grain.bins))
    middles = [(place + 0.5) / grain.bins for place in cells.columns["position"]]
    return Cells({**cells.columns, "relative": middles}, about)


def _over(chunks: Sequence[Tensor]) -> Tensor:
    """Mean over chunks; a cell that no chunk has stays NaN."""
    return torch.stack(list(chunks)).nanmean(dim=0)
