"""`kvprobe train`: the defaults are Python's, and a small run from the terminal trains, is refused, and is resumed."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvnotes_interp.cli import training as command
from kvnotes_interp.operators import writer
from kvnotes_interp.training import Settings, Trained, Writing, draw

SMALL = ("--docs", "2", "--task-option", "facts=1", "--samples", 4, "--validation", 2, "--steps", 2, "--batch", 2)
FEW = ("--max-new-tokens", 2, "--rank", 2, "--wrapper-tokens", 2, "--quiet")


def test_options_have_the_names_and_defaults_of_the_python_arguments() -> None:
    options = {name: p.default for name, p in inspect.signature(command.train).parameters.items()}
    for name, field in Settings.model_fields.items():
        assert options[name] == field.default, name
    for function, names in (
        (writer.new_writer, ("rank", "alpha", "wrapper_tokens")),
        (Writing, ("checkpointing",)),
    ):
        for name in names:
            assert options[name] == inspect.signature(function).parameters[name].default, name
    assert tuple(options["targets"].split(",")) == writer.TARGETS
    assert set(command.WRITERS) == set(writer.KINDS)
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
    wrong = kvprobe("train", "still", "--model", tiny_folder, *SMALL, "--ratios", "4", "--out", tmp_path / "other")
    assert wrong.code == 2
    assert "--ratios '4': write the lowest and the highest" in wrong.words


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("paket", "--out", "x"), "KIND 'paket': choose from sempic, packet, joint, still. Did you mean \"packet\"?"),
        (("packet",), "training needs --out"),
        (("packet", "--out", "x", "--task", "pronoun"), "training needs a document task; use "),
        (("packet", "--out", "x", "--docs", "two"), "--docs 'two': write numbers"),
        (("packet", "--out", "x", "--model", "smolm2-135m"), 'Did you mean "smollm2-135m"?'),
    ],
)
def test_wrong_use(kvprobe: Callable[..., Any], arguments: tuple[str, ...], message: str) -> None:
    done = kvprobe("train", *arguments)
    assert (done.code, done.out) == (2, "")
    assert message in done.words
