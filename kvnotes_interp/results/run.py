"""Run: a folder that a probe fills part by part, so that it can be killed at any time and resumed.

    run = Run.open(path, probe="local_patching", request=request, resume=resume)
    if run.complete:
        return run.result()
    for pair in pairs:
        if not run.done("states", pair.key):
            run.put("states", pair.key, frame)
    return run.finish(frame=run.stage("states", keys), pairs=pairs_frame, summary=summary)

A part is whole or not there: it is written under a temporary name and renamed.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from kvnotes_interp.errors import InputError
from kvnotes_interp.results import manifest as manifests
from kvnotes_interp.results import tables
from kvnotes_interp.results.result import Result, write_folder
from kvnotes_interp.results.summary import Summary

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa


class Run:
    """Open with `Run.open`. `path` is None for a run that lives in memory only."""

    def __init__(self, path: Path | None, manifest: dict[str, Any], lock: IO[str] | None = None) -> None:
        self.path, self.manifest = path, manifest
        self._lock = lock
        self._memory: dict[tuple[str, str], pa.Table] = {}
        self._started = time.monotonic()

    @classmethod
    def open(
        cls,
        path: str | Path | None,
        *,
        request: Mapping[str, Any],
        probe: str = "",
        extra: Mapping[str, Any] | None = None,
        resume: bool = False,
    ) -> Run:
        """Start a run, or take up the one in `path`; the manifest is written before anything else.

        Args:
            path: the run folder; None keeps everything in memory.
            request: everything that determines the numbers, JSON values only. A resumed run must ask for the same.
            probe: name of the probe; defaults to request["probe"].
            extra: further manifest keys, such as {"machine": {"device": ..., "dtype": ...}}.
            resume: take up a run that is already there. Where there is none, start one.

        Raises:
            InputError: the folder holds a run and `resume` is off; the request differs (each key is named); the folder
                holds something else; another process is writing to it.
        """
        probe = probe or str(request.get("probe", ""))
        fresh = manifests.new(probe=probe, request=request, extra=extra)
        if path is None:
            return cls(None, fresh)
        path = Path(path)
        if path.exists() and not path.is_dir():
            raise InputError(f"{path} is a file; give a folder for the run.")
        # A run killed before its manifest was renamed leaves only the lock and a temporary file.
        names = {p.name for p in path.iterdir()} if path.is_dir() else set()
        started = {n for n in names if n != "run.lock" and not _is_temporary(n)}
        if not started:
            lock = _locked(path)
            _remove_temporary(path)
            manifests.write_json(path / "manifest.json", fresh)
            return cls(path, fresh, lock)
        old = manifests.read(path)
        state = "a finished run" if old.get("status") == "complete" else "an unfinished run"
        if not resume:
            raise InputError(
                f"{path} already holds {state} of {old.get('probe')!r}. Pass resume=True (--resume) to take it up, or "
                "choose another folder."
            )
        if old.get("request_sha256") != fresh["request_sha256"] or old.get("probe") != probe:
            changed = manifests.differences(
                {"probe": old.get("probe"), "request": old.get("request")},
                {"probe": probe, "request": fresh["request"]},
            )
            raise InputError(
                f"{path} holds {state} that asked for something else: "
                + "; ".join(changed)
                + ". Use the same options to resume it, or choose another folder."
            )
        lock = _locked(path)
        _remove_temporary(path)
        if old.get("status") == "complete":
            shutil.rmtree(path / "parts", ignore_errors=True)  # killed between the manifest and the tidying up
            return cls(path, old, lock)
        keep = ("versions", "git", "machine")
        changed = manifests.differences({key: old.get(key) for key in keep}, {key: fresh.get(key) for key in keep})
        resumed = [*old.get("resumed", []), {"at": manifests.utc_now(), "changed": changed}]
        manifest = manifests.merged(old, {"resumed": resumed})
        manifests.write_json(path / "manifest.json", manifest)
        return cls(path, manifest, lock)

    @property
    def complete(self) -> bool:
        """True when the run has been finished; then `result()` returns it."""
        return self.manifest.get("status") == "complete"

    def result(self) -> Result:
        """The result of a finished run folder."""
        if self.path is None:
            raise InputError("a run in memory has no folder to load from; use what finish() returned.")
        self.close()
        return Result.load(self.path)

    def done(self, stage: str, key: str) -> bool:
        """Whether `put` has stored this part, in this process or an earlier one."""
        if self.path is None:
            return (stage, key) in self._memory
        return self._file(stage, key).is_file()

    def put(self, stage: str, key: str, frame: pd.DataFrame, *, columns: dict[str, str] = tables.FRAME_COLUMNS) -> None:
        """Store the rows of one part. A part is stored once; storing it again replaces it.

        `columns` are the fixed ones of its kind of table: a result's by default, or `tables.PAIR_COLUMNS`.
        """
        table = tables.to_arrow(frame, columns)
        if self.path is None:
            self._memory[stage, key] = table
        else:
            tables.write(table, self._file(stage, key))

    def get(self, stage: str, key: str) -> pd.DataFrame:
        """The rows of one part. Raises InputError when it is not there."""
        return tables.to_pandas(self._table(stage, key))

    def stage(self, stage: str, keys: Iterable[str]) -> pd.DataFrame:
        """The rows of these parts in the order of `keys`; an empty frame with the fixed columns for no keys."""
        parts = [self._table(stage, key) for key in keys]
        if not parts:
            import pandas as pd

            parts = [tables.to_arrow(pd.DataFrame(), tables.FRAME_COLUMNS)]
        return tables.to_pandas(tables.concat(parts))

    def finish(
        self,
        *,
        frame: pd.DataFrame,
        pairs: pd.DataFrame,
        summary: Summary,
        figures: bool = True,
        static: Sequence[str] = (),
        **fields: Any,
    ) -> Result:
        """Write the tables, the summary, the figures and, last, the manifest with status "complete".

        Args:
            frame, pairs, summary: of the result. The table's rows are written in the order given.
            figures, static: as in `Result.save`.
            fields: further manifest keys: noise_floor, path, plan, ... Controls are taken from the summary.
        """
        manifest = manifests.merged(
            self.manifest,
            manifests.json_safe(
                {
                    "controls": summary.to_dict()["controls"],
                    **fields,
                    "status": "complete",
                    "finished": manifests.utc_now(),
                    # Of this process: a run that was killed cannot tell how long it had worked.
                    "wall_s": round(time.monotonic() - self._started, 3),
                }
            ),
        )
        probe = str(manifest.get("probe", ""))
        result = Result.build(probe=probe, frame=frame, pairs=pairs, summary=summary, manifest=manifest)
        if self.path is not None:
            result.manifest.update(write_folder(result, self.path, figures=figures, static=static))
            shutil.rmtree(self.path / "parts", ignore_errors=True)
        self.manifest = dict(result.manifest)
        self._memory.clear()
        self.close()
        return result

    def close(self) -> None:
        """Let go of the folder's lock. The run can be resumed."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None
            if self.complete and self.path is not None:
                (self.path / "run.lock").unlink(missing_ok=True)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _table(self, stage: str, key: str) -> pa.Table:
        if not self.done(stage, key):
            raise InputError(f"the run holds no part {key!r} of stage {stage!r}.")
        return self._memory[stage, key] if self.path is None else tables.read(self._file(stage, key))

    def _file(self, stage: str, key: str) -> Path:
        assert self.path is not None
        return self.path / "parts" / _file_name(stage) / f"{_file_name(key)}.parquet"


def _file_name(key: str) -> str:
    """`key` where every file system takes it as it is; otherwise its safe letters and a hash."""
    if re.fullmatch(r"[a-z0-9_][a-z0-9_.-]{0,99}", key):
        return key
    # Capitals too: two keys that differ in case only are one file on some systems.
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    return f"{re.sub(r'[^A-Za-z0-9_-]+', '-', key)[:60].strip('-')}~{digest}"


def _is_temporary(name: str) -> bool:
    return re.fullmatch(r"\..+\.\d+\.tmp", name) is not None


def _remove_temporary(path: Path) -> None:
    """Remove what a killed run was writing; the lock says that nobody is writing now."""
    for leftover in list(path.rglob(".*.tmp")):
        if _is_temporary(leftover.name):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink(missing_ok=True)


def _locked(path: Path) -> IO[str] | None:
    """Lock the folder for this process; the system lets go when the process ends, however it ends.

    A record lock belongs to the process, so a notebook can open the same run again after an error.
    """
    path.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        return None
    file = open(path / "run.lock", "a+", encoding="utf-8")  # noqa: SIM115 - held open while the run is
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read().strip() or "unknown"
        file.close()
        raise InputError(
            f"another process (pid {owner}) is writing to {path}; wait for it or choose another folder."
        ) from None
    except OSError:  # a file system without locks
        file.close()
        return None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file
