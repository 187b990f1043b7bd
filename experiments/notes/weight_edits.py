"""Telling a model that one field changed: in its cache, or in its weights. What else changes with it?

    python -m experiments.notes.weight_edits --family pronoun --targets 8 --out runs/weight-edits

A prompt states a field, and the model decides by it. Now the field has a new value, for this request alone. The cache
edits leave the weights as they are; LoRA (PEFT; q, v and down projections) is trained on this one decision, and a
rank-one update in the manner of ROME rewrites what one MLP answers to the field's token. For each: does the decision
flip, do other requests that never changed flip with it (*contamination*: those with the same field value, and those
with other values), does something unrelated change (*collateral*: other families, and the next token on neutral text),
and how long does it take. After every edit the weights are put back and compared bit by bit.

Source: Notes, arXiv 2606.17107 (comparison with ROME and LoRA). What it does not prove: that no weight edit could be
specific. Each method is run once, with settings that were not tuned against contamination.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import kvnotes_interp as kv
from experiments.notes.weight_methods import Rewrite, Trained, bits, check_restored, lora, rome, second_moments
from experiments.notes.weight_readouts import (
    Ground,
    Request,
    cache_edit,
    competent,
    damage,
    flips_rightly,
    ground_for,
    margins,
    requests_of,
)
from kvnotes_interp.errors import InputError, KVNotesError
from kvnotes_interp.files import replacing
from kvnotes_interp.model import Model
from kvnotes_interp.stats import bootstrap_mean, wilson
from kvnotes_interp.tasks import EncodedPair, encode_all
from kvnotes_interp.tasks.family import neutral_lines

METHODS = ("field_only", "full_downstream", "erratum", "erratum_plain", "lora", "rome")
BATTERY = ("capital", "pronoun", "sentiment", "language", "copy", "rule", "badge", "gate")


@dataclass(frozen=True)
class Outcome:
    """One method on one decision. Shares are of requests that the untouched model answered rightly.

    Attributes:
        margin: logit of the new answer minus that of the old one after the edit. flipped: whether it is above 0.
        same_value, other_value, battery: share of decisions that changed; None where there was nothing to ask.
        next_token: share of neutral tokens whose next token changed. kl: mean KL there, in nats.
        seconds: of the edit. steps: of the optimiser. layer: that was edited (ROME).
    """

    method: str
    key: str
    content: str
    flipped: bool
    margin: float
    same_value: float | None
    other_value: float | None
    battery: float | None
    next_token: float | None
    kl: float | None
    seconds: float
    steps: int = 0
    layer: int | None = None


def compare(
    model: Model,
    targets: Sequence[EncodedPair],
    pool: Sequence[EncodedPair],
    battery: Sequence[Request],
    texts: Sequence[tuple[int, ...]],
    *,
    methods: Sequence[str] = METHODS,
    requests: int = 24,
    trained: Trained | None = None,
    rewrite: Rewrite | None = None,
    moment_texts: Sequence[Sequence[int]] = (),
    say: Any = None,
) -> tuple[list[Outcome], dict[str, Any]]:
    """Every method on every target; the second value has the seconds of the second moments and what was skipped.

    Args:
        targets: the decisions to change; each must be answered rightly before and after (checked by the caller).
        pool: where other requests of the family come from. battery: requests of other families, answered rightly.
        texts: neutral text. moment_texts: text for ROME's second moments, none of `texts` or `battery`.
        requests: other requests asked per target, of each kind.

    Raises:
        ControlError: the model's weights after an edit was undone are not those before, bit for bit.
    """
    before = bits(model.hf)
    skipped: dict[str, str] = {}
    outcomes: list[Outcome] = []
    started = time.perf_counter()
    rewrite = rewrite or Rewrite((model.shape.n_layers // 10,))
    moments = second_moments(model, moment_texts, rewrite.layers) if "rome" in methods else {}
    moment_seconds = time.perf_counter() - started if moments else None
    for number, target in enumerate(targets):
        ground = ground_for(model, target, pool, battery, texts, n=requests)
        names: dict[str, Any] = {"key": target.pair.key, "content": target.pair.content}
        found: list[Outcome] = []
        in_cache: dict[str, tuple[float, float]] = {}
        for method in methods:
            if method in skipped or method in ("lora", "rome"):
                continue
            try:
                in_cache[method] = cache_edit(model, target, method)
            except InputError as error:
                skipped[method] = str(error)
        if in_cache:  # the others are asked once, after all cache edits of this target
            after: dict[str, Any] = damage(model, ground)
            for method, (margin, seconds) in in_cache.items():
                found.append(Outcome(method, **names, flipped=margin > 0, margin=margin, seconds=seconds, **after))
        if "lora" in methods:
            started = time.perf_counter()
            with lora(model, target, trained or Trained()) as (steps, _):
                seconds = time.perf_counter() - started
                found.append(_of_weights(model, target, ground, "lora", names, seconds=seconds, steps=steps))
            check_restored(model.hf, before)
        if "rome" in methods:
            started = time.perf_counter()
            with rome(model, target, moments, rewrite) as (steps, layer):
                seconds = time.perf_counter() - started
                cost = {"seconds": seconds, "steps": steps, "layer": layer}
                found.append(_of_weights(model, target, ground, "rome", names, **cost))
        check_restored(model.hf, before)
        outcomes += found
        if say is not None:
            for one in found:
                say(f"{number + 1}/{len(targets)} {one}")
    return outcomes, {"second_moments_s": moment_seconds, "skipped": skipped, "layers": list(rewrite.layers)}


def _of_weights(
    model: Model, target: EncodedPair, ground: Ground, method: str, names: dict[str, Any], **cost: Any
) -> Outcome:
    """What the edited model says to the old prompt, and to everything else."""
    margin = -float(margins(model, [requests_of(target)[0]])[0])
    return Outcome(method, **names, flipped=margin > 0, margin=margin, **damage(model, ground), **cost)


def table(outcomes: Iterable[Outcome]) -> str:
    """Markdown: means over targets, with 95 % intervals (Wilson for flips, bootstrap over contents for shares)."""
    rows = list(outcomes)
    lines = [
        "| edit | decision flips | others, same value | others, other values | unrelated decisions | neutral tokens "
        "| KL (nats) | seconds |",
        "|" + "---|" * 8,
    ]
    for method in dict.fromkeys(row.method for row in rows):
        own = [row for row in rows if row.method == method]
        flips = wilson(sum(row.flipped for row in own), len(own))
        cells = [method, f"{flips.mean:.2f} [{flips.low:.2f}, {flips.high:.2f}]"]
        for name in ("same_value", "other_value", "battery", "next_token", "kl"):
            have = [row for row in own if getattr(row, name) is not None]
            found = bootstrap_mean([getattr(row, name) for row in have], [row.content for row in have])
            bounds = "" if found.low != found.low else f" [{found.low:.3f}, {found.high:.3f}]"
            cells.append(f"{found.mean:.3f}{bounds}" if have else "none")
        cells.append(f"{sum(row.seconds for row in own) / len(own):.2f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def unrelated(model: Model, family: str, *, per_family: int, seed: int) -> list[Request]:
    """Requests of all other families of BATTERY that this model answers rightly; those it cannot read are left out."""
    found: list[Request] = []
    for name in BATTERY:
        if name == family:
            continue
        encoded, _ = encode_all(model.tokenizer, kv.tasks.load(name, n=per_family, seed=seed, split="test"))
        found += competent(model, [requests_of(pair)[0] for pair in encoded])
    return found


def neutral(model: Model, name: str = "neutral_rules.txt") -> list[tuple[int, ...]]:
    """The packaged neutral lines as token ids, eight lines to a text."""
    from importlib import resources

    lines = neutral_lines(resources.files("kvnotes_interp.tasks") / "families" / name)
    texts = [" ".join(lines[i : i + 8]) for i in range(0, len(lines), 8)]
    return [tuple(model.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]


def run(
    model: Model,
    family: str,
    out: Path,
    *,
    targets: int = 8,
    requests: int = 24,
    pool: int = 400,
    per_family: int = 8,
    seed: int = 0,
    methods: Sequence[str] = METHODS,
    say: Any = None,
) -> list[Outcome]:
    """Compare on `targets` pairs of a family and write OUT/weight_edits.json and OUT/table.md.

    Raises:
        InputError: the folder holds a run, or the model answers no pair of this family rightly.
    """
    from kvnotes_interp.results import manifest

    if (out / "weight_edits.json").exists():
        raise InputError(f"{out} holds a run already: name another folder with --out.")
    encoded, _ = encode_all(model.tokenizer, kv.tasks.load(family, n=pool, seed=seed, split="test"))
    chosen: list[EncodedPair] = []
    for start in range(0, len(encoded), 2 * targets):  # no more are asked than are needed
        if len(chosen) < targets:
            chosen += flips_rightly(model, encoded[start : start + 2 * targets])
    chosen = chosen[:targets]
    if not chosen:
        raise InputError(
            f"{model.name} answers none of {len(encoded)} pairs of {family!r} both ways: name another family."
        )
    others, _ = encode_all(model.tokenizer, kv.tasks.load(family, n=pool, seed=seed + 1, split="test"))
    battery = unrelated(model, family, per_family=per_family, seed=seed)
    texts = neutral(model, "plain_lines.txt" if model.name.startswith("organism") else "neutral_rules.txt")
    train = [
        pair.old_ids
        for name in BATTERY
        for pair in encode_all(model.tokenizer, kv.tasks.load(name, n=16, seed=seed, split="train"))[0]
    ]
    outcomes, extra = compare(
        model, chosen, others, battery, texts, methods=methods, requests=requests, moment_texts=train, say=say
    )
    record = {
        "request": {
            "model": model.source.to_dict(), "family": family, "targets": len(chosen), "requests": requests,
            "pool": pool, "seed": seed, "methods": list(methods), "battery": len(battery),
            "neutral_tokens": sum(map(len, texts)), "second_moment_tokens": sum(map(len, train)),
        },
        **extra,
        "machine": manifest.machine(),
        "versions": manifest.versions(),
        "git": manifest.git_state(),
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }  # fmt: skip
    for name, text in (
        ("table.md", table(outcomes)),
        ("weight_edits.json", json.dumps(manifest.json_safe(record), indent=1) + "\n"),
    ):
        with replacing(out / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return outcomes


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--family", default="pronoun", help="task family of the decision (%(default)s)")
    parser.add_argument("--targets", type=int, default=8, help="decisions that are edited (%(default)s)")
    parser.add_argument("--requests", type=int, default=24, help="other requests of each kind per target (%(default)s)")
    parser.add_argument("--pool", type=int, default=400, help="pairs that they are drawn from (%(default)s)")
    parser.add_argument("--per-family", type=int, default=8, help="prompts of each unrelated family (%(default)s)")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="new folder for the run")
    given = parser.parse_args(arguments)
    try:
        outcomes = run(
            kv.load(given.model),
            given.family,
            given.out,
            targets=given.targets,
            requests=given.requests,
            pool=given.pool,
            per_family=given.per_family,
            seed=given.seed,
            methods=given.methods,
            say=lambda text: print(text, file=sys.stderr, flush=True),
        )
    except KVNotesError as error:
        print(f"Error: {error}", file=sys.stderr)
        return error.exit_code
    print(table(outcomes), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
