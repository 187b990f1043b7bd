"""Write the tables of README.md from studies: `python -m experiments.still.collect --keep runs/still --write`.

The paper's numbers stand here; ours are read from the studies' summaries, never typed. `--keep` copies them to
`summaries/` beside this file, from where the tables are read.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments import tables
from experiments.still.claims import claims
from experiments.still.report import ALL
from experiments.studies import commit, keep_summaries
from experiments.tables import find, short

HERE = Path(__file__).parent
README, SUMMARIES = HERE / "README.md", HERE / "summaries"
STUDIES = {"organism": "organism:trained", "smollm2": "SmolLM2-135M"}
METHODS = {
    "still": "Still",
    "scorer": "trained choice (KV-Distill's manner)",
    "mixture": "Still, trained on a mixture",
    "scorer_mixture": "trained choice, on a mixture",
    "decisions": "Still, trained on decisions",
    "scorer_decisions": "trained choice, on decisions",
    "iterated": "Still, trained to 4 passes",
    "iterated_plain": "Still, the same on answers alone",
    "trained_cache": "trained cache (per context)",
    "attention_matching": "Attention Matching",
    "random@4": "random, 4 sinks",
    "snapkv": "SnapKV",
    "h2o": "H2O",
    "streaming": "StreamingLLM",
    "key_norm": "key norm",
}
SURVIVES = {
    "gap": "What is left of the score gap between old and new prompt",
    "decided": "Share of pairs of which both prompts still get their own answer",
    "decoded": "Accuracy of a linear probe on the decision token, held out by content",
    "erratum": "Effect of an erratum behind the compacted old cache, in gaps of the full caches",
    "field_patched": "Effect of patching the field's kept slots, in gaps of the full caches",
    "field_slots": "The field's share of the compact slots, over its share of the prompt",
    "delimiter_slots": "The delimiters' share of the compact slots, over their share of the prompt",
}


def table(runs: Path) -> str:
    """All tables as markdown."""
    found = {name: tables.load_json(runs / name / "summary.json") for name in STUDIES}
    found = {name: one for name, one in found.items() if one}
    lines = ["### The paper's claims beside ours", "", *tables.grid(["claim", "ours"], claims(found))]
    for name, one in found.items():
        lines += ["", f"## {STUDIES[name]}"]
        for asked in one["study"]["quality"]:
            lines += answers(one, asked)
        lines += [*differences(one), *training(one), *survival(one)]
    used = [f"`{name}` ({STUDIES[name]}; commit {commit(one)})" for name, one in found.items()]
    return "\n".join([*lines, "", f"Studies: {'; '.join(used)}."])


def title(method: str) -> str:
    """The method's words; of one with another option, those and the option."""
    base, _, option = method.partition("@")
    return METHODS.get(method) or (f"{METHODS[base]}, {option}" if base in METHODS else f"`{method}`")


def ordered(methods: Iterable[str]) -> list[str]:
    """In the order of `METHODS`, others behind."""
    known = list(METHODS)

    def place(method: str) -> tuple[int, str]:
        named = [name for name in (method, method.partition("@")[0]) if name in known]
        return (known.index(named[0]) if named else len(known)), method

    return sorted(methods, key=place)


def answers(study: Mapping[str, Any], asked: str) -> list[str]:
    """Right answers and KL of every compactor, by number of documents, ratio and passes."""
    rows, about = [row for row in study["quality"] if row["asked"] == asked], study["study"]["quality"][asked]
    points = [(float(ratio), passes) for ratio in about["ratios"] for passes in about["passes"]]
    several = len(about["passes"]) > 1
    head = [f"{ratio:g}x" + (f", {passes} pass{'es' * (passes > 1)}" if several else "") for ratio, passes in points]
    numbers = sorted({row["documents"] for row in rows} - {ALL})
    lines = []
    for number in numbers or [ALL]:
        here = [row for row in rows if row["documents"] == number]
        ends = {name: find(here, method=name, readout="exact_match") for name in ("full", "no_context")}
        where = f"`{asked}`" + (f", {number} documents" if numbers else "")
        said = "; ".join(f"{name.replace('_', ' ')} {short(row)}" for name, row in ends.items())
        for readout, words in (("exact_match", "Right answers"), ("kl", "KL to the full cache, nats")):
            if readout == "kl" and not several:
                continue
            body = [
                [
                    title(method),
                    *(short(find(here, method=method, ratio=r, passes=p, readout=readout)) for r, p in points),
                ]
                for method in ordered({row["method"] for row in here} - {"full", "no_context"})
            ]
            n = max(row["n"] for row in here)
            extra = f" ({said}; {n} questions)" if readout == "exact_match" else ""
            lines += ["", f"{words}, {where}{extra}:", "", *tables.grid(["", *head], body)]
    return lines


def differences(study: Mapping[str, Any]) -> list[str]:
    """Right answers of the first trained compactor less another's, over all numbers of documents, one pass."""
    rows = [row for row in study["compared"] if row["passes"] == 1 and row["ratio"] in (8, 16)]
    columns = list(dict.fromkeys((row["asked"], row["ratio"]) for row in rows))
    if not columns:
        return []
    body = [
        [title(than), *(short(find(rows, asked=asked, ratio=ratio, than=than)) for asked, ratio in columns)]
        for than in ordered({row["than"] for row in rows} - {"full", "no_context"})
    ]
    head = ["", *(f"`{asked}` {ratio:g}x" for asked, ratio in columns)]
    return ["", "Right answers of Still less another's, question by question:", "", *tables.grid(head, body)]


def training(study: Mapping[str, Any]) -> list[str]:
    """Validation before and at the best step: means over seeds, and the range of seeds."""
    rows = []
    for name in study["study"]["trained"]:
        own = [row for row in study["training"] if row["name"] == name]
        if not own:
            continue
        mean = {key: sum(row[key] for row in own) / len(own) for key in own[0] if key != "name"}
        kl, right = ([row[key] for row in own] for key in ("kl_best", "right_best"))
        rows.append(
            [
                f"`{name}`",
                f"{mean['parameters'] / study['parameters']:.1%}",
                str(len(own)),
                f"{mean['steps']:.0f}",
                f"{mean['seconds']:.0f}",
                f"{mean['kl_before']:.2f}",
                *(
                    f"{sum(part) / len(part):.2f}" + (f" ({min(part):.2f} to {max(part):.2f})" if len(own) > 1 else "")
                    for part in (kl, right)
                ),
            ]
        )
    head = ["", "of the model's parameters", "seeds", "steps", "seconds", "KL before", "KL best", "right best"]
    return ["", "Training, on held-out contents of the train split:", "", *tables.grid(head, rows)] if rows else []


def survival(study: Mapping[str, Any]) -> list[str]:
    """What is left of facts and conclusions, quantity by quantity."""
    rows = study["survival"]
    if not rows:
        return []
    about, lines = study["study"]["survival"], []
    columns = [(family, float(ratio)) for family in about["families"] for ratio in about["ratios"]]
    for quantity, words in SURVIVES.items():
        own = [row for row in rows if row["quantity"] == quantity]
        ends = {family: find(own, family=family, method="full") for family in about["families"]}
        full = [f"{family} {short(row)}" for family, row in ends.items() if row]
        body = []
        for method in ordered({row["method"] for row in own} - {"full"}):
            cells = [short(find(own, family=family, ratio=ratio, method=method)) for family, ratio in columns]
            body.append([title(method), *cells])
        head = ["", *(f"{family} {ratio:g}x" for family, ratio in columns)]
        whole = f" (full cache: {', '.join(full)})" if full and quantity not in ("gap", "field_slots") else ""
        lines += ["", f"{words}{whole}:", "", *tables.grid(head, body)]
    return lines


def keep(runs: Path, out: Path) -> list[Path]:
    """Copy the studies' summaries."""
    return keep_summaries(STUDIES, runs, out)


def commands() -> list[str]:
    """What makes the studies."""
    return [f"python -m experiments.still.study --study {name} --out runs/still/{name}" for name in STUDIES]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    return tables.main(
        arguments,
        about=(__doc__ or "").partition("\n")[0],
        table=table,
        commands=commands,
        readme=README,
        summaries=SUMMARIES,
        keep=keep,
    )


if __name__ == "__main__":
    sys.exit(main())
