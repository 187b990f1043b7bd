"""A run killed with SIGKILL half way and resumed gives the table of an uninterrupted one, byte for byte."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import kvnotes_interp as kv
from kvnotes_interp import probes

ROOT = Path(__file__).parent.parent
PAIRS = 40


def start(model: Path, out: Path, *more: str) -> subprocess.Popen[str]:
    command = [
        *(sys.executable, "-m", "kvnotes_interp.cli", "patch", "--model", str(model), "--out", str(out), "--quiet"),
        *("--task", "pronoun", "--n", str(PAIRS), "--seed", "2", "--draws", "3", "--device", "cpu"),
        *("--min-gap", "0", "--min-gap-noise", "0", *more),  # a random model changes its answer by little
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def kill_half_way(process: subprocess.Popen[str], folder: Path) -> int:
    """SIGKILL once some pairs are done; returns how many were left behind whole."""
    done = 0
    while process.poll() is None and done < PAIRS // 8:
        time.sleep(0.002)
        done = len(list(folder.glob("parts/*.pairs/*.parquet")))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL, "the run ended before it could be killed"
    return len(list(folder.glob("parts/*.pairs/*.parquet")))


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL is a POSIX signal")
def test_killed_and_resumed_is_the_same_table(tiny_folder: Path, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    uninterrupted, victim = start(tiny_folder, whole), start(tiny_folder, killed)
    left = kill_half_way(victim, killed)
    _, errors = uninterrupted.communicate()
    assert uninterrupted.returncode == 0, errors

    assert 0 < left < PAIRS
    assert json.loads((killed / "manifest.json").read_text())["status"] == "running"
    with pytest.raises(kv.InputError, match="--resume"):
        kv.Result.load(killed)
    assert list(killed.glob("parts/*/*.parquet"))

    resumed = start(tiny_folder, killed, "--resume")
    shown, errors = resumed.communicate()
    assert resumed.returncode == 0, errors
    assert "Controls: 4 of 4 passed" in shown
    for name in ("table.parquet", "pairs.parquet", "summary.json"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes(), name
    manifest = json.loads((killed / "manifest.json").read_text())
    assert manifest["status"] == "complete"
    assert len(manifest["resumed"]) == 1
    assert not (killed / "parts").exists()

    result = kv.Result.load(whole)
    counts = result.summary().counts
    assert counts["n_tried"] == PAIRS
    assert counts["n_competent"] >= 5, "too few competent pairs to show anything"
    assert result.frame["pair"].nunique() == counts["n_competent"]


@pytest.mark.parametrize("stage", ["alone", "cumulative"])
def test_a_probe_of_two_stages_resumes_in_either(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """The second stage ranks positions by the first one's table, so it must come back as it was. In this process."""
    model, pairs = kv.load(tiny_folder), kv.tasks.pronoun(n=16, seed=2)
    real, stopped = kv.Run.put, 0

    def put(self: kv.Run, name: str, key: str, *rest: Any, **more: Any) -> None:
        nonlocal stopped
        real(self, name, key, *rest, **more)
        stopped += name == stage
        if stopped == 2:
            raise KeyboardInterrupt

    def run(name: str, *, resume: bool = False) -> kv.Result:
        return probes.suffix_concentration(
            model, pairs, draws=2, min_gap=0, min_gap_noise=0, out=tmp_path / name, resume=resume, progress=False
        )

    run("whole")
    with monkeypatch.context() as patched:
        patched.setattr(kv.Run, "put", put)
        with pytest.raises(KeyboardInterrupt):
            run("killed")
    assert run("killed", resume=True).summary().to_dict() == kv.Result.load(tmp_path / "whole").summary().to_dict()
    for name in ("table.parquet", "pairs.parquet", "summary.json"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
