"""Result: the tidy table of a probe with its summary and manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvnotes_interp.errors import InputError
from kvnotes_interp.files import entry, read_json
from kvnotes_interp.results import manifest as manifests
from kvnotes_interp.results import tables
from kvnotes_interp.results.summary import Summary, render

if TYPE_CHECKING:
    import pandas as pd
    from plotly.graph_objects import Figure
    from rich.console import RenderableType

_FILES = ("table.parquet", "pairs.parquet", "summary.json")  # of a finished run, beside its manifest


@dataclass(frozen=True, repr=False)
class Result:
    """What a probe found.

    Args:
        probe: name of the probe.
        frame: one row per (pair, site, readout); columns in `tables.FRAME_COLUMNS`, further ones allowed.
        pairs: one row per tried pair; columns in `tables.PAIR_COLUMNS`.
        manifest: request, versions, machine, controls.
    """

    probe: str
    frame: pd.DataFrame
    pairs: pd.DataFrame
    manifest: dict[str, Any]
    _summary: Summary = field(compare=False)

    @classmethod
    def build(
        cls,
        *,
        probe: str,
        frame: pd.DataFrame,
        pairs: pd.DataFrame,
        summary: Summary,
        manifest: Mapping[str, Any] | None = None,
    ) -> Result:
        """A result with its tables brought to the fixed columns and types."""
        return cls(
            probe=probe,
            frame=tables.to_pandas(tables.to_arrow(frame, tables.FRAME_COLUMNS)),
            pairs=tables.to_pandas(tables.to_arrow(pairs, tables.PAIR_COLUMNS)),
            manifest=dict(manifest or {}),
            _summary=summary,
        )

    def summary(self) -> Summary:
        """Quantities with 95 % intervals, counts and controls."""
        return self._summary

    def to_frame(self) -> pd.DataFrame:
        """A copy of the tidy table."""
        return self.frame.copy()

    def plots(self) -> tuple[str, ...]:
        """Names of the figures that this result can draw, the most telling first."""
        from kvnotes_interp import plots

        return plots.available(self)

    def plot(self, kind: str | None = None, **options: Any) -> Figure:
        """Draw a figure; without `kind` the most telling one. Raises InputError for a kind it cannot draw."""
        from kvnotes_interp import plots

        return plots.draw(self, kind, **options)

    def save(
        self, path: str | Path, *, overwrite: bool = False, figures: bool = True, static: Sequence[str] = ()
    ) -> Path:
        """Write a run folder: table.parquet, pairs.parquet, summary.json, figures/ and, last, manifest.json.

        Args:
            path: the folder. A folder that already holds something raises InputError unless `overwrite`.
            figures: draw every figure as self-contained HTML, JSON and CSV.
            static: picture formats to add ("png", "pdf", "svg") where Chromium and kaleido are found.
        """
        path = Path(path)
        if path.exists() and not path.is_dir():
            raise InputError(f"{path} is a file; give a folder to save the run in.")
        if path.is_dir() and any(path.iterdir()) and not overwrite:
            raise InputError(f"{path} is not empty; choose another folder or pass overwrite=True.")
        # Without its manifest a half overwritten folder cannot pass for a whole run.
        (path / "manifest.json").unlink(missing_ok=True)
        write_folder(self, path, figures=figures, static=static)
        return path

    @classmethod
    def load(cls, path: str | Path) -> Result:
        """Read a finished run folder. Raises InputError that says what is missing and what to do."""
        path = Path(path)
        manifest = manifests.read(path)
        if manifest.get("status") != "complete":
            parts = sum(1 for _ in (path / "parts").rglob("*.parquet")) if (path / "parts").is_dir() else 0
            raise InputError(
                f"{path} holds an unfinished run of {manifest.get('probe')!r}, started {manifest.get('created')}, "
                f"with {parts} finished parts. Run the same call or command again with resume=True (--resume) to "
                "finish it."
            )
        listed = entry(manifest, "files", dict, f'manifest "{path / "manifest.json"}"', "Copy the whole folder again.")
        for name, digest in {**dict.fromkeys(_FILES), **listed}.items():
            file = path / name
            if not file.is_file():
                raise InputError(f"{path} lacks {name}, which its manifest lists; copy the whole folder again.")
            if digest is None or manifests.sha256_file(file) != digest:
                raise InputError(f"{file} is not the file that the run wrote (sha256 differs); copy it again.")
        return cls(
            probe=manifest["probe"],
            frame=tables.to_pandas(tables.read(path / "table.parquet", tables.FRAME_COLUMNS)),
            pairs=tables.to_pandas(tables.read(path / "pairs.parquet", tables.PAIR_COLUMNS)),
            manifest=manifest,
            _summary=Summary.from_dict(read_json(about := path / "summary.json", "summary", of=dict), str(about)),
        )

    def __rich__(self) -> RenderableType:
        return self._summary.__rich__()

    def __str__(self) -> str:
        return render(self)

    def __repr__(self) -> str:
        return f"Result(probe={self.probe!r}, {len(self.frame)} rows, {len(self.pairs)} pairs, plots={self.plots()})"

    def _repr_html_(self) -> str:
        from kvnotes_interp.results.html import result_html

        return result_html(self)


def write_folder(result: Result, path: Path, *, figures: bool, static: Sequence[str]) -> dict[str, Any]:
    """Write every file of a finished run, the manifest last; returns that manifest."""
    from kvnotes_interp.plots import export

    tables.write(tables.to_arrow(result.frame, tables.FRAME_COLUMNS), path / "table.parquet")
    tables.write(tables.to_arrow(result.pairs, tables.PAIR_COLUMNS), path / "pairs.parquet")
    manifests.write_json(path / "summary.json", result.summary().to_dict())
    skipped: dict[str, str] = {}
    if figures:
        drawn = {kind: result.plot(kind) for kind in result.plots()}
        written = export.write_all(drawn, path / "figures", static=static)
        skipped = dict(written.skipped)
    manifest = {
        **result.manifest,
        "schema": manifests.SCHEMA,
        "probe": result.probe,
        "status": "complete",
        "files": {name: manifests.sha256_file(path / name) for name in _FILES},
    }
    if skipped:
        manifest["figures_skipped"] = skipped
    manifests.write_json(path / "manifest.json", manifest)
    return manifest
