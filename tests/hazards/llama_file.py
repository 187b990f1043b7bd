"""A tiny Llama as a GGUF file, written as llama.cpp's converter does, and its forward pass in plain torch.

Shares no code with the package, with transformers' models or with its rope: the tests compare with this.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LAYERS, HEADS, KV, WIDTH, D_HEAD, INNER, VOCAB = 3, 4, 2, 32, 8, 48, 96
EPS, THETA = 1e-5, 10_000.0
IDS = [5, 17, 3, 88, 41, 9, 60, 23, 71, 12, 34, 2, 90, 55, 7, 66, 31, 48, 80, 11]


def weights(seed: int = 0) -> dict[str, Tensor]:
    """Random weights under the names that llama.cpp gives them, in the layout of transformers (halves, not pairs)."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 1.4 / math.sqrt(shape[-1])

    out = {
        "token_embd.weight": torch.randn(VOCAB, WIDTH, generator=generator) * 0.6,
        "output_norm.weight": 1 + 0.25 * torch.randn(WIDTH, generator=generator),
        "output.weight": draw(VOCAB, WIDTH),
    }
    for i in range(LAYERS):
        out |= {
            f"blk.{i}.attn_norm.weight": 1 + 0.25 * torch.randn(WIDTH, generator=generator),
            f"blk.{i}.attn_q.weight": draw(HEADS * D_HEAD, WIDTH) * 1.5,
            f"blk.{i}.attn_k.weight": draw(KV * D_HEAD, WIDTH) * 1.5,
            f"blk.{i}.attn_v.weight": draw(KV * D_HEAD, WIDTH),
            f"blk.{i}.attn_output.weight": draw(WIDTH, HEADS * D_HEAD),
            f"blk.{i}.ffn_norm.weight": 1 + 0.25 * torch.randn(WIDTH, generator=generator),
            f"blk.{i}.ffn_gate.weight": draw(INNER, WIDTH),
            f"blk.{i}.ffn_up.weight": draw(INNER, WIDTH),
            f"blk.{i}.ffn_down.weight": draw(WIDTH, INNER),
        }
    return out


def paired(weight: Tensor, heads: int) -> Tensor:
    """Rows of a q or k projection with the two halves of a head interleaved, as llama.cpp stores a Llama."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def write(
    path: Path,
    tensors: Mapping[str, Tensor],
    keys: Mapping[str, Any] | None = None,
    *,
    arch: str = "llama",
    general: Mapping[str, Any] | None = None,
    without: Sequence[str] = (),
) -> Path:
    """A GGUF file with these tensors. `keys` go under the architecture's name, and may replace the usual ones."""
    import gguf
    import numpy as np

    usual: dict[str, Any] = {
        "context_length": 512,
        "embedding_length": WIDTH,
        "block_count": LAYERS,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV,
        "attention.layer_norm_rms_epsilon": EPS,
        "rope.freq_base": THETA,
        "rope.dimension_count": D_HEAD,
        "vocab_size": VOCAB,
    }
    writer = gguf.GGUFWriter(path, arch)
    own = {f"{arch}.{k}": v for k, v in (usual | dict(keys or {})).items() if k not in without}
    for key, value in (own | {"general.name": "tiny"} | dict(general or {})).items():
        put = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        put.get(type(value), writer.add_array)(key, value)
    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(30)), *(f"▁w{i}" for i in range(VOCAB - 33))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([-float(i) for i in range(VOCAB)])
    writer.add_token_types([2, 3, 3, *[6] * 30, *[1] * (VOCAB - 33)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    for name, tensor in tensors.items():
        if arch == "llama" and (".attn_q." in name or ".attn_k." in name):
            tensor = paired(tensor, HEADS if ".attn_q." in name else KV)
        writer.add_tensor(name, tensor.numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def forward(
    tensors: Mapping[str, Tensor], ids: Sequence[int], angles: Sequence[float] | None = None, scale: float = 1.0
) -> Tensor:
    """Logits `[pos token]` in float64. `angles` are the turns per token, `scale` is what cos and sin are multiplied by.

    Without `angles` the rotation is the plain one.
    """
    w = {name: t.double() for name, t in tensors.items()}
    freq = torch.tensor(angles if angles is not None else plain(), dtype=torch.float64)
    turns = torch.arange(len(ids), dtype=torch.float64)[:, None] * freq
    cos, sin = turns.cos() * scale, turns.sin() * scale

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight

    def rotate(x: Tensor) -> Tensor:
        a, b = x[..., : D_HEAD // 2], x[..., D_HEAD // 2 :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    x = w["token_embd.weight"][list(ids)]
    causal = torch.ones(len(ids), len(ids)).triu(1).bool()
    for i in range(LAYERS):
        at = f"blk.{i}."
        h = norm(x, w[at + "attn_norm.weight"])
        q, k, v = (
            (h @ w[f"{at}attn_{n}.weight"].T).reshape(len(ids), heads, D_HEAD).transpose(0, 1)
            for n, heads in (("q", HEADS), ("k", KV), ("v", KV))
        )
        q, k = rotate(q), rotate(k)
        k, v = (t.repeat_interleave(HEADS // KV, dim=0) for t in (k, v))
        scores = (q @ k.mT / math.sqrt(D_HEAD)).masked_fill(causal, -math.inf)
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(len(ids), HEADS * D_HEAD)
        x = x + mixed @ w[at + "attn_output.weight"].T
        h = norm(x, w[at + "ffn_norm.weight"])
        gate = h @ w[at + "ffn_gate.weight"].T
        x = x + (gate * gate.sigmoid() * (h @ w[at + "ffn_up.weight"].T)) @ w[at + "ffn_down.weight"].T
    return norm(x, w["output_norm.weight"]) @ w.get("output.weight", w["token_embd.weight"]).T


def plain(theta: float = THETA) -> list[float]:
    """Turns per token without scaling."""
    return [theta ** (-2 * i / D_HEAD) for i in range(D_HEAD // 2)]


def llama3_factors(factor: float = 8.0, low: float = 1.0, high: float = 4.0, original: int = 64) -> list[float]:
    """What llama.cpp's converter writes as `rope_freqs.weight` for a Llama 3.1 model."""
    out = []
    for f in plain():
        wave = 2 * math.pi / f
        if wave < original / high:
            out.append(1.0)
        elif wave > original / low:
            out.append(factor)
        else:
            smooth = (original / wave - low) / (high - low)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return out


def yarn_angles(factor: float, original: int, fast: float = 32.0, slow: float = 1.0) -> list[float]:
    """Turns per token under YaRN, as ggml computes them (`ggml_rope_yarn_corr_dims`, `rope_yarn`)."""

    def at(turns: float) -> float:
        return D_HEAD * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(THETA))

    low, high = max(0.0, math.floor(at(fast))), min(D_HEAD - 1.0, math.ceil(at(slow)))
    out = []
    for i, f in enumerate(plain()):
        mix = 1 - min(1.0, max(0.0, (i - low) / max(0.001, high - low)))
        out.append(f / factor * (1 - mix) + f * mix)
    return out
