"""`kvprobe` as a user meets it: quick help, exit codes, nearest names, JSON alone on standard output."""

from __future__ import annotations

import inspect
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvnotes_interp as kv
from kvnotes_interp import probes, sites
from kvnotes_interp.cli import options as cli_options
from kvnotes_interp.probes import circuit, patching
from kvnotes_interp.probes.editing.frontier import RANKINGS
from tests.results.factory import make_result

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "transformers", "pandas", "plotly", "sklearn", "pyarrow", "numpy", "scipy")
COMMANDS = (
    *("patch", "suffix", "linear", "ablate", "deviate", "splice", "edit", "keystone", "compact", "survive"),
    *("run", "check", "calibrate", "models", "tasks", "show"),
    *("compile", "stream", "train"),
)

ONLY_HERE = {
    *("model", "device", "dtype", "revision", "task", "n", "split", "task_option"),
    *("as_json", "quiet", "dry_run"),
}

# Runs each list of arguments in one fresh process and prints exit codes, messages, and what was imported on the way.
FRESH = """
import io, json, sys, contextlib
from kvnotes_interp import cli
seen = []
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["kvprobe", *arguments]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
    seen.append([code, out.getvalue(), err.getvalue()])
print(json.dumps({"seen": seen, "modules": sorted({name.partition(".")[0] for name in sys.modules})}))
"""


def fresh(*commands: list[str]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", FRESH, json.dumps(commands)], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def test_help_is_quick() -> None:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "kvnotes_interp.cli", "--help"], check=True, capture_output=True)
        times.append(time.perf_counter() - start)
    assert min(times) < 2.5  # under a second on a quiet machine


def test_what_needs_no_model_imports_nothing_heavy_and_fits_80_columns() -> None:
    commands = [["--help"], *([name, "--help"] for name in COMMANDS), ["--version"], ["models"], ["tasks"]]
    commands += [["tasks", "pronoun"], ["tasks", "account_role", "--json"], ["models", "--json"]]
    found = fresh(*commands)
    assert not set(HEAVY) & set(found["modules"])
    for arguments, (code, out, _) in zip(commands, found["seen"], strict=True):
        assert code == 0, arguments
        if "--json" in arguments:
            assert json.loads(out)
        else:
            assert max(map(len, out.splitlines())) <= 80, arguments
    listed = found["seen"][commands.index(["models"])][1]
    assert all(alias.repo in listed for alias in kv.sources.ALIASES.values()), "a hub id must be whole, to be copied"


WRONG = {
    ("patch", "--model", "smolm2-135m"): 'Unknown model "smolm2-135m". Did you mean "smollm2-135m"?',
    ("patch", "--model", "llama3.1-8b", "--dry-run"): 'Did you mean "llama-3.1-8b"?',
    ("check", "--model", "qwen3-8"): 'Did you mean "qwen3-8b"?',
    ("run", "probes/locality.yaml", "--model", "mistral7b"): 'Did you mean "mistral-7b"?',
    ("patch", "--task", "pronun"): 'no task family "pronun". Did you mean "pronoun"?',
    ("tasks", "capitol"): 'Did you mean "capital"?',
    ("patch", "--task", "account_role", "--task-option", "filers=3"): 'Did you mean "fillers"?',
    ("patch", "--task-option", "fillers"): "write name=value",
    ("patch", "--split", "tests"): 'Did you mean "test"?',
    ("patch", "--views", "region,rndom"): "Did you mean \"random\"?",
    ("patch", "--parts", "kv,q"): "choose from kv, k, v",
    ("patch", "--path", "shard"): 'Did you mean "shared"?',
    ("patch", "--modl", "x"): "--model",
    ("pach",): "patch",
    ("patch", "--n", "0"): "--n",
    ("patch", "--n", "many"): "--n",
    ("patch", "--resume"): "--resume needs --out",
    ("run", "probes/localty.yaml"): 'Did you mean "locality.yaml"?',
    ("show", "no/such/run"): "there is no run at no/such/run",
}  # fmt: skip


def test_wrong_use_is_refused_at_once_with_the_nearest_right_name() -> None:
    Path("probes").symlink_to(ROOT / "probes")  # in the test's own folder
    found = fresh(*(list(arguments) for arguments in WRONG))
    assert "torch" not in found["modules"], "what is wrong without a model must be said before torch is imported"
    for (arguments, message), (code, out, err) in zip(WRONG.items(), found["seen"], strict=True):
        words = " ".join(err.replace("│", " ").split())
        assert (code, out) == (2, ""), arguments
        assert message in words, (arguments, words)
        assert "Traceback" not in err


def test_wrong_device_and_dtype(kvprobe: Callable[..., Any]) -> None:
    for extra in ([], ["--dry-run"]):
        done = kvprobe("patch", "--n", 1, "--device", "cudda", *extra)
        assert done.code == 2
        assert 'Unknown device "cudda"' in done.words
        done = kvprobe("patch", "--n", 1, "--dtype", "floot32", *extra)
        assert done.code == 2
        assert 'Did you mean "float32"?' in done.words


def test_options_have_the_names_of_the_python_arguments() -> None:
    from kvnotes_interp.cli.probes import COMMANDS

    for name, command in COMMANDS.values():
        probe = getattr(probes, name)
        own = {n: p.default for n, p in inspect.signature(probe).parameters.items() if p.kind is p.KEYWORD_ONLY}
        options = {n: p.default for n, p in inspect.signature(command).parameters.items() if n not in ONLY_HERE}
        assert set(options) <= set(own), name
        for option, default in options.items():
            if not isinstance(default, str) or isinstance(own[option], str):  # a list is written with commas here
                assert default == own[option], (name, option)
    assert cli_options.PARTS == sites.PARTS
    assert cli_options.ANALYSES == circuit.ANALYSES
    assert cli_options.RANKINGS == RANKINGS
    assert cli_options.VIEWS == patching.VIEWS
    assert cli_options.words("--views", "all", patching.VIEWS) == patching.VIEWS
    assert cli_options.words("--views", "none", patching.VIEWS) == ()


def test_json_is_alone_on_standard_output_of_a_fresh_process(smollm2: Any) -> None:
    """`smollm2` is asked for so that the weights are there."""
    done = subprocess.run(
        [sys.executable, "-m", "kvnotes_interp.cli", "patch", "--n", "2", "--views", "none", "--parts", "kv", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    for state in ("field_only", "downstream_only", "field_and_downstream"):
        assert set(summary[state]) >= {"mean", "low", "high", "n", "n_effective"}
    assert summary["field_and_downstream"]["mean"] == pytest.approx(1, abs=1e-3)
    assert summary["n_tried"] == 2
    assert summary["n_competent"] + sum(summary["set_aside"].values()) == 2
    assert set(summary["controls"]) >= {"no_patch", "self_patch", "everything"}
    for control in summary["controls"].values():
        assert control["passed"]
        assert control["value"] <= control["tolerance"]


TINY = ("--min-gap", 0, "--min-gap-noise", 0, "--seed", 2, "--draws", 2)  # a random model changes its answer by little


def test_run_folder_once_again_and_shown(tiny_folder: Path, kvprobe: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = ("patch", "--model", tiny_folder, "--n", 16, "--views", "random", *TINY, "--out", folder)
    first = kvprobe(*command)
    assert first.code == 0, first.err
    assert "field only" in first.out
    assert max(map(len, first.out.splitlines())) <= 80
    assert f"open {folder}/figures/states.html" in first.words
    assert (folder / "figures" / "states.html").is_file()
    table = (folder / "table.parquet").read_bytes()

    again = kvprobe(*command)
    assert again.code == 2
    assert "already holds a run. Pass --resume" in again.words
    resumed = kvprobe(*command, "--resume")
    assert (resumed.code, resumed.out) == (0, first.out)
    assert (folder / "table.parquet").read_bytes() == table
    other = kvprobe(*command, "--draws", 3, "--resume")
    assert other.code == 2
    assert "asked for something else: request.options.draws: 2 -> 3" in other.words

    shown = kvprobe("show", folder)
    assert (shown.code, shown.out) == (0, first.out)
    assert json.loads(kvprobe("show", folder, "--json").out)["n_tried"] == 16


def test_no_competent_pair_is_said_and_is_no_failure(
    tiny_folder: Path, kvprobe: Callable[..., Any], tmp_path: Path
) -> None:
    command = ("patch", "--model", tiny_folder, "--n", 3, "--min-gap", 1000)
    done = kvprobe(*command, "--out", tmp_path / "run")
    assert done.code == 0, done.err
    assert "0 of 3 pairs competent; set aside:" in done.out
    assert "No pair of pronoun was competent" in done.words
    assert f"Saved in {tmp_path / 'run'}." in done.words
    done = kvprobe(*command, "--json")
    assert json.loads(done.out)["field_only"]["mean"] is None


def test_dry_run_of_an_8b_model_needs_neither_weights_nor_network(
    kvprobe: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a dry run must not touch the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    done = kvprobe("patch", "--model", "llama-3.1-8b", "--task", "rule", "--n", 2, "--dry-run", "--json")
    assert done.code == 0, done.err
    plan = json.loads(done.out)
    assert (plan["n_pairs"], plan["n_encoded"]) == (2, 2)
    assert plan["weight_bytes"] == 8_030_261_248 * (4 if plan["dtype"] == "float32" else 2)
    # Both caches of the longest prompt: 2 x (keys, values) x layers x KV heads x width x tokens x bytes.
    size = 4 if plan["dtype"] == "float32" else 2
    assert plan["cache_bytes"] == 2 * 2 * 32 * 8 * 128 * plan["tokens"][1] * size
    assert plan["seconds"] > 0
    assert plan["cells"] > 1000


def test_dry_run_counts_the_cells_that_a_run_measures(tiny_folder: Path, kvprobe: Callable[..., Any]) -> None:
    from kvnotes_interp import dryrun

    model, pairs = kv.load(tiny_folder), kv.tasks.pronoun(n=12, seed=2)
    options: dict[str, dict[str, Any]] = {
        "local_patching": {"parts": ("kv", "k"), "views": patching.VIEWS, "draws": 2, "map_pairs": 6},
        "suffix_concentration": {"draws": 2},
    }
    for probe, own in options.items():
        result = getattr(probes, probe)(model, pairs, **own, min_gap=0, min_gap_noise=0, progress=False)
        measured = set(result.frame["pair"])
        assert measured
        # A plan takes every pair for competent, so it is asked about those that were, and about none but those.
        kept = [pair for pair in pairs if pair.key in measured]
        own = {**own, "map_pairs": sum(p.key in measured for p in pairs[:6])} if "map_pairs" in own else own
        plan = dryrun.plan(probe, own, str(tiny_folder), kept)
        rows = result.frame[(result.frame["readout"] == "recovery") & ~result.frame["site"].isin(["stale", "oracle"])]
        assert plan.cells == len(rows), probe
    shown = kvprobe("suffix", "--model", tiny_folder, "--n", 1, "--dry-run")
    assert "its own tokenizer" in shown.out
    assert max(map(len, shown.out.splitlines())) <= 80


def test_show_writes_figures_and_refuses_what_is_not_finished(
    kvprobe: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BROWSER_PATH", "/nowhere")  # no pictures: they are tested elsewhere
    make_result(views=("state",)).save(tmp_path / "run", figures=False)
    done = kvprobe("show", tmp_path / "run", "--figures", tmp_path / "drawn")
    assert done.code == 0, done.err
    assert (tmp_path / "drawn" / "states.html").is_file()
    assert "states.html" in done.words

    kv.Run.open(tmp_path / "begun", request={"probe": "local_patching"}).close()
    done = kvprobe("show", tmp_path / "begun")
    assert done.code == 2
    assert "unfinished run" in done.words
    assert "--resume" in done.words


def test_failed_controls_exit_with_1(
    tiny_folder: Path, kvprobe: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from kvnotes_interp import checks

    def broken(*_: Any, **__: Any) -> None:
        raise kv.ControlError("control 'no_patch' failed")

    monkeypatch.setattr(probes, "local_patching", broken)
    done = kvprobe("patch", "--model", tiny_folder, "--json")
    assert (done.code, done.out) == (1, "")
    assert "control 'no_patch' failed" in done.words

    good = kvprobe("check", "--model", tiny_folder, "--json")
    assert good.code == 0
    assert json.loads(good.out)["passed"] is True
    monkeypatch.setitem(checks.LIMITS, torch.float32, 1e-12)
    bad = kvprobe("check", "--model", tiny_folder)
    assert bad.code == 1
    assert "✗" in bad.out
    assert json.loads(kvprobe("check", "--model", tiny_folder, "--json").out)["passed"] is False


def test_interrupted_says_what_is_kept(
    tiny_folder: Path, kvprobe: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(probes, "local_patching", interrupted)
    done = kvprobe("patch", "--model", tiny_folder, "--out", tmp_path / "run")
    assert done.code == 130
    assert "add --resume to go on" in done.words


def test_a_folder_that_cannot_be_made_is_wrong_use(
    tiny_folder: Path, kvprobe: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    done = kvprobe("patch", "--model", tiny_folder, "--n", 1, "--out", tmp_path / "file" / "run")
    assert done.code == 2
    assert "Traceback" not in done.err
    assert "file" in done.words
