"""A made-up result with every view: 12 pairs of the pronoun text, 12 layers, and notes at '.' and newline tokens."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pandas as pd

from kvnotes_interp.results import Control, Result, Summary
from kvnotes_interp.stats import bootstrap_mean

NAMES = [("John", "Mary"), ("Tom", "Anna"), ("Peter", "Laura"), ("David", "Emma")]
PLACES = [("market", "apples"), ("station", "tickets"), ("harbour", "fresh fish")]
N_LAYERS = 12


def prompt(name: str, place: str, goods: str) -> list[tuple[str, str, str]]:
    """Tokens as (text, region, anchor)."""
    pieces = [
        ("Here is a short story.\n", "before", "intro"),
        (name, "field", "name"),
        (" went to the", "context", "0"),
        (f" {place}", "context", "place"),
        (" to buy", "context", "1"),
        (f" {goods}", "context", "goods"),
        (".", "delimiter", "2"),
        (" The place was crowded and the line was slow", "filler", "3"),
        (".\n", "delimiter", "4"),
        ("On the way home,", "decision", "5"),
    ]
    out = []
    for text, region, anchor in pieces:
        tokens = re.findall(r"\n|[.,]| ?[A-Za-z]+", text)
        for index, token in enumerate(tokens):
            kind = "delimiter" if token in ".,\n" and region == "filler" else region
            out.append((token, kind, f"{anchor}:-{len(tokens) - index}"))
    return out


def make_result(
    *, seed: int = 0, n_layers: int = N_LAYERS, views: tuple[str, ...] | None = None, parts: bool = True
) -> Result:
    """The whole result, or only the rows of `views`."""
    rng = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    pairs: list[dict[str, Any]] = []
    depth = np.linspace(0, 1, n_layers)
    layer_weight = np.exp(-((depth - 0.6) ** 2) / 0.05)
    layer_weight /= layer_weight.sum()
    field_weight = np.exp(-(depth**2) / 0.03)
    for index in range(12):
        old, new = NAMES[index % 4]
        place, goods = PLACES[index // 4]
        content = f"{place}"
        tokens = prompt(old, place, goods)
        tokens_new = [t for t, _, _ in prompt(new, place, goods)]
        field = next(i for i, t in enumerate(tokens) if t[1] == "field")
        last = len(tokens) - 1
        positions = list(range(field, last))
        competent = index not in (5, 9)
        key = f"pronoun-{index:03d}"
        pairs.append(
            {
                "pair": key,
                "content": content,
                "family": "pronoun",
                "kind": "derived",
                "split": "train" if index % 2 else "test",
                "competent": competent,
                "reason": "" if competent else "no flip",
                "s_old": -2.0 - rng.random() if competent else 0.4,
                "s_new": 2.0 + rng.random(),
                "length": len(tokens),
                "field_start": field,
                "field_stop": field + 1,
                "answer_old": " he",
                "answer_new": " she",
                "tokens": [t for t, _, _ in tokens],
                "tokens_new": tokens_new,
                "regions": [r for _, r, _ in tokens],
                "anchors": [a for _, _, a in tokens],
                "delimiter": [t.strip() in ("", ".", ",") for t, _, _ in tokens],
            }
        )
        if not competent:
            continue
        base = {"pair": key, "content": content, "family": "pronoun", "part": "kv", "readout": "recovery"}

        def add(value: float, base: dict[str, Any] = base, **more: Any) -> None:
            rows.append({**base, **more, "value": float(value)})

        scale = {"kv": 1.0, "k": 0.35, "v": 0.6} if parts else {"kv": 1.0}
        for part, factor in scale.items():
            low, high = rng.normal(0.03, 0.05), rng.normal(0.95, 0.05)
            for site, value in {
                "stale": 0.0,
                "field_only": low * factor,
                "downstream_only": high * factor,
                "field_and_downstream": 1.0 * factor if part != "kv" else 1.0,
                "oracle": 1.0,
            }.items():
                add(value, view="state", site=site, part=part)
        effect = np.zeros(len(tokens))
        for p in positions:
            text, region, _ = tokens[p]
            strength = {"delimiter": 0.3, "filler": 0.015, "context": 0.02, "field": 0.03, "decision": 0.05}
            effect[p] = strength.get(region, 0.0) * rng.lognormal(0, 0.4) - 0.01
            if text == " went":
                effect[p] = 0.12
        for p in positions:
            text, region, anchor = tokens[p]
            where = {
                "position": p,
                "token": text,
                "region": region,
                "anchor": anchor,
                "delimiter": text.strip() in ("", ".", ","),
                "size": 1,
            }
            add(effect[p], view="position", **where)
            weight = field_weight / field_weight.sum() if region == "field" else layer_weight
            for layer in range(n_layers):
                add(effect[p] * weight[layer] + rng.normal(0, 0.004), view="layer_position", layer=layer, **where)
        for layer in range(n_layers):
            add(field_weight[layer] * 0.1 + rng.normal(0, 0.01), view="layer", site="field", layer=layer)
            add(layer_weight[layer] * 1.2 + rng.normal(0, 0.02), view="layer", site="downstream", layer=layer)
        for region in sorted({tokens[p][1] for p in positions}):
            inside = [p for p in positions if tokens[p][1] == region]
            value = min(1.0, effect[inside].sum() * 1.1)
            add(value, view="region", site=region, region=region, size=len(inside))
        for draw in range(5):
            add(rng.normal(0.01, 0.03), view="random", site="field", draw=draw, size=1)
        down = positions[1:]
        for k in [1, 2, 4, 8, 16, len(down)]:
            share = {
                "other_pairs": 1 - np.exp(-k / 4),
                "attention": 1 - np.exp(-k / 7),
                "same_pair": 1 - np.exp(-k / 2.6),
                "bottom": (k / len(down)) ** 4,
            }
            for ranking, value in share.items():
                value = 0.96 if k == len(down) else value * 0.96 + rng.normal(0, 0.02)
                add(value, view="cumulative", ranking=ranking, k=k, size=k)
            for draw in range(5):
                value = 0.96 if k == len(down) else (k / len(down)) ** 1.3 + rng.normal(0, 0.05)
                add(value, view="cumulative", ranking="random", k=k, draw=draw, size=k)
        for share in (2, 5, 10, 25, 50, 75, 100):
            k = max(1, round(len(down) * share / 100))
            add(0.96 * (1 - np.exp(-share / 18)), view="window", site=f"from_end:{share}%", k=k, size=k)
            add(0.96 * (share / 100) ** 1.6, view="window", site=f"from_field:{share}%", k=k, size=k)
    frame = pd.DataFrame(rows)
    if views is not None:
        frame = frame[frame["view"].isin(views)].reset_index(drop=True)
    return Result.build(
        probe="local_patching",
        frame=frame,
        pairs=pd.DataFrame(pairs),
        summary=make_summary(frame),
        manifest={"request": {"model": {"name": "smollm2-135m"}, "task": "pronoun"}},
    )


def make_summary(frame: pd.DataFrame) -> Summary:
    states = frame[(frame["view"] == "state") & (frame["part"] == "kv")]
    rows = []
    for site in ("field_only", "downstream_only", "field_and_downstream"):
        part = states[states["site"] == site]
        interval = bootstrap_mean(part["value"].to_numpy(dtype=float), part["content"].tolist())
        rows.append({"quantity": site, **interval.to_dict()})
    return Summary.of(
        "local_patching on smollm2-135m, task pronoun",
        rows,
        counts={"n_tried": 12, "n_competent": 10, "set_aside": {"no flip": 2}},
        controls=(
            Control("no_patch_is_base", True, 1.2e-6, 1e-4, 10),
            Control("patch_all_is_donor", True, 3.1e-6, 1e-4, 10, "largest at layer 7"),
        ),
        notes=("field + downstream is a control: it holds everything that differs.",),
    )
