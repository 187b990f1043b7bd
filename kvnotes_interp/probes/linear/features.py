"""Features for linear probes: residual stream, keys and values of clean runs, at places that prompts share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvnotes_interp import compat, engine
from kvnotes_interp.cache import KVCache
from kvnotes_interp.errors import ControlError, InputError, nearest
from kvnotes_interp.files import replacing
from kvnotes_interp.probes.linear.fit import Samples
from kvnotes_interp.probes.measure import Case, downstream_of, field_of
from kvnotes_interp.rope import rotate
from kvnotes_interp.sites import Site
from kvnotes_interp.tasks import EncodedPair
from kvnotes_interp.tasks.pair import pieces_of

if TYPE_CHECKING:
    from kvnotes_interp.model import Model

FEATURES = ("residual", "keys", "values")
POSITIONS = ("before", "field", "rule_end", "aggregators", "decision")
Places = Mapping[str, Mapping[str, int]]
"""Name of a position -> key of the pair -> slot."""
CacheOf = Callable[[Case], KVCache]
"""From an opened pair to a cache that holds everything up to the decision token."""
STATES: Mapping[str, CacheOf] = {
    "stale": lambda case: case.base,
    "field_only": lambda case: case.base.patched(Site(field_of(case.pair)), case.donor),
    "downstream_only": lambda case: case.base.patched(Site(downstream_of(case.pair)), case.donor),
    "oracle": lambda case: case.donor,
}


# --- places ----------------------------------------------------------------------------------------------------------


def places_of(
    pairs: Sequence[EncodedPair], positions: Sequence[str] | None = None, *, max_aggregators: int = 4
) -> dict[str, dict[str, int]]:
    """Where each named position stands in each pair, in the order of the prompt.

    Args:
        positions: names out of `POSITIONS`, or anchors ("place:-1"); None takes every name that all pairs have.
            "before" is the token before the field (the same in both prompts: nothing can be read there), "field" its
            last token, "rule_end" the last token of the rule, "decision" the last token of the prompt. "aggregators"
            are the delimiters between field and decision prompt that all pairs of a family share, counted from the
            last one: "aggregator", "aggregator:-2", ...; "aggregator" alone is the last one.
        max_aggregators: the last and the first, and as many evenly between them.

    Raises InputError for a position that a pair lacks.
    """
    if not pairs:
        return {}
    wanted = tuple(POSITIONS if positions is None else dict.fromkeys(positions))
    aggregators = _aggregators(pairs)
    found: dict[str, dict[str, int]] = {}
    for name in wanted:
        if name == "aggregators":
            kept = _spread(len(aggregators), max_aggregators)
            here = {_aggregator_name(k): aggregators[k] for k in kept}
        elif name == "aggregator":
            here = {name: aggregators[0]} if aggregators else {}
        else:
            slots = {pair.pair.key: _slot(pair, name) for pair in pairs}
            lacking = [key for key, slot in slots.items() if slot is None]
            if lacking and positions is not None:
                hint = nearest(name, (*POSITIONS, "aggregator"))
                raise InputError(
                    f"positions holds {name!r}, which pair {lacking[0]!r} does not have.{hint} Names: "
                    f"{', '.join((*POSITIONS, 'aggregator'))}, or an anchor that every prompt has."
                )
            here = {} if lacking else {name: {k: s for k, s in slots.items() if s is not None}}
        if not here and positions is not None:
            raise InputError(f"positions holds {name!r}, but the pairs share no delimiter between field and decision.")
        found |= here
    order = sorted(found, key=lambda name: (float(np.median(list(found[name].values()))), list(found).index(name)))
    out: dict[str, dict[str, int]] = {}
    for name in order:
        # The rule often ends with a delimiter; under two names it would be measured twice.
        same = next((other for other in order if other != name and found[other] == found[name]), None)
        if not (same and name.startswith("aggregator") and not same.startswith("aggregator")):
            out[name] = found[name]
    return out


def _slot(pair: EncodedPair, name: str) -> int | None:
    """Slot of one named position or anchor, None where the pair has none."""
    if name == "before":
        return pair.field[0] - 1 if pair.field[0] > 0 else None
    if name == "field":
        return pair.field[1] - 1
    if name == "decision":
        return pair.length - 1
    if name == "rule_end":
        rule = {piece.anchor for piece in pieces_of(pair.pair.old) if piece.region == "rule"}
        inside = [slot for slot, anchor in enumerate(pair.anchors) if anchor.rpartition(":")[0] in rule]
        return inside[-1] if inside else None
    return pair.anchors.index(name) if name in pair.anchors else None


def _aggregators(pairs: Sequence[EncodedPair]) -> list[dict[str, int]]:
    """Shared delimiters between field and decision, the last first: pair key -> slot for each rank."""
    families: dict[str, list[EncodedPair]] = {}
    for pair in pairs:
        families.setdefault(pair.pair.family, []).append(pair)
    ranked: list[dict[str, list[int]]] = []
    for members in families.values():
        by_pair = {
            pair.pair.key: {pair.anchors[s]: s for s in downstream_of(pair) if pair.regions[s] == "delimiter"}
            for pair in members
        }
        shared = set.intersection(*(set(anchors) for anchors in by_pair.values()))
        ranked.append({key: sorted((a[n] for n in shared), reverse=True) for key, a in by_pair.items()})
    depth = min((len(slots) for family in ranked for slots in family.values()), default=0)
    return [{key: slots[k] for family in ranked for key, slots in family.items()} for k in range(depth)]


def _spread(n: int, most: int) -> list[int]:
    return sorted({round(i) for i in np.linspace(0, n - 1, min(n, most))}) if n and most > 0 else []


def _aggregator_name(rank: int) -> str:
    return "aggregator" if rank == 0 else f"aggregator:-{rank + 1}"


# --- labels ----------------------------------------------------------------------------------------------------------


def samples_of(pairs: Sequence[EncodedPair], labels: str = "auto") -> tuple[Samples, str]:
    """One row per prompt, the old one of a pair before the new one; and which labels were used.

    "answer" takes the answer's text; "outcome" the family's name for it (its template, such as " {case.yes}"), which
    families need whose answers are other words in every content. "auto" takes the answer if nine in ten prompts find
    both answers of their pair in other contents, else the outcome.
    """
    rows = [_rows(pair, "answer") for pair in pairs]
    flat = [row for both in rows for row in both]
    if labels == "auto":
        seen: dict[str, set[str]] = {}
        for row in flat:
            seen.setdefault(row["label"], set()).add(row["group"])
        known = [len(seen[r["label"]]) > 1 and len(seen[r["rival"]]) > 1 for r in flat]
        labels = "answer" if sum(known) >= 0.9 * len(known) else "outcome"
    if labels == "outcome":
        lacking = [p for p in pairs if not (p.pair.outcome_old and p.pair.outcome_new)]
        if lacking:
            raise InputError(
                f"family {lacking[0].pair.family!r} has no outcomes that compare between contents, and its answers "
                "occur in one content each: no probe trained on some contents can be tested on others. Take more "
                "pairs (n=...), or another family."
            )
        flat = [row for pair in pairs for row in _rows(pair, "outcome")]
    return Samples.of(flat), labels


def _rows(pair: EncodedPair, kind: str) -> list[dict[str, str]]:
    source = pair.pair
    names = (source.answer_old, source.answer_new) if kind == "answer" else (source.outcome_old, source.outcome_new)
    same = {"group": source.content, "unit": source.key, "family": source.family}
    return [
        {**same, "label": names[0], "rival": names[1], "value": source.field_old},
        {**same, "label": names[1], "rival": names[0], "value": source.field_new},
    ]


# --- recording -------------------------------------------------------------------------------------------------------


def record(
    case: Case,
    slots: Sequence[int],
    *,
    live: Sequence[int],
    features: Sequence[str],
    layers: Sequence[int],
    states: Mapping[str, CacheOf],
) -> dict[str, Tensor]:
    """Features of both prompts of a pair at `slots`, on the CPU; `live` are those with a residual stream to read.

    "residual" `[live layer side d_model]`: what layer l reads; l = n_layers: what the final norm reads.
    "keys", "values" `[place layer side kv_head*d_head]`: of the layers in `layers` below n_layers; keys are turned back
    to position 0, so that the same token at another place has the same key in layer 0.
    "lens" `[n_layers+1 side 2]`: logits of the old and the new answer, read from the decision token at every layer.
    "state/<name>" `[layer d_model]`: the decision token's residual on top of each cache of `states`.
    """
    model, pair = case.model, case.pair
    decision = pair.length - 1
    where = sorted({*live, decision})
    residual, caches = _both(case, where)
    at = [where.index(slot) for slot in live]
    out = {"lens": lens(model, residual[:, :, where.index(decision)], case.answers)}
    if "residual" in features:
        out["residual"] = residual[list(layers)][:, :, at].permute(2, 0, 1, 3).contiguous()
    if {"keys", "values"} & set(features):
        cached = [layer for layer in layers if layer < model.shape.n_layers]
        sides = [cached_features(cache, slots, cached) for cache in caches]
        keys, values = (torch.cat(parts, dim=2) for parts in zip(*sides, strict=True))
        out |= {name: part for name, part in (("keys", keys), ("values", values)) if name in features}
    for name, cache_of in states.items():
        out[f"state/{name}"] = decision_residual(model, cache_of(case), case.tail)[list(layers), 0]
    return out


def _both(case: Case, slots: Sequence[int]) -> tuple[Float[Tensor, "layer+1 side slot d_model"], list[KVCache]]:
    """Residual stream of both prompts at `slots`, and the whole caches: a clean run, or the tail on what was made."""
    if case.making.operator is None:
        ids = [list(case.pair.old_ids), list(case.pair.new_ids)]
        seen = [engine.capture(case.model, None, ids, slots=slots, want=("residual",))]
    else:
        seen = [
            engine.capture(case.model, cache, case.tail, slots=slots, want=("residual",))
            for cache in (case.base, case.donor)
        ]
    residual = [one.residual for one in seen if one.residual is not None]
    return torch.cat(residual, dim=1), [one.cache for one in seen]


def cached_features(
    cache: KVCache, slots: Sequence[int], layers: Sequence[int]
) -> tuple[Float[Tensor, "place layer side d"], Float[Tensor, "place layer side d"]]:
    """Un-rotated keys and values of some slots, heads laid side by side, in at least float32."""
    at, back = list(slots), -cache.positions[list(slots)]

    def flat(part: Tensor) -> Tensor:
        exact = torch.promote_types(part.dtype, torch.float32)
        return part.to(exact).cpu().permute(2, 0, 1, 3).flatten(2)  # [place side kv_head*d_head]

    exact = torch.promote_types(cache.dtype, torch.float32)
    keys = [flat(rotate(cache.keys[layer][:, :, at].to(exact), back, cache.rope.layers[layer])) for layer in layers]
    values = [flat(cache.values[layer][:, :, at]) for layer in layers]
    return torch.stack(keys, 1), torch.stack(values, 1)


def decision_residual(model: Model, cache: KVCache, tail: Sequence[int]) -> Float[Tensor, "layer+1 batch d_model"]:
    """The residual stream of the last token of `tail`, run on top of any cache."""
    last = len(cache) + len(tail) - 1
    seen = engine.capture(model, cache, list(tail), slots=(last,), want=("residual",))
    assert seen.residual is not None
    return seen.residual[:, :, 0]


@torch.no_grad()
def lens(
    model: Model, residual: Float[Tensor, "layer side d_model"], answers: Sequence[int]
) -> Float[Tensor, "layer side answer"]:
    """Logits of the answer tokens if the residual stream went straight to the final norm (the logit lens)."""
    device, dtype = model.device, model.dtype
    normed = compat.final_norm(model.hf)(residual.to(device, dtype))
    return engine.logits_of(model, normed, answers).cpu()


def lens_control(case: Case, margins: np.ndarray) -> list[dict[str, Any]]:
    """The lens of the last layer is the model's own decision; else what was recorded is not the residual stream."""
    gap = float(np.abs(margins[-1] - np.array([case.old, case.new])).max())
    # A pass over the whole prompt rounds otherwise than one step on its cache, hence more room than a patch gets.
    tolerance = min(8 * case.tolerance, 0.1 * abs(case.new - case.old))
    if not gap <= tolerance:
        raise ControlError(
            f"control 'lens_top' failed on {case.model.name} ({case.model.dtype}), pair {case.pair.pair.key}: the "
            f"logit lens behind the last layer is {gap:.3g} logits off the decision, tolerance {tolerance:.3g}."
        )
    about = {**case.names, "view": "control", "site": "lens_top"}
    return [{**about, "readout": k, "value": v} for k, v in (("gap", gap), ("tolerance", tolerance))]


@dataclass
class Store:
    """Features of each pair: safetensors in the run folder, or in memory for a run without one."""

    folder: Path | None
    memory: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def put(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        """Keep the features of one pair; whole or not at all."""
        if self.folder is None:
            self.memory[key] = dict(tensors)
            return
        from safetensors.torch import save_file

        with replacing(self.folder / f"{key}.safetensors") as temporary:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary)

    def rows(self, keys: Sequence[str], name: str) -> Float[Tensor, "pair ..."]:
        """One kind of feature of several pairs, stacked."""
        if self.folder is None:
            return torch.stack([self.memory[key][name] for key in keys])
        from safetensors import safe_open

        out = []
        for key in keys:
            with safe_open(self.folder / f"{key}.safetensors", framework="pt") as file:
                out.append(file.get_tensor(name))
        return torch.stack(out)


def layers_of(layers: Sequence[int] | str | None, n_layers: int, *, most: int = 16) -> tuple[int, ...]:
    """Which residual points 0 (the embedding) to n_layers (after the last layer) are probed.

    None: at most `most` of them, evenly spread, both ends among them. "all": every one.
    """
    if layers is None:
        return tuple(_spread(n_layers + 1, most))
    chosen = tuple(range(n_layers + 1)) if isinstance(layers, str) and layers == "all" else layers
    if isinstance(chosen, str) or not chosen or any(not 0 <= int(layer) <= n_layers for layer in chosen):
        raise InputError(f'layers={layers!r}: give "all", or numbers from 0 (the embedding) to {n_layers}.')
    return tuple(sorted({int(layer) for layer in chosen}))


def final_sign(margins: Float[np.ndarray, "layer row"]) -> Int[np.ndarray, " row"]:
    """The first layer from which on the margin keeps the sign it ends with; the last layer at the latest."""
    sign = np.sign(margins)
    differs = sign != sign[-1]
    last = np.where(differs.any(0), len(margins) - 1 - differs[::-1].argmax(0), -1)
    return last + 1
