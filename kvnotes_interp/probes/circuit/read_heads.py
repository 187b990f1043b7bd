"""Read heads: which heads bring the conclusion to the decision token?

Heads are ranked by direct logit attribution: what each adds to the score in the new run minus what it adds in the old
one, each run's final norm held at its own scale, as a share of `s_new - s_old` (all parts sum to 1). The ranking is
confirmed by patches: in the old run, the outputs of the top k heads at the decision token are replaced by those of the
new run (*patched*), and in the new run they are ablated (*ablated*). Ablations, by what stands in:

- resample (default): the head's output in the other prompt of the pair;
- mean: its mean output at the decision token, over both prompts of the pairs of the other half;
- zero: nothing.

Heads are ranked on one half of the pairs and patched on the other; the ranking made on the pair itself is shown as the
upper bound that it is, and random sets of k heads beside both. All heads together are the new run exactly: the decision
token is the same in both prompts, and its MLPs follow from what its heads brought. (Notes, arXiv 2606.17107, circuit.)

What this does not prove: that a head reads the *note*. It may read the field, or another head; see `knockout.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from kvnotes_interp.engine import Captured, Edits, WritePatch
from kvnotes_interp.probes.circuit import attribution, ranking
from kvnotes_interp.probes.circuit.attribution import record
from kvnotes_interp.probes.circuit.decide import (
    Head,
    Row,
    control_rows,
    decide,
    frame,
    row_of,
    run,
    scores,
    stacked,
    table,
)
from kvnotes_interp.probes.measure import Case

KS = (1, 3, 5, 8, 12)
ABLATIONS = ("resample", "mean", "zero")


def both_runs(case: Case) -> tuple[Captured, Captured]:
    """The decision token of the old and of the new prompt, with everything that attribution and patches need."""
    runs = run(case, stacked((case.base, case.donor)), want=attribution.WANT)
    return row_of(runs, 0), row_of(runs, 1)


def attribute(case: Case, *, grid: bool, keep_outputs: bool) -> pd.DataFrame:
    """What the first stage keeps of one pair: attributions of all parts, and the identities that hold the patches.

    `grid` adds every head patched alone. `keep_outputs` adds rows of the view "outputs" with the mean output of each
    head over both runs, in a column `z`, for mean ablation; they are not part of a result.
    """
    old, new = both_runs(case)
    out = [controls(case, old, new), attributions(case, old, new)]
    if grid:
        theirs = record(new.heads)[:, 0]
        cells = [({"view": "read_head", "site": "patched", "layer": h[0], "head": h[1]}, h) for h in every_head(case)]
        found = decide(case, [Row(case.base, heads=(head,), outputs=theirs) for _, head in cells])
        out.append(table(case, [(about, score) for (about, _), score in zip(cells, found, strict=True)]))
    if keep_outputs:
        mean = (record(old.heads)[:, 0, 0] + record(new.heads)[:, 0, 0]) / 2
        rows = [{**case.names, "view": "outputs", "layer": i, "z": z.flatten().tolist()} for i, z in enumerate(mean)]
        out.append(pd.DataFrame(rows))
    return pd.concat(out, ignore_index=True)


def every_head(case: Case) -> list[Head]:
    """All heads of the model, layer by layer."""
    shape = case.model.shape
    return [(layer, head) for layer in range(shape.n_layers) for head in range(shape.n_heads)]


def attributions(case: Case, old: Captured, new: Captured) -> pd.DataFrame:
    """One row per part: what it adds to `s_new - s_old`, in logits ("dla") and as a share ("dla_share").

    Where the model soft-caps its logits, both are of the logits before the cap.
    """
    before, after = (attribution.parts(case.model, run, case.answers) for run in (old, new))
    gap = after.score - before.score
    parts: list[tuple[dict[str, Any], float]] = []
    heads = after.heads - before.heads
    for layer in range(heads.shape[0]):
        for head in range(heads.shape[1]):
            about = {"view": "read_head", "site": "head", "layer": layer, "head": head}
            parts.append((about, float(heads[layer, head])))
        mlp = float(after.mlps[layer] - before.mlps[layer])
        parts.append(({"view": "attribution", "site": "mlp", "layer": layer}, mlp))
    parts.append(({"view": "attribution", "site": "embedding"}, after.embedding - before.embedding))
    parts.append(({"view": "attribution", "site": "rest"}, after.rest - before.rest))
    rows = []
    for about, value in parts:
        rows += [
            {**case.names, **about, "readout": name, "value": v}
            for name, v in (("dla", value), ("dla_share", value / gap))
        ]
    return frame(rows)


def controls(case: Case, old: Captured, new: Captured) -> pd.DataFrame:
    """Identities of patches at the decision token; a failure names the layer whose own patch is furthest off.

    no_heads and own_heads: nothing replaced, or everything by itself, is the old run. all_heads: all heads of the new
    run in the old one are the new run, and so are all writes (attention and MLP) of the new run.
    """
    mine, theirs = record(old.heads)[:, 0], record(new.heads)[:, 0]
    every = every_head(case)
    none, all_heads, own = decide(
        case, [Row(case.base), Row(case.base, heads=every, outputs=theirs), Row(case.base, heads=every, outputs=mine)]
    )
    slot = (len(case.base),)
    writes = (
        WritePatch("attention", slot, dict(enumerate(record(new.attention)))),
        WritePatch("mlp", slot, dict(enumerate(record(new.mlp)))),
    )
    written = scores(case, run(case, case.base, Edits(writes=writes)))[0]
    gaps = {
        "no_heads": none - case.old,
        "own_heads": own - case.old,
        "all_heads": all_heads - case.new,
        "all_writes": written - case.new,
    }

    def worst() -> str:
        layers = range(case.model.shape.n_layers)
        sets = [[head for head in every if head[0] == layer] for layer in layers]
        off = [abs(s - case.old) for s in decide(case, [Row(case.base, heads=s, outputs=mine) for s in sets])]
        layer = max(layers, key=off.__getitem__)
        return f"of single layers replaced by themselves, layer {layer} is furthest off ({off[layer]:.3g})"

    broken = any(not abs(gap) <= case.tolerance for gap in gaps.values())
    return control_rows(case, gaps, blame=dict.fromkeys(gaps, worst()) if broken else None)


def curves(
    case: Case,
    shares: pd.DataFrame,
    *,
    ks: Sequence[int],
    draws: int,
    seed: int,
    ablations: Sequence[str],
    outputs: pd.DataFrame | None,
) -> pd.DataFrame:
    """Top k heads patched into the old run, and ablated in the new one, under every ranking.

    `shares` are the attribution rows of all pairs; `outputs` the rows that `attribute` kept for mean ablation.
    """
    old, new = both_runs(case)
    theirs = record(new.heads)[:, 0]
    sets = head_sets(case, shares, ks=ks, draws=draws, seed=seed, name="read")
    cells = [({**about, "view": "read_curve", "site": "patched"}, heads) for about, heads in sets]
    rows = [Row(case.base, heads=heads, outputs=theirs) for _, heads in sets]
    for name in ablations:
        stand_in = _stand_in(name, case, record(old.heads)[:, 0], outputs)
        if stand_in is not None:
            here = {"view": "read_curve", "site": "ablated", "ablation": name}
            cells += [({**about, **here}, heads) for about, heads in sets]
            rows += [Row(case.donor, heads=heads, outputs=stand_in) for _, heads in sets]
    return table(case, [(about, score) for (about, _), score in zip(cells, decide(case, rows), strict=True)])


def head_sets(
    case: Case, values: pd.DataFrame, *, ks: Sequence[int], draws: int, seed: int, name: str
) -> list[tuple[dict[str, Any], list[Head]]]:
    """The top k of each ranking of heads, and random sets of k, with what the frame says of them."""
    n_layers, n_heads = case.model.shape.n_layers, case.model.shape.n_heads
    ks = sorted({min(k, n_layers * n_heads) for k in ks})
    out: list[tuple[dict[str, Any], list[Head]]] = []
    for which, order in ranking.rank_heads(values, case.pair).items():
        out += [({"ranking": which, "k": k, "size": k}, order[:k]) for k in ks]
    for draw in range(draws):
        order = ranking.random_heads(n_layers, n_heads, key=f"{seed}:{name}:{draw}:{case.pair.pair.key}")
        out += [({"ranking": "random", "k": k, "size": k, "draw": draw}, order[:k]) for k in ks]
    return out


def _stand_in(
    name: str, case: Case, resample: Float[Tensor, "layer slot head d_head"], outputs: pd.DataFrame | None
) -> Float[Tensor, "layer slot head d_head"] | None:
    """What replaces a head's output under this ablation; None where no other pair can give a mean."""
    if name == "resample":
        return resample
    if name == "zero":
        return torch.zeros_like(resample)
    assert outputs is not None
    other = ranking.other_half(outputs, case.pair)
    if other.empty:
        return None
    by_layer = [torch.tensor(other.loc[other["layer"] == i, "z"].tolist()).mean(0) for i in range(resample.shape[0])]
    return torch.stack(by_layer).to(resample.dtype).view_as(resample)
