"""Write the tables of README.md from studies: `python -m experiments.sempic.collect --keep runs/sempic --write`.

The papers' numbers stand here; ours are read from the studies' summaries, never typed. `--keep` copies them to
`summaries/` beside this file, from where the tables are read.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments import tables
from experiments.studies import commit, keep_summaries

HERE = Path(__file__).parent
README, SUMMARIES = HERE / "README.md", HERE / "summaries"
STUDIES = {"organism": "organism:trained", "needle": "organism:trained, needles", "smollm2": "SmolLM2-135M"}
OPERATORS = {
    "guess": "guess",
    "no_recompute": "no recompute",
    "packet": "KV Packet",
    "sempic": "SemPIC",
    "joint": "joint",
    "full_recompute": "full recompute",
}
# Micro-F1 in the order of OPERATORS: [P] is SemPIC, arXiv 2607.28069; [K] is KV Packet, arXiv 2604.13226.
PAPERS = (
    ("[P], mean of 3 models and 4 tasks", "", "0.17", "0.53", "0.60", "0.61", "0.62"),
    ("[K], Biography, Llama-3.1-8B", "", "0.063", "0.943", "", "", "0.979"),
    ("[K], Biography, Qwen3-4B", "", "0.185", "0.849", "", "", "0.981"),
)
ALL = 0


def table(runs: Path) -> str:
    """All tables as markdown."""
    found = {name: tables.load_json(runs / name / "summary.json") for name in STUDIES}
    found = {name: one for name, one in found.items() if one}
    lines = answers(found)
    for name, one in found.items():
        lines += ["", f"### {STUDIES[name]}", "", *by_documents(one), "", *transfer(one), "", *training(one)]
        lines += [*deviation(runs / name / "deviation"), *regions(one)]
        for part, make in (("notes", patched), ("probes", read)):
            lines += make(runs / name / part)
    used = [f"`{name}` ({STUDIES[name]}; commit {commit(one)})" for name, one in found.items()]
    return "\n".join([*lines, "", f"Studies: {'; '.join(used)}."] if used else lines)


def own_writers(study: Mapping[str, Any], task: str) -> list[str]:
    """Writers that were trained on this task alone, else those trained on any."""
    writers = {name: one["tasks"] for name, one in study["study"]["writers"].items()}
    return [name for name, its in writers.items() if its == [task]] or list(writers)[:1]


def label(study: Mapping[str, Any], task: str) -> str:
    """The task, and the Writer where it is not the task's own."""
    writer = own_writers(study, task)[0]
    return f"`{task}`" if study["study"]["writers"][writer]["tasks"] == [task] else f"`{task}` (Writer `{writer}`)"


def find(study: Mapping[str, Any], readout: str, **wanted: Any) -> dict[str, Any] | None:
    """The row of `quality` that agrees with `wanted`."""
    return next(
        (
            row
            for row in study["quality"]
            if row["readout"] == readout and all(row[key] == value for key, value in wanted.items())
        ),
        None,
    )


def quality_cells(study: Mapping[str, Any], readout: str, task: str, documents: int) -> list[str]:
    """One cell per operator; the learned ones with the task's own Writer."""
    out = []
    for operator in OPERATORS:
        learned = operator in study["study"]["kinds"]
        writer = own_writers(study, task)[0] if learned else ""
        row = find(study, readout, task=task, documents=documents, operator=operator, writer=writer)
        out.append(with_seeds(row) if row else "" if operator == "guess" else "not run")
    return out


def with_seeds(row: Mapping[str, Any]) -> str:
    """`0.52 [0.40, 0.63] (0.48 to 0.56)`: mean, interval over contents, and the range of seeds' means."""
    text = tables.cell(row)
    seeds = sorted(row["seeds"].values())
    if row["operator"] in ("guess", "no_recompute", "full_recompute") or len(seeds) < 2:
        return text
    return f"{text} ({seeds[0]:.3f} to {seeds[-1]:.3f})"


def answers(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Micro-F1 beside the papers', over all numbers of documents."""
    rows = [list(row) for row in PAPERS]
    for name, study in found.items():
        for task in study["study"]["tasks"]:
            rows.append([f"ours, {STUDIES[name]}, {label(study, task)}", *quality_cells(study, "micro_f1", task, ALL)])
    return ["### Micro-F1, the papers' beside ours", "", *tables.grid(["", *OPERATORS.values()], rows)]


def by_documents(study: Mapping[str, Any]) -> list[str]:
    """Micro-F1, KL and agreement per task and number of documents."""
    rows = []
    for task in study["study"]["tasks"]:
        numbers = sorted({row["documents"] for row in study["quality"] if row["task"] == task} - {ALL})
        for number in numbers:  # of a guess there is no agreement
            for readout, words in (("micro_f1", "F1"), ("kl", "KL"), ("top1_agreement", "agreement")):
                rows.append([label(study, task), str(number), words, *quality_cells(study, readout, task, number)])
    return tables.grid(["task", "documents", "", *OPERATORS.values()], rows)


def transfer(study: Mapping[str, Any]) -> list[str]:
    """Trained on one, tested on another: micro-F1, and the KL to full recompute behind it."""
    tasks = list(study["study"]["tasks"])
    rows = []
    for writer in study["study"]["writers"]:
        for kind in study["study"]["kinds"]:
            cells = []
            for task in tasks:
                one = {"task": task, "documents": ALL, "operator": kind, "writer": writer}
                f1, kl = find(study, "micro_f1", **one), find(study, "kl", **one)
                cells.append(f"{f1['mean']:.3f}, {kl['mean']:.3f}" if f1 and kl else "not run")
            rows.append([f"`{writer}`", OPERATORS[kind], *cells])
    for operator in ("no_recompute", "full_recompute"):
        both = [[find(study, r, task=t, documents=ALL, operator=operator) for r in ("micro_f1", "kl")] for t in tasks]
        cells = [f"{f1['mean']:.3f}, {kl['mean']:.3f}" if f1 and kl else "not run" for f1, kl in both]
        rows.append(["", OPERATORS[operator], *cells])
    head = ["trained on", "", *(f"tested on `{task}`" for task in tasks)]
    return ["Micro-F1, KL to full recompute:", "", *tables.grid(head, rows)]


def training(study: Mapping[str, Any]) -> list[str]:
    """Validation before and at the best step, per Writer: means over seeds."""
    rows = []
    for writer in study["study"]["writers"]:
        for kind in study["study"]["kinds"]:
            own = [row for row in study["training"] if (row["writer"], row["kind"]) == (writer, kind)]
            if own:
                mean = {key: sum(row[key] for row in own) / len(own) for key in own[0] if key not in ("writer", "kind")}
                low, high = (pick(row["kl_best"] for row in own) for pick in (min, max))
                rows.append(
                    [
                        f"`{writer}`",
                        OPERATORS[kind],
                        str(len(own)),
                        f"{mean['steps']:.0f}",
                        f"{mean['seconds']:.0f}",
                        f"{mean['kl_before']:.3f}",
                        f"{mean['kl_best']:.3f}" + (f" ({low:.3f} to {high:.3f})" if len(own) > 1 else ""),
                        f"{mean['right_before']:.3f}",
                        f"{mean['right_best']:.3f}",
                    ]
                )
    head = ["Writer", "", "seeds", "steps", "seconds", "KL before", "KL best", "right before", "right best"]
    return ["Training, on held-out contents of the train split:", "", *tables.grid(head, rows)]


def deviation(folder: Path) -> list[str]:
    """Edge against interior, and the sink."""
    summary = tables.load_json(folder / "summary.json")
    if summary is None:
        return []
    quantities = ("prefix", "interior", "suffix", "sink_first", "cosine_distance", "k_angle", "v_angle")
    rows = []
    for operator, words in OPERATORS.items():
        values = [summary.get(f"{quantity}_{operator}") for quantity in quantities]
        if any(values):
            rows.append([words, *(tables.cell(value) if value else "" for value in values)])
    head = [
        "",
        "prefix",
        "interior",
        "suffix",
        "first token / middle",
        "retrieval, cosine distance",
        "K angle",
        "V angle",
    ]
    return ["", f"Attention deviation, {summary['n_tried']} questions:", "", *tables.grid(head, rows)]


def regions(study: Mapping[str, Any]) -> list[str]:
    """Recovery by region and donor."""
    if not study["regions"]:
        return []
    donors = list(dict.fromkeys(row["donor"] for row in study["regions"]))
    cells = {(row["donor"], row["region"]): row for row in study["regions"]}
    names = list(dict.fromkeys(row["region"] for row in study["regions"]))
    rows = [
        [name, f"{cells[donors[0], name]['size']:.1f}", *(tables.cell(cells[donor, name]) for donor in donors)]
        for name in names
    ]
    n = study["regions"][0]["n"]
    head = ["patched region", "tokens", *(f"from {OPERATORS[donor]}" for donor in donors)]
    return ["", f"Recovery of the margin by region, {n} questions:", "", *tables.grid(head, rows)]


def patched(folder: Path) -> list[str]:
    """Local patching on every operator's caches."""
    lines = []
    for family in sorted(path for path in folder.glob("*") if path.is_dir()):
        found = summaries(family)
        keys = ["field_only", "downstream_only"]
        keys += sorted({key for one in found.values() for key in one if key.startswith("region_")})
        rows = [
            [OPERATORS[name], f"{one['n_competent']} of {one['n_tried']}", *cells(one, keys)]
            for name, one in found.items()
        ]
        head = ["", "pairs competent", *(key.removeprefix("region_").replace("_", " ") for key in keys)]
        lines += ["", f"Recovery, `{family.name}`, each region patched alone:", "", *tables.grid(head, rows)]
    return lines


def read(folder: Path) -> list[str]:
    """Accuracy of linear probes on keys and values of every operator's caches; of aggregators, the last."""
    lines = []
    for family in sorted(path for path in folder.glob("*") if path.is_dir()):
        found = summaries(family)
        keys = sorted({key for one in found.values() for key in one if key.startswith("accuracy_") and ":" not in key})
        rows = [[OPERATORS[name], *cells(one, keys)] for name, one in found.items()]
        head = ["", *(key.removeprefix("accuracy_").replace("_", " ") for key in keys)]
        lines += ["", f"Linear probes, `{family.name}`, accuracy held out:", "", *tables.grid(head, rows)]
    return lines


def summaries(family: Path) -> dict[str, dict[str, Any]]:
    """Operator -> its run's summary, in the order of the tables."""
    found = {name: tables.load_json(family / name / "summary.json") for name in OPERATORS}
    return {name: one for name, one in found.items() if one}


def cells(summary: Mapping[str, Any], keys: Sequence[str]) -> list[str]:
    """One cell per quantity; empty where it was not measured."""
    values = [summary.get(key) for key in keys]
    return [tables.cell(value) if value and value["mean"] is not None else "" for value in values]


def keep(runs: Path, out: Path) -> list[Path]:
    """Copy the studies' own summaries, and those of the probes that they do not hold."""
    kept = keep_summaries(STUDIES, runs, out)
    for name in STUDIES:
        for part in ("deviation", "notes", "probes"):
            kept += tables.keep(runs / name / part, out / name / part)
    return kept


def commands() -> list[str]:
    """What makes the studies."""
    return [f"python -m experiments.sempic.study --study {name} --out runs/sempic/{name}" for name in STUDIES]


def main(arguments: Sequence[str] | None = None) -> int:
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
