"""`kvprobe train`: the defaults are Python's, and a small run from the terminal trains, is refused, and is resumed."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from kvnotes_interp.cli import methods
from kvnotes_interp.cli import training as command
from kvnotes_interp.operators import writer
from kvnotes_interp.operators.scorer import ScorerSettings
from kvnotes_interp.operators.still import StillSettings
from kvnotes_interp.training import Compacting, Selecting, Settings, Trained, Writing, draw

SMALL = ("--docs", "2", "--task-option", "facts=1", "--samples", 4, "--validation", 2, "--steps", 2, "--batch", 2)
FEW = ("--max-new-tokens", 2, "--rank", 2, "--wrapper-tokens", 2, "--quiet")


def test_options_have_the_names_and_defaults_of_the_python_arguments() -> None:
    options = {name: p.default for name, p in inspect.signature(command.train).parameters.items()}
    for name, field in Settings.model_fields.items():
        assert options[name] == field.default, name
    for function, names in (
        (writer.new_writer, ("rank", "alpha", "wrapper_tokens")),
        (Writing, ("checkpointing",)),
        (Compacting, methods.STILL_OPTIONS),
        (Selecting, methods.SCORER_OPTIONS),
    ):
        for name in names:
            assert options[name] == inspect.signature(function).parameters[name].default, name
    assert tuple(options["targets"].split(",")) == writer.TARGETS
    assert set(methods.WRITERS) == set(writer.KINDS)
    for kind, names in ((StillSettings, methods.STILL_SETTINGS), (ScorerSettings, methods.SCORER_SETTINGS)):
        for name in names:
            assert options[name] == kind.model_fields[name].default, name
    for method in (Compacting, Selecting):
        ratios = inspect.signature(method).parameters["ratios"].default
        assert tuple(float(n) for n in options["ratios"].split(",")) == ratios
    for name, words in (("outputs", methods.OUTPUTS), ("init", methods.INITS)):
        assert get_args(get_type_hints(StillSettings)[name]) == words
    written = inspect.signature(Compacting).parameters["backward"].annotation
    assert tuple(re.findall(r"['\"](\w+)['\"]", written)) == methods.BACKWARD
    assert {option for own in methods.OWN.values() for option in own} <= set(options)
    assert [int(n) for n in options["docs"].split(",")] == list(inspect.signature(draw).parameters["docs"].default)


def test_train_and_resume(kvprobe: Callable[..., Any], tiny_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = ("train", "joint", "--model", tiny_folder, *SMALL, *FEW, "--out", out)
    done = kvprobe(*arguments)
    assert done.code == 0, done.err
    assert "validation" in done.out
    assert f"the Writer is {out}/best" in done.err.replace("\n", "")
    assert (out / "best/adapter/adapter_model.safetensors").is_file()
    trained = Trained.load(out)
    assert (trained.method, trained.steps) == ("joint", 2)
    again = kvprobe(*arguments, "--resume", "--json")
    assert json.loads(again.out)["last"] == trained.last
    assert json.loads(kvprobe("show", out, "--json").out)["last"] == trained.last
    assert kvprobe(*arguments).code == 2
    other = kvprobe(*arguments, "--lr", "0.1", "--resume")
    assert other.code == 2
    assert "request.settings.lr: 0.0005 -> 0.1" in other.words


def test_a_trained_compactor_compacts_by_the_name_of_its_folder(
    kvprobe: Callable[..., Any], tiny_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "still"
    done = kvprobe("train", "still", "--model", tiny_folder, *SMALL, *FEW, "--ratios", "2,4", "--out", out)
    assert done.code == 0, done.err
    assert Trained.load(out).method == "still"
    judged = kvprobe(
        *("compact", "--model", tiny_folder, "--task", "biography", "--task-option", "documents=2", "--n", 2),
        *("--compactors", f"still@{out}/best", "--ratios", "2", "--min-gap", 0, "--min-gap-noise", 0, "--json"),
    )
    assert judged.code == 0, judged.err
    assert f"f1_still@{out}/best_2x" in json.loads(judged.out)
    assert not (out / "still.json").exists()
    again = kvprobe(
        *("compact", "--model", tiny_folder, "--task", "biography", "--task-option", "documents=2", "--n", 2),
        *("--compactors", f"still@{out}", "--ratios", "2", "--min-gap", 0, "--min-gap-noise", 0, "--json"),
    )
    values = [json.loads(done.out)[f"f1_still@{name}_2x"] for done, name in ((judged, f"{out}/best"), (again, out))]
    assert values[0] == values[1]
    wrong = kvprobe("train", "still", "--model", tiny_folder, *SMALL, "--ratios", "4", "--out", tmp_path / "other")
    assert wrong.code == 2
    assert "--ratios '4': write the lowest and the highest" in wrong.words


def test_ablations_and_several_tasks(kvprobe: Callable[..., Any], tiny_folder: Path, tmp_path: Path) -> None:
    """What each kind is made with is in its description; the questions are in equal parts of the tasks."""
    few = ("--samples", 4, "--validation", 2, "--steps", 1, "--batch", 2, "--max-new-tokens", 1, "--quiet", "--json")
    mixed = ("--task", "biography,gated", "--docs", "", "--task-option", "biography.facts=1", *few)
    still = ("--init", "plain", "--final-norm", "--bias", "--outputs", "last", "--feed-forward", "--blocks", 3)
    run = ("train", "--model", tiny_folder, *mixed, "--ratios", "3,5")
    done = kvprobe(*run, "still", *still, "--horizon", 2, "--backward", "full", "--out", tmp_path / "still")
    assert done.code == 0, done.err
    about = json.loads((tmp_path / "still/best/still.json").read_text(encoding="utf-8"))
    want = {"init": "plain", "final_norm": True, "bias": True, "outputs": "last", "feed_forward": True, "blocks": 3}
    assert want.items() <= about["settings"].items()
    assert about["training"]["method"]["backward"] == "full"
    assert about["training"]["method"]["horizon"] == 2
    assert sorted(about["training"]["train"]["tasks"]) == ["biography", "gated"]
    done = kvprobe(
        *(*run, "scorer", "--hidden", 5, "--update-rank", 2, "--temperature", 0.5, "--seed", 3),
        *("--out", tmp_path / "scorer"),
    )
    assert done.code == 0, done.err
    about = json.loads((tmp_path / "scorer/best/scorer.json").read_text(encoding="utf-8"))
    assert about["settings"] == {"hidden": 5, "update_rank": 2, "shared": False, "seed": 3}
    assert about["training"]["method"] == {**about["settings"], "ratios": [3.0, 5.0], "temperature": 0.5}


def test_an_option_of_one_task_comes_before_that_of_all() -> None:
    parts = methods.parts_of("biography, needle", "2,3", ["biography.facts=1", "facts=4", "needle.length=60"])
    assert [(part.task, part.docs, part.options) for part in parts] == [
        ("biography", (2, 3), {"facts": 1}),
        ("needle", (2, 3), {"facts": 4, "length": 60}),
    ]
    assert methods.parts_of("gated", "", None)[0].docs is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("paket", "--out", "x"),
            "KIND 'paket': choose from sempic, packet, joint, still, scorer. Did you mean \"packet\"?",
        ),
        (("packet",), "training needs --out"),
        (("packet", "--out", "x", "--task", "pronoun"), "training needs a document task; use "),
        (("packet", "--out", "x", "--docs", "two"), "--docs 'two': write numbers"),
        (("still", "--out", "x", "--task", "gated,biografy"), '--task "biografy": training needs a document task'),
        (("still", "--out", "x", "--task", "gated,gated"), "names a task twice"),
        (("still", "--out", "x", "--task-option", "needle.length=9"), "'needle' is not among the tasks of --task"),
        (("still", "--out", "x", "--init", "plane"), "--init 'plane': choose from identity, plain. Did you mean"),
        (("still", "--out", "x", "--backward", "half"), "--backward 'half': choose from truncated, full"),
        (("packet", "--out", "x", "--model", "smolm2-135m"), 'Did you mean "smollm2-135m"?'),
    ],
)
def test_wrong_use(kvprobe: Callable[..., Any], arguments: tuple[str, ...], message: str) -> None:
    done = kvprobe("train", *arguments)
    assert (done.code, done.out) == (2, "")
    assert message in done.words
