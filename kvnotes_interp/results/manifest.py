"""What a run was: its request, the versions, the git state and the machine. Written before the first number."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from kvnotes_interp.errors import InputError, nearest
from kvnotes_interp.files import entry, read_json, replacing

SCHEMA = 1
PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "gguf",
    "numpy",
    "pandas",
    "pyarrow",
    "scikit-learn",
    "plotly",
)


def new(*, probe: str, request: Mapping[str, Any], extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A manifest with status "running".

    Args:
        probe: name of the probe. request: everything that determines the numbers (model, task, options, seed, pairs).
        extra: further keys; a dictionary is merged into the one of the same name, so `{"machine": {"device": ...}}`
            adds to the machine facts.
    """
    clean = json_safe(request)
    out: dict[str, Any] = {
        "schema": SCHEMA,
        "probe": probe,
        "created": utc_now(),
        "status": "running",
        "request": clean,
        "request_sha256": sha256_of(clean),
        "versions": versions(),
        "git": git_state(),
        "machine": machine(),
    }
    return merged(out, json_safe(extra or {}))


def merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `more` on top; dictionaries under the same key are merged one level deep."""
    out = dict(base)
    for key, value in more.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = {**out[key], **value} if both else value
    return out


def versions() -> dict[str, str | None]:
    """Versions of this package, Python and the packages that numbers depend on; None where not installed."""
    out: dict[str, str | None] = {
        "kvnotes_interp": _version("kvnotes-interp"),
        "python": platform.python_version(),
    }
    return out | {name: _version(name) for name in PACKAGES}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        if name == "kvnotes-interp":
            import kvnotes_interp

            return getattr(kvnotes_interp, "__version__", None)
        return None


def machine() -> dict[str, Any]:
    """Facts that cost nothing to ask. Device and dtype are the model's, so the caller adds them."""
    out: dict[str, Any] = {
        "platform": platform.platform(),
        "processor": platform.machine(),
        "cpus": os.cpu_count(),
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        out["threads"] = torch.get_num_threads()
    return out


def git_state(folder: Path | None = None) -> dict[str, Any] | None:
    """Commit of the checkout that tracks this package's source, and whether the source differs from it.

    None when there is no git, no commit yet, or the package is installed outside a checkout. A virtual environment
    that merely lies inside someone's repository is not tracked by it and counts as outside.
    """
    folder = folder or Path(__file__).resolve().parents[1]
    if _git(folder, "ls-files", "--error-unmatch", "errors.py") is None:
        return None
    commit = _git(folder, "rev-parse", "--verify", "HEAD")
    changes = _git(folder, "status", "--porcelain", "--", ".")
    if commit is None or changes is None:
        return None
    return {"commit": commit, "dirty": bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    # Variables such as GIT_DIR, set while a hook runs, would point at another repository.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """`key: old -> new` for every leaf that differs, keys dotted and sorted."""
    a, b = _leaves(old), _leaves(new)
    return [
        f"{key}: {_short(a.get(key, '(absent)'))} -> {_short(b.get(key, '(absent)'))}"
        for key in sorted(a.keys() | b.keys())
        if key not in a or key not in b or a[key] != b[key]
    ]


def _leaves(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping) and value:
        out: dict[str, Any] = {}
        for key, inner in value.items():
            out |= _leaves(inner, f"{prefix}.{key}" if prefix else str(key))
        return out
    return {prefix: value}


def _short(value: Any) -> str:
    text = value if value == "(absent)" else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def json_safe(value: Any) -> Any:
    """Plain JSON values: tuples become lists, paths and dtypes text, NaN and infinities None.

    Raises InputError for a key that is not text, since two such keys could become one.
    """
    if isinstance(value, Mapping):
        bad = [key for key in value if not isinstance(key, str)]
        if bad:
            raise InputError(f"the key {bad[0]!r} must be text to be stored as JSON.")
        return {key: json_safe(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(inner) for inner in value]
    if isinstance(value, set | frozenset):
        return sorted((json_safe(inner) for inner in value), key=str)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if hasattr(value, "item") and getattr(value, "size", 1) == 1:
        return json_safe(value.item())
    if hasattr(value, "tolist"):
        return json_safe(value.tolist())
    if hasattr(value, "to_dict"):
        return json_safe(value.to_dict())
    return str(value)


def sha256_of(value: Any) -> str:
    """Hash of the value's canonical JSON."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def sha256_file(path: Path) -> str:
    """Hash of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def utc_now() -> str:
    """ISO time in UTC to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically, readable and without NaN."""
    text = json.dumps(json_safe(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read(folder: Path) -> dict[str, Any]:
    """The manifest of a run folder. Raises InputError that says what was found instead, and what to do."""
    path = folder / "manifest.json"
    if not folder.exists():
        siblings = [p.name for p in folder.parent.iterdir() if p.is_dir()] if folder.parent.is_dir() else []
        raise InputError(f"there is no run at {folder}.{nearest(folder.name, siblings)}")
    if not folder.is_dir():
        raise InputError(f"{folder} is a file; give the run folder that holds manifest.json.")
    if not path.is_file():
        found = ", ".join(sorted(p.name for p in folder.iterdir())[:5]) or "nothing"
        raise InputError(f"{folder} is not a run folder: it holds {found}, and no manifest.json.")
    again = "Move the folder away and run again."
    try:
        manifest = read_json(path, "manifest", of=dict)
    except InputError as error:
        raise InputError(f"{error} {again}") from error
    if "schema" not in manifest:
        raise InputError(f"{path} is not the manifest of a run: it has no key 'schema'. {again}")
    if manifest["schema"] != SCHEMA:
        versions = manifest.get("versions")
        raise InputError(
            f"{path} has schema {manifest['schema']} and this version reads {SCHEMA}; "
            "install the version of kvnotes-interp that wrote it "
            f"({versions.get('kvnotes_interp', 'unknown') if isinstance(versions, dict) else 'unknown'})."
        )
    manifest.setdefault("request", {})  # of a result that was built in memory and saved
    for name, kind in (("probe", str), ("status", str), ("request", dict)):
        entry(manifest, name, kind, f'manifest "{path}"', again)
    for name, kind in (("files", dict), ("resumed", list)):
        if name in manifest:
            entry(manifest, name, kind, f'manifest "{path}"', again)
    return manifest
