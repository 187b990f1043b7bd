"""The Still study: from a settings file to tables, taken up where it stopped; and the page that holds them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from experiments.still import claims, collect, report, study
from experiments.still.settings import HERE, Study
from experiments.tables import find
from kvnotes_interp.errors import InputError
from kvnotes_interp.results import Result

near = partial(pytest.approx, rel=1e-5)  # summaries keep six digits
TINY: dict[str, Any] = {
    "model": "organism:trained",
    "seeds": [0, 1],
    "training": {"steps": 2, "batch": 2, "validate_every": 1, "max_new_tokens": 2},
    "samples": 4,
    "validation": 2,
    "tasks": {"biography": {"task": "biography", "documents": [2, 3]}},
    "trained": {
        "still": {"tasks": ["biography"]},
        "scorer": {"method": "scorer", "tasks": ["biography"], "seeds": [1]},
        "iterated": {"tasks": ["biography"], "seeds": [0], "options": {"horizon": 2}, "settings": {"blocks": 1}},
    },
    "quality": {
        "biography": {
            "task": "biography",
            "trained": ["still", "scorer"],
            "compactors": ["snapkv"],
            "ratios": [8, 16],
            "questions": 3,
        },
        "passes": {"task": "biography", "trained": ["iterated"], "ratios": [8], "passes": [1, 2], "questions": 2},
    },
    "survival": {
        "families": ["gate", "badge"],
        "trained": ["still"],
        "compactors": ["snapkv"],
        "ratios": [4],
        "pairs": 4,
    },
}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Study, Path]:
    """The whole of a tiny study, as the command runs it."""
    folder = tmp_path_factory.mktemp("still")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    given = ["--study", str(folder / "tiny.yaml"), "--out", str(folder / "runs" / "organism"), "--quiet"]
    assert study.main(given) == 0
    return Study.read(str(folder / "tiny.yaml")), folder / "runs"


@pytest.mark.slow
def test_what_is_finished_is_only_read(done: tuple[Study, Path]) -> None:
    settings, runs = done
    files = [p for p in sorted(runs.rglob("*")) if p.is_file() and p != runs / "organism" / "summary.json"]
    before = {path: path.stat().st_mtime_ns for path in files if path.name != "run.lock"}
    study.run(settings, runs / "organism", progress=False)
    assert before == {path: path.stat().st_mtime_ns for path in before}


@pytest.mark.slow
def test_tables_hold_the_means_of_the_frames(done: tuple[Study, Path]) -> None:
    settings, runs = done
    summary = json.loads((runs / "organism" / "summary.json").read_text())
    frame = Result.load(runs / "organism" / "quality" / "biography").frame
    kl = frame[(frame["view"] == "compaction") & (frame["readout"] == "kl") & (frame["ratio"] == 16.0)]
    stills = [f"trained/still/{seed}/best" for seed in (0, 1)]
    own = {end: kl[kl["compactor"].astype(str).str.endswith(end)]["value"].to_numpy(float) for end in stills}
    assert {end: len(values) for end, values in own.items()} == dict.fromkeys(
        stills, 6
    )  # 3 questions, 2 and 3 documents
    row = find(summary["quality"], asked="biography", documents=0, method="still", ratio=16.0, passes=1, readout="kl")
    assert row is not None
    assert row["mean"] == near(np.concatenate(list(own.values())).mean())
    assert row["seeds"] == {str(s): near(own[end].mean()) for s, end in enumerate(stills)}
    assert row["n"] == 6
    # A difference is over the seeds' mean of every question.
    right = report.answers(settings, runs / "organism", "biography")
    right = right[right["ratio"] == 8.0].groupby(["method", "pair"])["exact_match"].mean()
    left = find(summary["compared"], asked="biography", ratio=8.0, passes=1, than="snapkv")
    assert left is not None
    assert left["mean"] == near((right["still"] - right["snapkv"]).mean())
    passes = {row["passes"] for row in summary["quality"] if row["asked"] == "passes" and row["method"] == "iterated"}
    assert passes == {1, 2}
    gap = find(summary["survival"], family="gate", method="still", ratio=4.0, quantity="gap")
    rows = Result.load(runs / "organism" / "survival" / "gate").frame
    rows = rows[(rows["readout"] == "gap") & rows["compactor"].astype(str).str.contains("still@")]
    assert gap is not None
    assert gap["mean"] == near(rows["value"].mean())
    sizes = {(row["name"], row["seed"]): row["parameters"] for row in summary["training"]}
    assert set(sizes) == {("still", 0), ("still", 1), ("scorer", 1), ("iterated", 0)}
    assert sizes["iterated", 0] < sizes["still", 0] == sizes["still", 1]  # one block less


@pytest.mark.slow
def test_collect_writes_what_the_study_found(done: tuple[Study, Path], tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("<!-- table: written by collect.py -->\n<!-- end of table -->\n")
    options = ["--runs", str(tmp_path / "kept"), "--readme", str(page)]
    assert collect.main([*options, "--keep", str(done[1]), "--write"]) == 0
    text = page.read_text()
    for words in (
        "Still less another's, question by question",
        "| 16x |",
        "8x, 2 passes",
        "| SnapKV |",
        "### The paper's claims beside ours",
        "gate 4x | badge 4x",
        "trained choice",
    ):
        assert words in text
    assert collect.main([*options, "--check"]) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quality": {"a": {**TINY["quality"]["biography"], "trained": ["stil"]}}}, 'did you mean "still"'),
        ({"tasks": {"biografy": {"task": "biography"}}}, "biography"),
        ({"trained": {"still": {"tasks": []}}}, "trained.still.tasks"),
        ({"trained": {**TINY["trained"], "scorer": {"tasks": ["biography"], "seeds": [7]}}}, '"7" is not among 0, 1'),
        ({"trained": {**TINY["trained"], "x": {"tasks": ["biography"], "options": {"horizn": 2}}}}, '"horizon"'),
        ({"trained": {**TINY["trained"], "x": {"tasks": ["biography"], "settings": {"block": 1}}}}, '"blocks"'),
        ({"training": {"step": 2}}, '"steps"'),
        ({"quality": {"a": {**TINY["quality"]["biography"], "ratio": 8}}}, "quality.a.ratio"),
    ],
)
def test_a_wrong_study_is_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump({**TINY, **change}))
    with pytest.raises(InputError, match=r"wrong\.yaml") as caught:
        Study.read(str(tmp_path / "wrong.yaml"))
    assert message.lower() in str(caught.value).lower()


@pytest.mark.parametrize("name", sorted(path.stem for path in HERE.glob("*.yaml")))
def test_the_studies_are_whole(name: str) -> None:
    read = Study.read(name)
    for one in read.trained:
        read.settings(one, 0)
    assert f"--study {name} " in "\n".join(collect.commands())


def test_only_what_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert study.main(["--study", "organism", "--out", str(tmp_path / "out"), "--only", "stil"]) == 2
    assert '--only: "stil" is not among' in capsys.readouterr().err


def row(mean: float, low: float, high: float, **about: Any) -> dict[str, Any]:
    return {"mean": mean, "low": low, "high": high, **about}


def test_claims_say_what_the_summary_holds() -> None:
    """A summary made by hand: 9 of 10 right at 8x, 2 points below the choice, 50 above SnapKV."""
    about = {"asked": "biography", "documents": 0, "readout": "exact_match", "ratio": 8.0, "passes": 1}
    parts = {**about, "asked": "in_parts", "method": "still"}
    right = [
        row(0.9, 0.8, 1.0, **about, method="still"),
        row(0.95, 0.9, 1.0, **{**about, "ratio": None}, method="full"),
        row(0.05, 0.0, 0.1, **{**about, "ratio": None}, method="no_context"),
        *(row(mean, 0.0, 1.0, **{**parts, "passes": n}) for n, mean in ((1, 0.9), (2, 0.1))),
    ]
    less = {"asked": "biography", "ratio": 8.0, "passes": 1}
    sizes = {"seed": 0, "parameters": 59}
    summary = {
        "study": {
            "seeds": [0],
            "ratios": [4, 16],
            "quality": {
                "biography": {"passes": [1], "ratios": [8.0], "trained": ["still"]},
                "in_parts": {"passes": [1, 2], "ratios": [8.0], "trained": ["still"]},
            },
        },
        "parameters": 1000,
        "training": [
            {"name": n, "kl_best": kl, **sizes} for n, kl in (("still", 0.4), ("short", 0.3), ("plain_init", 2.76))
        ],
        "quality": right,
        "compared": [
            row(-0.02, -0.05, -0.01, **less, than="scorer"),
            row(-0.5, -0.6, -0.4, **{**less, "ratio": 64.0}, than="scorer"),  # never trained at
            row(0.5, 0.3, 0.7, **less, than="snapkv"),
        ],
    }
    said = dict(claims.claims({"organism": summary}))

    def told(words: str) -> str:
        return next(value for claim, value in said.items() if words in claim)

    assert told("1 %") == "organism: 5.9%"
    assert told("85 %") == "organism, `biography`: 0.90 [0.80, 1.00], full 0.95, without 0.05"
    assert told("0.93") == f"organism, `biography`: {0.85 / 0.9:.2f}"
    assert told("KV-Distill").endswith("scorer 8x -2 points; the interval of 0 of 1 cells is above 0, of 1 below")
    assert told("SnapKV").endswith("snapkv 8x +50 points; the interval of 1 of 1 cells is above 0, of 0 below")
    assert told("norm") == "organism, validation KL: `short` 0.30, `plain_init` 2.76"
    assert told("Iterated") == "organism, `still` 8x, passes: 0.90 in 1, 0.10 in 2"


def test_the_page_agrees_with_the_kept_summaries() -> None:
    assert collect.main(["--check"]) == 0


def test_another_number_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    text = collect.README.read_text(encoding="utf-8")
    row = next(line for line in text.splitlines() if line.startswith("| SnapKV | 0."))
    page.write_text(text.replace(row, row.replace("| SnapKV | 0.", "| SnapKV | 1."), 1), encoding="utf-8")
    assert collect.main(["--check", "--readme", str(page)]) == 1
