"""Which quantities the tables of README.md hold, what the papers report for them, and the runs that measure ours."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """A quantity, what the paper reports, and where ours is: `run` under the runs folder, `key` in its summary."""

    quantity: str
    paper: str
    run: str
    key: str


NONE = "not reported"
ROWS = (
    Row(
        "Field only, derived conclusion",
        "-0.028 (Llama-3.1-8B), 0.005 (Gemma-2-9B), 0.137 (Mistral-7B)",
        "pronoun",
        "field_only",
    ),
    Row("Downstream only, derived conclusion", NONE, "pronoun", "downstream_only"),
    Row("Field and downstream (a control: must be 1)", "1.0 (all)", "pronoun", "field_and_downstream"),
    Row("Random site of the field's size", NONE, "pronoun", "random_site"),
    Row("Downstream only, keys alone", NONE, "pronoun", "downstream_only_k"),
    Row("Downstream only, values alone", NONE, "pronoun", "downstream_only_v"),
    Row("Delimiters: share of recovery over share of positions", NONE, "pronoun", "enrichment_delimiter"),
    Row("Field only, near-verbatim lookup", "0.25 to 0.63 (Qwen3, Llama-3.1-8B)", "capital", "field_only"),
    Row("Downstream only, near-verbatim lookup", NONE, "capital", "downstream_only"),
    Row("Top 8, ranked on other pairs", NONE, "pronoun-suffix", "top8_other_pairs"),
    Row(
        "Top 8, ranked on the same pair (upper bound)",
        "0.74 to 0.79 (Qwen3, Llama), 0.94 to 0.95 (Gemma-2, Mistral)",
        "pronoun-suffix",
        "top8_same_pair",
    ),
    Row(
        "Random 8",
        "0.005 to 0.035 (Qwen3, Llama), 0.48 to 0.53 (Gemma-2, Mistral)",
        "pronoun-suffix",
        "top8_random",
    ),
    Row("Last 10 % of the positions", "0.51 to 0.87 (eight models, 4B to 32B)", "pronoun-suffix", "from_end_10"),
    Row("Early third of the layers", "-0.003 to 0.009 (mean of single layers)", "pronoun-suffix", "layers_early"),
    Row("Middle third of the layers", "0.009 to 0.093 (mean of single layers)", "pronoun-suffix", "layers_mid"),
    Row("Late third of the layers", "0.017 to 0.103 (mean of single layers)", "pronoun-suffix", "layers_late"),
    Row("Write depth, share of the layers", "0.31 to 0.39 (Qwen3, Llama)", "pronoun-linear", "write_depth"),
    Row("Commit depth, share of the layers", "0.73 to 0.77 (Qwen3, Llama)", "pronoun-linear", "commit_depth"),
    Row("Probe at the decision reads new, field-only cache", "0 (Qwen3-8B)", "pronoun-linear", "reads_new_field_only"),
    Row("Probe at the decision reads new, oracle cache", "0.75 (Qwen3-8B, full)", "pronoun-linear", "reads_new_oracle"),
    Row("Attention of the decision token, field", "0.001 (Qwen3-8B)", "pronoun-ablate", "attention_field"),
    Row("Attention of the decision token, downstream", "0.56 (Qwen3-8B)", "pronoun-ablate", "attention_downstream"),
    Row("Attention of the decision token, first four", "0.36 (Qwen3-8B)", "pronoun-ablate", "attention_sink"),
    Row("Top 25 % cut, flips to new on the field-only cache", "1.00 (Qwen3-8B)", "pronoun-ablate", "cut_top25_flips"),
    Row("Read heads, top 12 jointly", "0.72 to 0.82 (four models), same pair", "pronoun-ablate", "read_top12"),
    Row("12 random heads", "0.00", "pronoun-ablate", "read_top12_random"),
    Row("Write heads, top 12 at the aggregators", "0.08 to 0.28", "pronoun-ablate", "write_recomputed_top12"),
    Row("Attention's share of the write", "0.44 to 0.92", "pronoun-ablate", "attention_share"),
    Row("Scrubbing, same conclusion (drift)", "0.02 to 0.04", "pronoun-ablate", "scrub_same_note"),
    Row("Scrubbing, the opposite note alone", "0.68 to 0.82", "pronoun-ablate", "scrub_opposite_note"),
    Row("Scrubbing, everything else", "0.18 to 0.32", "pronoun-ablate", "scrub_opposite_rest"),
)

FAMILIES = {
    "pronoun": "derived, SmolLM2-135M",
    "capital": "verbatim, SmolLM2-135M",
    "gate": "derived, organism",
    "badge": "verbatim, organism",
}
SEAMS, SHARES = (1, 4, 16), (0.05, 0.15, 0.3, 0.5, 0.9)  # tokens repaired per chunk, shares recomputed
ORGANISM = ("gate", "badge")  # families that organism:trained is run on, their test split alone
COLUMNS = (
    ("patch", "field_only", "field only"),
    ("patch", "downstream_only", "downstream only"),
    ("suffix", "top8_other_pairs", "top 8, other pairs"),
    ("suffix", "top8_random", "random 8"),
    ("linear", "accuracy_field", "accuracy at the field"),
    ("linear", "accuracy_aggregator", "accuracy at the last delimiter"),
    ("linear", "accuracy_decision", "accuracy at the decision"),
    ("linear", "write_depth", "write depth"),
    ("linear", "commit_depth", "commit depth"),
    ("ablate", "cut_field_oracle", "decision -> field cut, new cache (1: not needed)"),
    ("ablate", "cut_downstream_oracle", "decision -> downstream cut, new cache (1: not needed)"),
    ("ablate", "scrub_opposite_note", "the opposite note alone"),
    ("ablate", "read_top12", "12 read heads patched"),
    ("ablate", "attention_share", "attention's share of the write"),
    ("deviate", "interior_no_recompute", "deviation inside blocks prefilled alone"),
    ("deviate", "top1_agreement_no_recompute", "same first token as full recompute"),
)
"""(probe, key of its summary, in words)."""

LISTS = (
    (
        "Editing: what an edit of the cache does and costs",
        "pronoun-edit",
        (
            ("stale", "right 0.00, 0 % (Qwen3-8B)"),
            ("field_only", "right 0.00, 0.6 %"),
            ("erratum", "right 1.00, 12.0 %"),
            ("erratum_bare", "about 1.0"),
            ("erratum_aggressive", "0.81"),
            ("field_erratum", "right 1.00, 12.6 % (run on new text)"),
            ("hoist", "right 1.00, 5.2 %"),
            ("cacheblend_0.15", "right 0.13, 14.5 % (copied, not run)"),
            ("recompute_top_8_attention", NONE),
            ("recompute_top_8_causal", NONE),
            ("recompute_top_8_profiled", NONE),
            ("recompute_top_8_random", NONE),
            ("patch_top_8_causal", "0.78 (recovery)"),
            ("full_downstream", "1.0"),
            ("oracle", "right 1.00, 100 %"),
            ("erratum_wrong_value", "0"),
            ("erratum_irrelevant", "0"),
            ("erratum_no_op", NONE),
        ),
    ),
    (
        "Editing the trained organism's gated decision",
        "gate-edit",
        (
            ("field_only", "right 0.00, 0.6 % (Qwen3-8B)"),
            ("erratum", "right 1.00, 12.0 %"),
            ("erratum_wrong_value", "0"),
            ("erratum_irrelevant", "0"),
            ("hoist", "right 1.00, 5.2 %"),
            ("cacheblend_0.15", "right 0.13, 14.5 % (copied, not run)"),
            ("recompute_top_4_attention", NONE),
            ("recompute_top_4_causal", NONE),
            ("recompute_top_4_kv_change", NONE),
            ("recompute_top_4_profiled", NONE),
            ("recompute_top_4_random", NONE),
        ),
    ),
    (
        "Composing: biographies, micro-F1 over 1 to 8 documents",
        "biography-splice",
        (
            ("f1_full_recompute", "0.62 (mean of 12 cells, [P])"),
            ("f1_no_recompute", "0.17"),
            ("f1_no_recompute_unmoved", NONE),
            *((f"f1_splice@{n}", NONE) for n in SEAMS),
            *((f"f1_{name}@{share}", NONE) for name in ("epic", "cacheblend", "random_recompute") for share in SHARES),
            ("kl_no_recompute", NONE),
            ("logit_cosine_no_recompute", "0.90 to 0.999"),
            ("logit_cosine_no_recompute_unmoved", "0.97 to 0.99"),
            ("top1_agreement_no_recompute", NONE),
        ),
    ),
    *(
        (
            f"Keystone: the field edited inside a spliced skill, {FAMILIES[family]}",
            f"{family}-keystone",
            tuple(
                (f"{site}_{world}", said if world != "difference" else NONE)
                for site, said in (("field_only", "0.05"), ("field_and_top8", NONE), ("field_and_random8", NONE))
                for world in ("recomputed", "spliced", "difference")
            ),
        )
        for family in ("pronoun", "gate")
    ),
)
"""(title, run, ((key of its summary, what the paper reports), ...))."""


def commands() -> list[str]:
    """What makes every run of the tables."""
    out = []
    for family in FAMILIES:
        more = " --model organism:trained --split test" if family in ORGANISM else ""
        out.append(f"kvprobe patch{more} --task {family} --n 32 --out runs/{family}")
        out += [
            f"kvprobe {probe}{more} --task {family} --out runs/{family}-{probe}"
            for probe in ("suffix", "linear", "ablate", "deviate")
        ]
    # 28 answer classes: fewer layers, or the probes take many minutes.
    short = "--n 32 --layers 0,8,16,24,30 --classifiers logistic --direction-pairs 4"
    out = [line.replace(" --out", f" {short} --out") if line.endswith("runs/capital-linear") else line for line in out]
    out.append("kvprobe edit --task pronoun --n 16 --turns 6 --thought-tokens 16 --out runs/pronoun-edit")
    out.append("kvprobe edit --model organism:trained --split test --task gate --turns 8 --out runs/gate-edit")
    out.append("kvprobe splice --task biography --n 16 --documents 1,2,4,8 --out runs/biography-splice")
    out.append("kvprobe keystone --task pronoun --out runs/pronoun-keystone")
    out.append("kvprobe keystone --model organism:trained --split test --task gate --n 32 --out runs/gate-keystone")
    cards = sorted(path.stem for path in (Path(__file__).parents[2] / "probes").glob("*.yaml"))
    out += [f"kvprobe run probes/{card}.yaml --out runs/cards/{card}" for card in cards]
    return out
