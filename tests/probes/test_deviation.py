"""Attention deviation against transformers' own eager attention, chunks masked from each other."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from kvnotes_interp import compat, engine, operators
from kvnotes_interp.cache import KVCache
from kvnotes_interp.model import Model, wrap
from kvnotes_interp.operators import Blocks
from kvnotes_interp.probes.deviation.rows import Arm, Grain, alone, compare, table
from kvnotes_interp.probes.items import Item
from kvnotes_interp.sources import ModelSource
from tests.architectures import WINDOW, build

BLOCKS = Blocks((5, 6, 7), ((11, 12, 13, 14, 15, 16, 17, 18), (21, 22), (31, 32, 33, 34, 35)), (41, 42, 43))
SLIDING = {"mistral", "gemma2", "gemma3"}


# --- an independent computation --------------------------------------------------------------------------------------


def eager(name: str, *, apart: bool) -> tuple[Tensor, list[Tensor], list[Tensor], Tensor]:
    """(attention [layer head query key], keys, values, logits) of one plain forward of transformers' eager attention.

    `apart` masks every chunk from all that stands before it, at its joint positions: rotary attention only knows
    distances, so this is the join of chunks that were prefilled alone, without any cache, rotation or join of ours.
    """
    hf = build(name, attn="eager")
    n = len(BLOCKS)
    piece = [0] * len(BLOCKS.prefix)
    for index, chunk in enumerate(BLOCKS.chunks):
        piece += [index + 1] * len(chunk)
    piece += [99] * len(BLOCKS.suffix)
    query, key = torch.arange(n)[:, None], torch.arange(n)[None]
    allowed = key <= query
    if apart:
        mine = torch.tensor(piece)
        allowed &= (mine[:, None] == mine[None]) | (mine[:, None] == 99)
    additive = torch.zeros(n, n, dtype=torch.float64).masked_fill(~allowed, torch.finfo(torch.float64).min)[None, None]
    near = torch.zeros(n, n, dtype=torch.float64).masked_fill(
        ~(allowed & (query - key < WINDOW)), torch.finfo(torch.float64).min
    )[None, None]
    mask: Any = additive
    if name == "mistral":
        mask = near
    elif name in SLIDING:
        mask = {"full_attention": additive, "sliding_attention": near}
    cache = DynamicCache()
    out = hf(
        input_ids=torch.tensor([BLOCKS.token_ids]),
        attention_mask=mask,
        position_ids=torch.arange(n)[None],
        past_key_values=cache,
        use_cache=True,
        output_attentions=True,
    )
    attentions = torch.stack(out.attentions)[:, 0]
    return attentions, [x.keys for x in cache.layers], [x.values for x in cache.layers], out.logits[0]


def looked_at(model: Model, cache: KVCache, slots: list[int]) -> Arm:
    done = engine.capture(model, cache, list(BLOCKS.suffix), slots=slots, want=("patterns",))
    assert done.patterns is not None
    return Arm("op", cache, done.patterns[:, 0], compat.unembed(model.hf, done.hidden[0, -1]))


ITEM = Item("key", "content", "family", "question", "test", BLOCKS, (3,), (" x",), (), ())


@pytest.mark.parametrize("name", ["llama3", "yarn", "qwen3", "gemma2", "gemma3", "mistral", "phi3", "gpt_neox"])
def test_rows_and_maps_are_those_of_eager_attention(name: str) -> None:
    model = wrap(build(name, attn="eager"), None, ModelSource(name=name, kind="live"))
    n = len(BLOCKS)
    slots = [n - 3, n - 1]
    arm = looked_at(model, operators.no_recompute(model, BLOCKS).cache, slots)
    full = looked_at(model, operators.full_recompute(model, BLOCKS).cache, slots)
    p_arm, k_arm, v_arm, logits_arm = eager(name, apart=True)
    p_full, k_full, v_full, logits_full = eager(name, apart=False)
    torch.testing.assert_close(arm.rows, p_arm[:, :, slots], atol=1e-6, rtol=0)
    torch.testing.assert_close(full.rows, p_full[:, :, slots], atol=1e-6, rtol=0)
    torch.testing.assert_close(arm.logits, logits_arm[-1], atol=1e-5, rtol=0)
    # The control: keys left where they were are not what eager attention sees.
    still = looked_at(model, operators.no_recompute(model, BLOCKS, move_keys=False).cache, slots)
    assert float((still.rows - p_arm[:, :, slots]).abs().max()) > 1e-3

    cells = compare(ITEM, arm, full, Grain(bins=3, edges=(0.2,), binning="centre"))
    frame = table(ITEM, [*cells, *alone(ITEM, arm, full)])
    # From here on plain loops over transformers' own tensors.
    want = expected(p_arm[:, :, slots], p_full[:, :, slots], v_arm, v_full, k_arm, k_full, bins=3, edge=0.2)
    for row in frame.to_dict("records"):
        key = cell(row)
        if key in want:
            assert row["value"] == pytest.approx(want.pop(key), abs=2e-6), key
    assert not want, f"cells that the probe left out: {list(want)[:5]}"
    shown = frame[frame["view"] == "readout"].set_index("readout")["value"]
    p, q = logits_full[-1].softmax(-1), logits_arm[-1].softmax(-1)
    assert shown["kl"] == pytest.approx(float((p * (p / q).log()).sum()), abs=1e-5)
    assert shown["top1_agreement"] == float(p.argmax() == q.argmax())


def cell(row: dict[str, Any]) -> tuple[Any, ...]:
    """Where a row of the frame stands, as `expected` names it."""
    number = lambda name: int(row[name]) if row.get(name) is not None else None  # noqa: E731
    axes = {
        "deviation": (number("layer"), number("position")),
        "region": (row.get("region"),),
        "retrieval": (number("layer"),),
        "retrieval_head": (number("layer"), number("head")),
        "kv": (row["part"], number("layer"), number("position")),
        "sink": (number("position"), number("layer")),
    }
    return (row["view"], row["readout"], *axes.get(row["view"], ()))


def expected(
    p: Tensor, q: Tensor, v: list[Tensor], w: list[Tensor], k: list[Tensor], j: list[Tensor], *, bins: int, edge: float
) -> dict[tuple[Any, ...], float]:
    """Every cell by loops over layers, heads, rows and tokens: (p, v, k) of the operator against (q, w, j) of full."""
    layers, heads, rows, _ = p.shape
    kv_heads = v[0].shape[1]
    lists: dict[tuple[Any, ...], list[float]] = {}

    def note(value: float, *key: Any) -> None:
        if not math.isnan(value):
            lists.setdefault(key, []).append(value)

    for index, (a, b) in enumerate(BLOCKS.spans):
        size = b - a
        region_of = [
            "prefix" if (i + 0.5) / size < edge else "suffix" if (i + 0.5) / size >= 1 - edge else "interior"
            for i in range(size)
        ]
        by_region: dict[tuple[str, str], list[float]] = {}
        for layer in range(layers):
            raw, inside, seen = [[] for _ in range(size)], [[] for _ in range(size)], [[] for _ in range(size)]
            masses, distances, errors, energies = [], [], {}, {}
            for head in range(heads):
                for row in range(rows):
                    one, two = p[layer, head, row, a:b].tolist(), q[layer, head, row, a:b].tolist()
                    group = head // (heads // kv_heads)
                    got = sum(x * v[layer][0, group, a + i] for i, x in enumerate(one))
                    ref = sum(x * w[layer][0, group, a + i] for i, x in enumerate(two))
                    masses.append((head, abs(sum(one) - sum(two))))
                    errors.setdefault(head, []).append(float(((got - ref) ** 2).sum()))
                    energies.setdefault(head, []).append(float((ref**2).sum()))
                    reach = sum(two) > 0
                    if reach:
                        distances.append((head, 1 - float((got * ref).sum() / (got.norm() * ref.norm()))))
                    for i in range(size):
                        raw[i].append(abs(one[i] - two[i]))
                        seen[i].append(one[i])
                        if reach:
                            inside[i].append(abs(one[i] / sum(one) - two[i] / sum(two)))
            for name, values in (("deviation", inside), ("deviation_raw", raw)):
                cells: dict[tuple[str, Any], list[float]] = {}
                for i in range(size):
                    if values[i]:
                        mean = sum(values[i]) / len(values[i])
                        cells.setdefault(("bin", min(int((i + 0.5) / size * bins), bins - 1)), []).append(mean)
                        cells.setdefault(("region", region_of[i]), []).append(mean)
                for (kind, where), found in cells.items():
                    if kind == "bin":
                        note(sum(found) / len(found), "deviation", name, layer, where)
                    else:
                        by_region.setdefault((name, where), []).append(sum(found) / len(found))
            if sum(sum(e) for e in energies.values()) > 0:
                total = sum(map(sum, errors.values())) / sum(map(sum, energies.values()))
                note(math.sqrt(total), "retrieval", "nrmse", layer)
                note(float(np.mean([d for _, d in distances])), "retrieval", "cosine_distance", layer)
                for head in range(heads):
                    share = math.sqrt(sum(errors[head]) / sum(energies[head]))
                    note(share, "retrieval_head", "nrmse", layer, head)
            note(float(np.mean([m for _, m in masses])), "retrieval", "mass_error", layer)
            note(float(np.mean([sum(s) for s in zip(*seen, strict=True)])), "retrieval", "mass", layer)
            if inside[0]:
                note(sum(sum(i) / len(i) for i in inside) / 2, "retrieval", "total_variation", layer)
            note(float(np.mean(seen[0])), "sink", "first_token", index, layer)
            for part, mine, theirs in (("k", k, j), ("v", v, w)):
                turn: dict[int, list[float]] = {}
                for i in range(size):
                    angles = []
                    for group in range(kv_heads):
                        x, y = mine[layer][0, group, a + i], theirs[layer][0, group, a + i]
                        angles.append(math.acos(max(-1.0, min(1.0, float((x * y).sum() / (x.norm() * y.norm()))))))
                    turn.setdefault(min(int((i + 0.5) / size * bins), bins - 1), []).append(float(np.mean(angles)))
                for where, found in turn.items():
                    if layer:  # in layer 0 nothing differs, and an arc cosine is no judge of that
                        note(sum(found) / len(found), "kv", "angle", part, layer, where)
        for (name, where), found in by_region.items():
            note(sum(found) / len(found), "region", name, where)
    return {key: sum(values) / len(values) for key, values in lists.items()}
