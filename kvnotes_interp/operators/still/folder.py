"""A Still compactor on disk: `still.safetensors`, and `still.json` with what it is and whose."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from kvnotes_interp.downloads import sha256
from kvnotes_interp.errors import InputError
from kvnotes_interp.files import replacing
from kvnotes_interp.operators.still.compactor import Still, new_still
from kvnotes_interp.operators.still.settings import StillSettings

if TYPE_CHECKING:
    from kvnotes_interp.model import Model

FORMAT, ABOUT, TENSORS = "still/1", "still.json", "still.safetensors"


def write(still: Still, folder: Path, training: Mapping[str, Any]) -> Path:
    """Write both files, the description last; returns the folder."""
    with replacing(folder / TENSORS) as temporary:
        save_file({name: t.detach().cpu().contiguous() for name, t in still.parameters().items()}, temporary)
    about = {
        "format": FORMAT,
        "model_id": still.model_id,
        "source": dict(still.source),
        "settings": still.settings.model_dump(),
        "n_parameters": still.n_parameters,
        "sha256": {TENSORS: sha256(folder / TENSORS)},
        "training": dict(training),
    }
    with replacing(folder / ABOUT) as temporary:
        temporary.write_text(json.dumps(about, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return folder


def read_about(folder: Path) -> dict[str, Any]:
    """What `still.json` says. Raises InputError when there is none or it describes something else."""
    path = Path(folder) / ABOUT
    if not path.is_file():
        raise InputError(
            f"there is no {ABOUT} in {folder}: no trained Still compactor is kept there. kvprobe train still --out DIR "
            "makes one, in DIR/best."
        )
    about = json.loads(path.read_text(encoding="utf-8"))
    if about.get("format") != FORMAT:
        raise InputError(f"{path} describes no compactor of format {FORMAT!r} (found {about.get('format')!r}).")
    return about


def read(folder: Path, model: Model) -> Still:
    """Read what `write` wrote, for this model alone. Raises InputError, see `Still.load`."""
    about = read_about(folder)
    path = folder / TENSORS
    if not path.is_file():
        raise InputError(f"{path} is missing: the compactor in {folder} is not whole. Train it again.")
    if sha256(path) != about["sha256"][TENSORS]:
        raise InputError(f"{path} is not the file that {ABOUT} describes (sha256). Train it again.")
    Still(None, None, about["model_id"], about["source"]).check(model)  # type: ignore[arg-type]
    still = new_still(model, settings=StillSettings(**about["settings"]))
    try:
        still.set(load_file(path))
    except SafetensorError as error:
        raise InputError(f"{path} is not a safetensors file: {error}") from error
    return still
