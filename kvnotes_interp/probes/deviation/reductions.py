"""From attention rows, values and keys of two caches to the numbers of a deviation map. Pure functions on tensors.

Rows are `[layer head row key]`; a chunk is the key range `[start, stop)`. Nothing here knows a model.

Alignment. Token i of a chunk of L tokens covers the stretch [i/L, (i+1)/L) of it, round its relative position
(i + 0.5)/L. A weight matrix says how tokens make up a bin or a region:
- "overlap": by how much of the bin each token covers. Short chunks have no empty bins, and the mean over bins is the
  mean over tokens exactly.
- "centre": the tokens whose relative position lies in the bin, equally (SemPIC, arXiv 2607.28069). A bin that no token
  falls into is NaN and is left out of means.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from kvnotes_interp.errors import InputError

Binning = Literal["overlap", "centre"]
BINNINGS: tuple[Binning, ...] = ("overlap", "centre")
REGIONS = ("prefix", "interior", "suffix")
Span = tuple[int, int]


# --- alignment -----------------------------------------------------------------------------------------------------


def stretch_weights(length: int, edges: Float[Tensor, " bin+1"], how: Binning = "overlap") -> Float[Tensor, "bin pos"]:
    """Weights that average the tokens of a chunk over stretches between rising `edges` in [0, 1]; rows sum to 1.

    A row is NaN where no token belongs to its stretch ("centre" only).
    """
    if how not in BINNINGS:
        raise InputError(f"binning={how!r}: choose from {BINNINGS}.")
    if length < 1:
        raise InputError(f"a chunk of {length} tokens cannot be binned.")
    edges = edges.double()
    low, high = edges[:-1, None], edges[1:, None]
    if how == "overlap":
        starts = torch.arange(length, dtype=torch.float64) / length
        share = (torch.minimum(high, starts + 1 / length) - torch.maximum(low, starts)).clamp_min(0)
    else:
        centre = (torch.arange(length, dtype=torch.float64) + 0.5) / length
        # The last stretch is closed; no centre reaches 1, so this matters for no chunk.
        share = ((centre >= low) & (centre < high)).double()
    return share / share.sum(1, keepdim=True)


def bin_weights(length: int, bins: int, how: Binning = "overlap") -> Float[Tensor, "bin pos"]:
    """`bins` equal stretches of a chunk."""
    if bins < 1:
        raise InputError(f"bins={bins}: at least one is needed.")
    return stretch_weights(length, torch.arange(bins + 1, dtype=torch.float64) / bins, how)


def region_weights(length: int, edge: float, how: Binning = "overlap") -> Float[Tensor, "region pos"]:
    """Prefix (first `edge` of the chunk), interior, and suffix (last `edge`)."""
    if not 0 < edge < 0.5:
        raise InputError(f"edge={edge}: an edge ratio lies between 0 and 0.5.")
    return stretch_weights(length, torch.tensor([0.0, edge, 1 - edge, 1.0], dtype=torch.float64), how)


def averaged(values: Float[Tensor, "*lead pos"], weights: Float[Tensor, "bin pos"]) -> Float[Tensor, "*lead bin"]:
    """Weighted means over positions, one per row of weights."""
    return values.double() @ weights.mT


# --- attention -----------------------------------------------------------------------------------------------------


def within(rows: Float[Tensor, "layer head row key"], span: Span) -> Float[Tensor, "layer head row pos"]:
    """Attention renormalised inside the chunk; NaN where a row gives it none (a window that does not reach it)."""
    inside = rows[..., span[0] : span[1]].double()
    return inside / inside.sum(-1, keepdim=True)


def deviation(
    rows: Float[Tensor, "layer head row key"],
    reference: Float[Tensor, "layer head row key"],
    span: Span,
    *,
    renormalise: bool,
) -> Float[Tensor, "layer pos"]:
    """Absolute difference of attention per token, mean over heads and rows.

    `renormalise` compares where inside the chunk attention goes, whatever the chunk gets in total; rows that do not
    reach the chunk are left out of that mean. NaN where none reaches it.
    """
    if renormalise:
        return (within(rows, span) - within(reference, span)).abs().nanmean(dim=(1, 2))
    cut = slice(*span)
    return (rows[..., cut].double() - reference[..., cut].double()).abs().mean(dim=(1, 2))


def density(rows: Float[Tensor, "layer head row key"], span: Span) -> Float[Tensor, "layer pos"]:
    """Attention per token of the chunk, mean over heads and rows."""
    return rows[..., span[0] : span[1]].double().mean(dim=(1, 2))


def sink_densities(profile: Float[Tensor, "layer pos"]) -> dict[str, Float[Tensor, " layer"]]:
    """Attention per token in the first token, the leading 10 % and the middle 80 % of a chunk (by overlap)."""
    weights = stretch_weights(profile.shape[-1], torch.tensor([0.0, 0.1, 0.9, 1.0], dtype=torch.float64))
    leading, middle, _ = averaged(profile, weights).unbind(-1)
    return {"first_token": profile[:, 0].double(), "leading": leading, "middle": middle}


# --- what is retrieved ---------------------------------------------------------------------------------------------


def retrieved(
    rows: Float[Tensor, "layer head row key"], values: Float[Tensor, "layer kv_head pos d_head"], span: Span
) -> Float[Tensor, "layer head row d_head"]:
    """sum_k p_k v_k over the chunk's keys, per query head, before the output projection.

    `values` are those of the chunk only; query head h reads KV head h // (heads / kv_heads).
    """
    groups = rows.shape[1] // values.shape[1]
    weights = rows[..., span[0] : span[1]].double()
    return weights @ values.double().repeat_interleave(groups, dim=1)


def retrieval_errors(
    got: Float[Tensor, "layer head row d_head"], reference: Float[Tensor, "layer head row d_head"]
) -> tuple[dict[str, Float[Tensor, " layer"]], dict[str, Float[Tensor, "layer head"]]]:
    """(per layer, per layer and head): "nrmse" and "cosine_distance" of retrieved vectors.

    nrmse is sqrt(sum of squared errors / sum of the reference's squares), pooled over rows (and heads), so that heads
    that retrieve next to nothing do not decide it. cosine_distance is a mean over rows (and heads). NaN where the
    reference retrieves nothing at all.
    """
    error, energy = (got - reference).square().sum(-1), reference.square().sum(-1)  # [layer head row]
    scale = got.norm(dim=-1) * reference.norm(dim=-1)
    distance = 1 - (got * reference).sum(-1) / scale
    by_layer = {
        "nrmse": (error.sum((1, 2)) / energy.sum((1, 2))).sqrt(),
        "cosine_distance": distance.nanmean(dim=(1, 2)),
    }
    by_head = {"nrmse": (error.sum(2) / energy.sum(2)).sqrt(), "cosine_distance": distance.nanmean(dim=2)}
    return by_layer, by_head


def mass(rows: Float[Tensor, "layer head row key"], span: Span) -> Float[Tensor, "layer head row"]:
    """What a chunk gets of every row."""
    return rows[..., span[0] : span[1]].double().sum(-1)


# --- keys and values -----------------------------------------------------------------------------------------------


def angle(
    got: Float[Tensor, "layer kv_head pos d_head"], reference: Float[Tensor, "layer kv_head pos d_head"]
) -> Float[Tensor, "layer pos"]:
    """Angle between two vectors in radians, mean over KV heads. Exact near 0, where an arc cosine is not (Kahan)."""
    a, b = (torch.nn.functional.normalize(t.double(), dim=-1) for t in (got, reference))
    return (2 * torch.atan2((a - b).norm(dim=-1), (a + b).norm(dim=-1))).mean(dim=1)


def norm_ratio(
    got: Float[Tensor, "layer kv_head pos d_head"], reference: Float[Tensor, "layer kv_head pos d_head"]
) -> Float[Tensor, "layer pos"]:
    """Norm over the reference's norm, mean over KV heads; 1 where nothing changed."""
    return (got.double().norm(dim=-1) / reference.double().norm(dim=-1)).mean(dim=1)


def chunk_of(layers: tuple[Tensor, ...], span: Span) -> Float[Tensor, "layer kv_head pos d_head"]:
    """The chunk's slots of a batch-1 cache's keys or values, all layers, on the CPU."""
    return torch.stack([t[0, :, span[0] : span[1]].cpu() for t in layers])
