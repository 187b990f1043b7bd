"""Single heads taken out at the decision token, through nnsight: the cells of one pair, its controls, the summary."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from kvnotes_interp.adapters.cases import TracedCase
from kvnotes_interp.adapters.traces import HeadEdit, Traced
from kvnotes_interp.errors import ControlError, InputError, nearest
from kvnotes_interp.metrics import recovery
from kvnotes_interp.probes.estimates import Estimates
from kvnotes_interp.results import Summary
from kvnotes_interp.results.tables import FRAME_COLUMNS
from kvnotes_interp.tasks import EncodedPair

ABLATIONS = ("resample", "mean", "zero")
COLUMNS = (*FRAME_COLUMNS, "head", "ablation")


def check_ablations(ablations: Sequence[str]) -> tuple[str, ...]:
    """Validate a choice of ablations. Raises InputError on an unknown one, or none."""
    for name in ablations:
        if name not in ABLATIONS:
            hint = nearest(name, ABLATIONS)
            raise InputError(f"ablations holds {name!r}; choose from {', '.join(ABLATIONS)}.{hint}")
    if not ablations:
        raise InputError(f"no ablation was asked for; choose from {', '.join(ABLATIONS)}.")
    return tuple(dict.fromkeys(ablations))


class Looks:
    """Head outputs at the decision token of both prompts of a pair, run when first asked for."""

    def __init__(self, traced: Traced, encoded: Iterable[EncodedPair]) -> None:
        self.traced, self.encoded = traced, list(encoded)
        self._kept: dict[str, torch.Tensor] = {}

    def mean_without(self, content: str) -> torch.Tensor | None:
        """Mean `[layer head d_head]` over both prompts of all pairs of other contents; None where there are none."""
        others = [p for p in self.encoded if p.pair.content != content]
        return torch.stack([self._of(p) for p in others]).mean(0) if others else None

    def _of(self, pair: EncodedPair) -> torch.Tensor:
        key = pair.pair.key
        if key not in self._kept:
            both = [self.traced.look(ids, (0,)).heads for ids in (pair.old_ids, pair.new_ids)]
            self._kept[key] = (both[0] + both[1]) / 2
        return self._kept[key]


def ablate(case: TracedCase, looks: Looks, heads: Sequence[tuple[int, int]], ablations: Sequence[str]) -> pd.DataFrame:
    """Every head taken out of the new run alone, under every ablation, and the controls of this pair."""
    rows = [controls(case)]
    for name in ablations:
        outputs = _stand_in(name, case, looks)
        if outputs is None:  # no pair of another content could be encoded
            continue
        scores = case.edited(case.donor, [_edit(outputs, [head]) for head in heads])
        out = []
        for (layer, head), score in zip(heads, scores, strict=True):
            about = {"view": "read_head", "site": "ablated", "layer": layer, "head": head, "ablation": name}
            values = (("logit_diff", score), ("recovery", recovery(score, old=case.old, new=case.new)))
            out += [{**case.names, "part": "kv", **about, "readout": r, "value": v} for r, v in values]
        rows.append(pd.DataFrame(out, columns=list(COLUMNS)))
    return pd.concat(rows, ignore_index=True)


def controls(case: TracedCase) -> pd.DataFrame:
    """Identities of replacing head outputs in the new run. Raises ControlError on one that fails.

    no_heads: nothing replaced, against a plain full forward. own_heads: all heads by themselves. all_heads: all heads
    by those of the old run, which is the old decision exactly.
    """
    every = [
        (layer, head) for layer in range(case.look_old.heads.shape[0]) for head in range(case.look_old.heads.shape[1])
    ]
    own, other = (_edit(look.heads, every) for look in (case.look_new, case.look_old))
    none, same, gone = case.edited(case.donor, [None, own, other])
    plain = float(case.look_new.logits[1] - case.look_new.logits[0])
    gaps = {"no_heads": none - plain, "own_heads": same - case.new, "all_heads": gone - case.old}
    for name, gap in gaps.items():
        if not abs(gap) <= case.tolerance:
            raise ControlError(
                f"control {name!r} failed on {case.model.name} through nnsight, pair {case.pair.pair.key}: off by "
                f"{abs(gap):.3g} logits, tolerance {case.tolerance:.3g} (noise floor {case.noise:.3g}). Head outputs "
                "are not replaced as they should be, and nothing measured here can be trusted."
            )
    rows = [
        {**case.names, "view": "control", "site": name, "readout": readout, "value": value}
        for name, gap in gaps.items()
        for readout, value in (("gap", abs(gap)), ("tolerance", case.tolerance))
    ]
    rows.append({**case.names, "view": "control", "site": "noise_floor", "readout": "gap", "value": case.noise})
    return pd.DataFrame(rows, columns=list(COLUMNS))


def summarise_ablation(frame: pd.DataFrame, tried: pd.DataFrame, *, model: str, seed: int) -> Summary:
    """Per ablation: what the strongest head takes away of the decision (1 - recovery), and the mean over heads."""
    found = Estimates(seed=seed)
    good = frame[(frame["view"] == "read_head") & (frame["readout"] == "recovery")]
    for name in dict.fromkeys(good["ablation"]) if "ablation" in good else ():
        here = good[good["ablation"] == name]
        here = here.assign(value=1.0 - here["value"])
        means = here.groupby(["layer", "head"])["value"].mean()
        layer, head = means.idxmax()  # type: ignore[misc]
        strongest = here[(here["layer"] == layer) & (here["head"] == head)]
        found.add(f"{name}_strongest", strongest, f"head {layer}.{head}; chosen on these pairs: upper bound")
        every = here.groupby(["pair", "content"], as_index=False)[["value"]].mean()
        found.add(f"{name}_mean", every, f"mean over {len(means)} heads")
    found.require("resample_strongest")
    return found.summary(f"head ablation on {model}", frame, tried)


def _stand_in(name: str, case: TracedCase, looks: Looks) -> Float[Tensor, "layer head d_head"] | None:
    """What replaces a head's output in the new run under this ablation."""
    if name == "resample":
        return case.look_old.heads
    if name == "zero":
        return torch.zeros_like(case.look_new.heads)
    return looks.mean_without(case.pair.pair.content)


def _edit(outputs: Tensor, heads: Iterable[tuple[int, int]]) -> HeadEdit:
    take = torch.zeros(outputs.shape[:2], dtype=torch.bool)
    for layer, head in heads:
        take[layer, head] = True
    return HeadEdit(take, outputs)
