"""The SemPIC study: from a settings file to tables, taken up where it stopped, and its patched regions."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import kvnotes_interp as kv
from experiments import studies, tables
from experiments.sempic import collect, regions, study
from experiments.sempic.guess import open_answers
from experiments.sempic.settings import HERE, Study
from kvnotes_interp import operators
from kvnotes_interp.errors import InputError
from kvnotes_interp.probes.items import items_of
from kvnotes_interp.tasks import documents
from kvnotes_interp.tasks.documents import biography

near = partial(pytest.approx, rel=1e-5)  # summaries keep six digits
TINY: dict[str, Any] = {
    "model": "organism:trained",
    "kinds": ["packet", "sempic"],
    "seeds": [0, 1],
    "training": {"steps": 2, "batch": 2, "validate_every": 1, "max_new_tokens": 2},
    "lr": {"packet": 0.02, "sempic": 0.005},
    "samples": 4,
    "validation": 2,
    "questions": 2,
    "tasks": {
        "cut": {"task": "biography_cut", "documents": [2, 3], "options": {"subject": "pronoun", "facts": 1}},
        "biography": {"task": "biography", "documents": [2], "options": {"facts": 1}},
    },
    "writers": {"cut": {"tasks": ["cut"]}, "both": {"tasks": ["cut", "biography"], "seeds": [0]}},
    "deviation": {"writer": "cut", "task": "cut", "documents": 2, "n": 2},
    "regions": {"writer": "cut", "task": "cut", "documents": 3, "n": 12},
    "notes": {"gate_documents": "cut"},
    "probed": ["gate_documents"],
    "pairs": 4,
}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Study, Path]:
    """The whole of a tiny study, as the command runs it."""
    folder = tmp_path_factory.mktemp("sempic")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    given = ["--study", str(folder / "tiny.yaml"), "--out", str(folder / "runs" / "organism"), "--quiet"]
    assert study.main(given) == 0
    return Study.read(str(folder / "tiny.yaml")), folder / "runs"


@pytest.mark.slow
def test_what_is_finished_is_only_read(done: tuple[Study, Path], capsys: pytest.CaptureFixture[str]) -> None:
    settings, runs = done
    files = [p for p in sorted(runs.rglob("*")) if p.is_file() and p != runs / "organism" / "summary.json"]
    before = {path: path.stat().st_mtime_ns for path in files if path.name not in ("run.lock",)}
    summary = (runs / "organism" / "summary.json").read_text()
    study.run(settings, runs / "organism", progress=False)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert (runs / "organism" / "summary.json").read_text() == summary
    # Another number of steps is another study: its folder is not this one.
    other = settings.model_copy(update={"training": {**settings.training, "steps": 3}})
    with pytest.raises(InputError, match="steps"):
        study.run(other, runs / "organism", progress=False)


@pytest.mark.slow
def test_tables_hold_the_means_of_the_frames(done: tuple[Study, Path]) -> None:
    settings, runs = done
    found = json.loads((runs / "organism" / "summary.json").read_text())
    trained = {(row["writer"], row["kind"], row["seed"]) for row in found["training"]}
    assert trained == {(w, k, s) for w, s in (("cut", 0), ("cut", 1), ("both", 0)) for k in ("packet", "sempic")}
    frames = [kv.Result.load(runs / "organism" / "quality" / "cut" / str(seed)).frame for seed in (0, 1)]
    assert all(len(frame["pair"].unique()) == 4 for frame in frames)

    def values(seed: int, readout: str) -> Any:
        frame = frames[seed]
        site = frame["site"].str.endswith(f"/cut/sempic-{seed}/best")
        return frame.loc[site & (frame["readout"] == readout), "value"].to_numpy(float)

    row = collect.find(found, "kl", task="cut", documents=0, writer="cut", operator="sempic")
    assert row is not None
    both = [values(seed, "kl").mean() for seed in (0, 1)]
    assert row["mean"] == near(np.mean(both))
    assert [row["seeds"][seed] for seed in ("0", "1")] == near(both)
    assert both[0] != both[1], "two seeds are two Writers"
    f1 = collect.find(found, "micro_f1", task="cut", documents=0, writer="cut", operator="sempic")
    assert f1 is not None
    pooled = [sum(values(seed, name).sum() for seed in (0, 1)) for name in ("f1_common", "f1_words")]
    assert f1["mean"] == near(pooled[0] / pooled[1])
    assert (f1["n"], f1["n_effective"]) == (4, 2)
    # A Writer of one seed has one; the plain joins are no Writer's. Two people have four documents.
    once = collect.find(found, "kl", writer="both", task="cut", documents=4, operator="packet")
    assert once is not None
    assert list(once["seeds"]) == ["0"]
    full = collect.find(found, "kl", writer="", task="cut", documents=4, operator="full_recompute")
    assert full is not None
    assert full["mean"] == 0
    assert settings.seeds_of("both") == (0,)


@pytest.mark.slow
def test_collect_writes_what_the_study_found(done: tuple[Study, Path], tmp_path: Path) -> None:
    _, runs = done
    page = tmp_path / "README.md"
    page.write_text(f"words\n\n{tables.BEGIN}\n{tables.END}\n")
    options = ["--runs", str(tmp_path / "kept"), "--readme", str(page)]
    assert collect.main([*options, "--keep", str(runs), "--write"]) == 0
    assert collect.main([*options, "--check"]) == 0
    text = page.read_text()
    found = json.loads((tmp_path / "kept" / "organism" / "summary.json").read_text())
    row = collect.find(found, "micro_f1", task="cut", documents=0, writer="cut", operator="sempic")
    assert row is not None
    line = next(line for line in text.splitlines() if line.startswith("| ours, organism:trained, `cut` |"))
    assert f"| {collect.with_seeds(row)} |" in line
    assert line.count("not run") == 1, "joint was not trained"
    for title in ("Attention deviation, 2", "Recovery of the margin", "Recovery, `gate_documents`", "Linear probes"):
        assert title in text
    kept = {path.name for path in (tmp_path / "kept").rglob("*") if path.is_file()}
    assert kept == {"summary.json", "manifest.json"}
    page.write_text(text.replace("| SemPIC |", "| typed |", 1))
    assert collect.main([*options, "--check"]) == 1


def test_the_page_holds_the_tables_of_the_kept_summaries() -> None:
    assert collect.main(["--check"]) == 0
    assert {path.stem for path in HERE.glob("*.yaml")} == set(collect.STUDIES)
    for name in collect.STUDIES:
        assert Study.read(name).kinds


@pytest.fixture(scope="module")
def model() -> Any:
    return kv.load("organism:trained")


def questions(n: int) -> list[documents.Question]:
    return documents.load("biography_cut", n=n, seed=2, split="test", documents=2, facts=2, subject="pronoun")


def test_regions_are_the_words_that_they_are_named_after(model: Any) -> None:
    asked = questions(6)
    items, _ = items_of(model, asked)
    for item, question in zip(items, asked, strict=True):
        found = regions.regions_of(model, item, question)
        words = {name: [item.tokens[slot].strip() for slot in slots] for name, slots in found.items()}
        assert words["value"] == [question.answer.strip()]
        assert words["subject"][0] in ("He", "She")
        assert len(words["subject"]) == 2
        assert " ".join(words["heading"][2:4]) == question.detail("person")
        assert words["other statements"][-1] in ("", "\n")
        inner = ("subject", "value", "rest of the sentence", "other statements")
        assert sorted(sum((found[name] for name in inner), ())) == list(found["statements"])
        assert sorted((*found["heading"], *found["statements"], *found["other people"])) == list(found["all"])


def test_full_recompute_recovers_everything_and_no_recompute_nothing(model: Any, tmp_path: Path) -> None:
    donors = {name: operators.find(name) for name in ("full_recompute", "no_recompute")}
    frame = regions.patched_regions(model, questions(12), donors, out=tmp_path)
    full = frame[frame["donor"] == "full_recompute"].set_index(["pair", "region"])["value"]
    assert np.allclose(full.xs("all", level="region"), 1, atol=1e-4)
    # The heading is what a document compiled alone does not see; its own cache is that of full recompute but for its
    # place, and what the reader lacks is in the statements.
    assert full.xs("statements", level="region").mean() > 0.9 > full.xs("heading", level="region").mean()
    assert np.allclose(frame.loc[frame["donor"] == "no_recompute", "value"], 0, atol=1e-5)
    assert regions.patched_regions(model, [], {}, out=tmp_path).equals(frame), "a finished table is only read"
    with pytest.raises(InputError, match="biography_cut alone"):
        regions.patched_regions(model, documents.load("biography", n=1), donors, out=tmp_path / "other")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"writers": {"cut": {"tasks": ["cutt"]}}}, 'Did you mean "cut"'),
        ({"lr": {"packet": 0.1}}, '"sempic" is not among'),
        ({"kinds": ["still"]}, "kinds"),
        ({"probed": ["gate"]}, '"gate" is not among'),
        ({"sample": 3}, "sample"),
    ],
)
def test_a_wrong_study_is_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump(TINY | change))
    with pytest.raises(InputError, match=message):
        Study.read(str(path))
    assert study.main(["--study", "organisms", "--out", str(tmp_path)]) == 2


def test_what_has_no_interval_is_null() -> None:
    assert studies._json({"a": [float("nan"), 1.0]}) == {"a": [None, 1.0]}


def test_a_guess_knows_what_each_document_holds() -> None:
    cut = documents.load("biography_cut", n=40, documents=3, subject="pronoun")
    counts = [open_answers(question) for question in cut]
    assert set(counts) == {1, 2, 3}
    for question, count in zip(cut, counts, strict=True):
        first = str(question.detail("person")).split()[0]
        same = [heading.split()[2] in biography.HE for heading in question.documents[::2]]
        assert count == same.count(first in biography.HE)
    assert {open_answers(q) for q in documents.load("biography_cut", n=4, subject="name")} == {1}
    assert {open_answers(q) for q in documents.load("gated", n=4)} == {2}
    assert {open_answers(q) for q in documents.load("gated", n=4, apart=False)} == {1}
    assert {open_answers(q) for q in documents.load("needle", n=2)} == {None}
