"""The recipes in figures/: drawn from a run folder, or told which command makes it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import figures
from figures.__main__ import main
from kvnotes_interp.plots import export
from tests.plots.test_notes_by_operator import made as notes
from tests.results.factory import make_result

VIEWS = {"memoization_map": ("state", "layer_position", "position"), "concentration": ("state", "cumulative")}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Run folders as the recipes want them, with made-up numbers."""
    for name, views in VIEWS.items():
        recipe = figures.recipe(name)
        make_result(n_layers=4, views=views, parts=False).save(recipe.folder(tmp_path / "runs"), figures=False)
    return tmp_path / "runs"


def test_recipes_name_runs_that_their_commands_make(kvprobe: Callable[..., Any], tmp_path: Path) -> None:
    runs = tmp_path / "runs"  # of nobody: a command would refuse a folder that is there
    recipes = figures.recipes()
    assert set(VIEWS) < set(recipes)
    for recipe in recipes.values():
        assert recipe.about
        folder = recipe.folder(runs)
        commands = recipe.how(runs).splitlines()
        folders = [folder / name for name in recipe.parts] or [folder]
        for line, target in zip(commands, folders, strict=True):
            command = shlex.split(line)
            assert command[command.index("--out") + 1] == str(target)
            counted = command[1] in ("patch", "suffix")
            options = ("--dry-run", "--n", "1") if counted else ("--help",)  # the options must exist
            done = kvprobe(*command[1:], *options)
            assert done.code == 0, done.err
    assert recipes["memoization_map"].folder(Path("runs")) == Path("runs/pronoun")
    assert recipes["concentration"].folder(Path("runs"), "capital") == Path("runs/capital-suffix")


def test_figures_are_written(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main([*VIEWS, "--runs", str(runs), "--out", str(out), "--no-pictures"]) == 0
    listed = capsys.readouterr().out.split()
    for name in VIEWS:
        for ending in ("html", "json", "csv"):
            assert str(out / f"{name}.{ending}") in listed
    drawn = json.loads((out / "memoization_map.json").read_text())
    assert "heatmap" in {trace["type"] for trace in drawn["data"]}
    table = (out / "concentration.csv").read_text().splitlines()
    assert {"ranking", "k", "mean", "low", "high"} <= set(table[0].split(","))
    # No telling file: the same numbers give the same bytes.
    before = (out / "memoization_map.html").read_bytes()
    main(["memoization_map", "--runs", str(runs), "--out", str(out), "--no-pictures"])
    assert (out / "memoization_map.html").read_bytes() == before


def test_pictures_are_drawn_where_they_can_be(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reason = export.why_no_pictures()
    assert main(["memoization_map", "--runs", str(runs), "--out", str(tmp_path / "out")]) == 0
    picture = tmp_path / "out" / "memoization_map.png"
    if reason is None:
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert (tmp_path / "out" / "memoization_map.pdf").read_bytes().startswith(b"%PDF")
    else:
        assert not picture.exists()
        assert reason in capsys.readouterr().err


def test_a_missing_run_names_the_command_and_the_others_are_drawn(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs / "pronoun-suffix").rename(runs / "elsewhere")
    assert main([*VIEWS, "--runs", str(runs), "--out", str(tmp_path / "out"), "--no-pictures"]) == 2
    error = capsys.readouterr().err
    assert f"kvprobe suffix --task pronoun --n 32 --out {runs / 'pronoun-suffix'}" in error
    assert (tmp_path / "out" / "memoization_map.html").is_file()
    assert not (tmp_path / "out" / "concentration.html").exists()


def test_a_run_without_the_rows_and_a_wrong_name(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_result(views=("state",)).save(runs / "capital", figures=False)
    assert main(["memoization_map", "--task", "capital", "--runs", str(runs), "--out", str(tmp_path)]) == 2
    assert "kvprobe patch --task capital" in capsys.readouterr().err
    assert main(["memoisation_map"]) == 2
    assert 'Did you mean "memoization_map"?' in capsys.readouterr().err


def test_a_recipe_over_several_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = figures.recipe("notes_by_operator")
    folder = recipe.folder(tmp_path)
    for number, name in enumerate(recipe.parts):
        notes(0.1 * number, shift=number).save(folder / name, figures=False)
    assert main(["notes_by_operator", "--runs", str(tmp_path), "--out", str(tmp_path / "out"), "--no-pictures"]) == 0
    drawn = json.loads((tmp_path / "out" / "notes_by_operator.json").read_text())
    assert [t["name"] for t in drawn["data"] if t["type"] == "bar"][:2] == ["full recompute", "no recompute"]
    capsys.readouterr()
    (folder / "sempic").rename(folder / "elsewhere")
    assert main(["notes_by_operator", "--runs", str(tmp_path), "--out", str(tmp_path / "out"), "--no-pictures"]) == 2
    error = capsys.readouterr().err
    assert f"--operator sempic@{tmp_path}/sempic --blocks documents --tail suffix --out {folder / 'sempic'}" in error


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in VIEWS)
    assert "--out runs/pronoun-suffix" in shown
