from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from kvnotes_interp.errors import InputError
from kvnotes_interp.results import Control, Result, Run, Summary, tables

REQUEST = {"probe": "toy", "model": {"name": "tiny"}, "seed": 0, "options": {"layers": (0, 1)}}
KEYS = [f"pair-{i:02d}" for i in range(8)]


def part(key: str) -> pd.DataFrame:
    index = KEYS.index(key)
    return pd.DataFrame(
        {
            "pair": key,
            "content": f"c{index % 3}",
            "view": ["state", "state"],
            "site": ["field_only", "downstream_only"],
            "part": "kv",
            "layer": [None, index],
            "readout": "recovery",
            "value": [0.1 / (index + 3), 1 / 3],
        }
    )


def summary() -> Summary:
    rows = [{"quantity": "field_only", "mean": 0.1, "low": float("nan"), "high": None, "n": 8, "n_effective": 3}]
    return Summary.of(
        "toy", rows, counts={"n_tried": 8, "n_competent": 8}, controls=[Control("same", True, 0.0, 1e-4, 8)]
    )


def work(path: Path | None, *, resume: bool = False, pause: float = 0.0, log: list[str] | None = None) -> Result:
    run = Run.open(path, request=REQUEST, resume=resume)
    if run.complete:
        return run.result()
    for key in KEYS:
        if not run.done("states", key):
            time.sleep(pause)
            run.put("states", key, part(key))
            if log is not None:
                log.append(key)
    pairs = pd.DataFrame({"pair": KEYS, "content": "c", "competent": True, "tokens": [["a", "b"]] * 8})
    return run.finish(frame=run.stage("states", KEYS), pairs=pairs, summary=summary(), noise_floor=1e-6)


def test_memory_and_folder_give_the_same_table(tmp_path: Path) -> None:
    kept, saved = work(None), work(tmp_path / "run")
    pd.testing.assert_frame_equal(kept.frame, saved.frame)
    pd.testing.assert_frame_equal(kept.frame, Result.load(tmp_path / "run").frame)
    assert kept.frame["layer"].dtype == "Int64"
    assert list(kept.frame.columns) == list(tables.FRAME_COLUMNS)


def test_finished_folder(tmp_path: Path) -> None:
    work(tmp_path / "run")
    names = {str(p.relative_to(tmp_path / "run")) for p in (tmp_path / "run").rglob("*") if p.is_file()}
    base = {"table.parquet", "pairs.parquet", "summary.json", "manifest.json"}
    assert names == base | {f"figures/states.{ending}" for ending in ("html", "json", "csv")}
    manifest = json.loads((tmp_path / "run/manifest.json").read_text())
    assert manifest["status"] == "complete"
    assert manifest["noise_floor"] == 1e-6
    assert manifest["controls"]["same"]["passed"] is True
    assert manifest["versions"]["python"]
    assert json.loads((tmp_path / "run/summary.json").read_text())["field_only"]["low"] is None


def test_killed_with_sigkill_and_resumed_gives_the_same_bytes(tmp_path: Path) -> None:
    work(tmp_path / "whole")
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_run, pathlib\n"
    code += f"test_run.work(pathlib.Path({str(tmp_path / 'killed')!r}), pause=0.3)"
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    child = subprocess.Popen([sys.executable, "-c", code], env=environment)
    try:
        deadline = time.monotonic() + 30
        while len(list((tmp_path / "killed").rglob("pair-*.parquet"))) < 3:
            assert child.poll() is None, "the child ended early"
            assert time.monotonic() < deadline
            time.sleep(0.02)
        with pytest.raises(InputError, match=f"another process .pid {child.pid}. is writing"):
            Run.open(tmp_path / "killed", request=REQUEST, resume=True)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert child.returncode == -signal.SIGKILL
    # What a kill in the middle of a write leaves behind.
    (tmp_path / "killed/parts/states/.pair-07.parquet.1.tmp").write_bytes(b"half")
    with pytest.raises(InputError, match=r"unfinished run of 'toy'.*resume=True"):
        Result.load(tmp_path / "killed")

    log: list[str] = []
    resumed = work(tmp_path / "killed", resume=True, log=log)
    assert 0 < len(log) < len(KEYS)
    for name in ("table.parquet", "pairs.parquet", "summary.json", "figures/states.json", "figures/states.html"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert not list((tmp_path / "killed").rglob("*.tmp"))
    assert len(resumed.manifest["resumed"]) == 1

    again: list[str] = []
    work(tmp_path / "killed", resume=True, log=again)
    assert again == []


def test_existing_folder_and_changed_request(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    Run.open(folder, request=REQUEST).close()
    with pytest.raises(InputError, match=r"already holds an unfinished run of 'toy'.*--resume"):
        Run.open(folder, request=REQUEST)
    with pytest.raises(InputError, match=r"request\.model\.name: \"tiny\" -> \"big\"; request\.seed: 0 -> 1"):
        Run.open(folder, request={**REQUEST, "model": {"name": "big"}, "seed": 1}, resume=True)
    Run.open(folder, request=REQUEST, resume=True).close()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"not a run folder: it holds notes\.txt"):
        Run.open(tmp_path / "other", request=REQUEST, resume=True)


def test_killed_before_the_manifest_starts_afresh(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.lock").write_text("1")
    (folder / ".manifest.json.1.tmp").write_text("{")
    run = Run.open(folder, request=REQUEST)
    assert json.loads((folder / "manifest.json").read_text())["status"] == "running"
    assert not (folder / ".manifest.json.1.tmp").exists()
    run.close()


def test_awkward_keys_and_missing_parts(tmp_path: Path) -> None:
    with Run.open(tmp_path / "run", request=REQUEST) as run:
        for key in ("a/b", "A", "a", "..", "x" * 300):
            assert not run.done("s", key)
            run.put("s", key, part(KEYS[0]).assign(token=key))
        for key in ("a/b", "A", "a", "..", "x" * 300):
            assert set(run.get("s", key)["token"]) == {key}
        with pytest.raises(InputError, match="no part 'b' of stage 's'"):
            run.get("s", "b")
        assert len(run.stage("s", [])) == 0
