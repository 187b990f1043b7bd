"""`kvprobe`: the same calls as in Python, from a terminal. Options have the same names as Python's keyword arguments.

Exit codes: 0 fine, 1 a control failed, 2 wrong use. Heavy imports stay inside functions so that --help is quick.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvnotes_interp import cli_options as opt
from kvnotes_interp.errors import InputError, KVNotesError

if TYPE_CHECKING:
    from kvnotes_interp.results import Result

app = typer.Typer(
    name="kvprobe",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
)


def _version(wanted: bool) -> None:
    if wanted:
        from kvnotes_interp import __version__

        print(f"kvnotes_interp {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Where does a transformer keep its conclusions: does it read the fact again, or the note it took?"""


@app.command()
def patch(
    model: opt.ModelName = "smollm2-135m",
    task: opt.TaskName = "pronoun",
    n: opt.Count = 32,
    seed: opt.Seed = 0,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    revision: opt.Revision = None,
    out: opt.Out = None,
    resume: opt.Resume = False,
    as_json: opt.AsJson = False,
    dry_run: opt.DryRun = False,
    split: opt.Split = None,
    task_option: opt.TaskOption = None,
    parts: opt.Parts = "kv,k,v",
    views: opt.Views = "all",
    draws: opt.Draws = 8,
    map_pairs: opt.MapPairs = 8,
    min_gap: opt.MinGap = 0.25,
    min_gap_noise: opt.MinGapNoise = 50.0,
    memory_budget: opt.Budget = None,
    path: opt.SweepPath = "auto",
    quiet: opt.Quiet = False,
) -> None:
    """Local patching: field against everything after it, by position, layer and region."""
    given = SimpleNamespace(**locals())
    options = {
        "parts": opt.words("--parts", parts, opt.PARTS),
        "views": opt.words("--views", views, opt.VIEWS),
        "draws": draws,
        "map_pairs": map_pairs,
    }
    _probe("local_patching", options, given)


@app.command()
def suffix(
    model: opt.ModelName = "smollm2-135m",
    task: opt.TaskName = "pronoun",
    n: opt.Count = 32,
    seed: opt.Seed = 0,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    revision: opt.Revision = None,
    out: opt.Out = None,
    resume: opt.Resume = False,
    as_json: opt.AsJson = False,
    dry_run: opt.DryRun = False,
    split: opt.Split = None,
    task_option: opt.TaskOption = None,
    draws: opt.Draws = 5,
    min_gap: opt.MinGap = 0.25,
    min_gap_noise: opt.MinGapNoise = 50.0,
    memory_budget: opt.Budget = None,
    path: opt.SweepPath = "auto",
    quiet: opt.Quiet = False,
) -> None:
    """Suffix concentration: how few positions after the field carry the decision."""
    _probe("suffix_concentration", {"draws": draws}, SimpleNamespace(**locals()))


@app.command()
def run(
    card: Annotated[Path, typer.Argument(help="A probe card, such as probes/locality.yaml.")],
    model: opt.ModelName = "smollm2-135m",
    n: opt.CardCount = None,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    revision: opt.Revision = None,
    out: opt.Out = None,
    resume: opt.Resume = False,
    as_json: opt.AsJson = False,
    quiet: opt.Quiet = False,
) -> None:
    """Run a probe card: one claim of a paper, with the outcome it expects.

    A claim that does not hold is a result, not an error.
    """
    from kvnotes_interp import cards

    _check_run(model, revision, out, resume, marker="verdict.json")
    chosen = cards.read(card)
    from kvnotes_interp.model import load

    with _stoppable(out):
        verdict = cards.run(
            chosen,
            load(model, device=device, dtype=dtype, revision=revision),
            n=n,
            out=out,
            resume=resume,
            progress=not (quiet or as_json),
        )
    _emit(verdict, as_json)


@app.command()
def check(
    model: opt.ModelName = "smollm2-135m",
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    revision: opt.Revision = None,
    as_json: opt.AsJson = False,
) -> None:
    """Prove on a model that its cache can be forked, moved and patched."""
    _check_run(model, revision)
    from kvnotes_interp.model import load

    report = load(model, device=device, dtype=dtype, revision=revision, check=False).check()
    _emit(report, as_json)
    if not report.passed:
        raise typer.Exit(1)


@app.command()
def models(as_json: opt.AsJson = False) -> None:
    """List model aliases, what they stand for, and how large they are."""
    from kvnotes_interp import registry

    rows = [
        {
            "alias": alias.name,
            "repo": alias.repo,
            "revision": alias.revision or "",
            "gated": alias.gated,
            "layers": alias.shape.n_layers,
            "parameters": alias.shape.n_params,
            "kv_bytes_per_token_bf16": alias.shape.kv_bytes(1, bytes_per_number=2),
        }
        for alias in registry.ALIASES.values()
    ]
    if as_json:
        _print_json(rows)
        return
    table = [
        (
            row["alias"] + ("*" if row["gated"] else ""),
            row["repo"],
            f"{row['parameters'] / 1e9:.1f} B" if row["parameters"] > 9.5e8 else f"{row['parameters'] / 1e6:.0f} M",
            str(row["layers"]),
            f"{row['kv_bytes_per_token_bf16'] / 1024:g} KiB",
        )
        for row in rows
    ]
    _print_table(
        ("alias", "hub id", "params", "layers", "KV/token"),
        table,
        f"Default: {registry.DEFAULT}. KV/token in bf16. * gated: needs a hub account that accepted the licence. "
        "Any other hub id, folder or .gguf file works too.",
    )


@app.command()
def tasks(
    name: Annotated[str | None, typer.Argument(help="A family: shows an example pair of it.")] = None,
    seed: opt.Seed = 0,
    as_json: opt.AsJson = False,
) -> None:
    """List task families, or show one pair of a family."""
    from kvnotes_interp import tasks as library

    if name is None:
        infos = library.families()
        if as_json:
            _print_json({key: {"kind": f.kind, "about": f.about, "source": f.source} for key, f in infos.items()})
        else:
            _print_table(("family", "kind", "about"), [(key, f.kind, f.about) for key, f in infos.items()])
        return
    pair, info = library.load(name, n=1, seed=seed)[0], library.info(name)
    about = {
        "family": pair.family,
        "kind": pair.kind,
        "about": info.about,
        "source": info.source,
        "options": info.options,
        "instances": info.instances,
        "contents": info.contents,
    }
    answers = {"answer_old": pair.answer_old, "answer_new": pair.answer_new}
    if as_json:
        _print_json({**about, "old": pair.text_old, "new": pair.text_new, **answers, "content": pair.content})
        return
    from rich.markup import escape

    marked = "".join(
        f"[bold reverse]{escape(piece.text)}[/]" if piece.region == "field" else escape(piece.text)
        for piece in library.pair.pieces_of(pair.old)
    )
    rows = [
        *((key, escape(str(value))) for key, value in about.items() if value),
        ("old prompt", marked),
        ("field", escape(f"{pair.field_old} -> {pair.field_new}")),
        ("answer", escape(f"{pair.answer_old!r} -> {pair.answer_new!r}")),
    ]
    _print_table(("", "an example"), rows)


@app.command()
def show(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder written by --out.")],
    figures: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write the figures here (PNG and PDF too where a Chromium is found)."),
    ] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Show the table of a finished run, and write its figures again."""
    from kvnotes_interp.results import Result

    result = Result.load(folder)
    _emit(result.summary(), as_json)
    if figures is not None:
        from kvnotes_interp.plots import export

        written = export.write_all({kind: result.plot(kind) for kind in result.plots()}, figures)
        for path in written:
            _say(f"wrote {path}")
        for name, reason in written.skipped.items():
            _say(f"{name} was not drawn: {reason}")


# --- shared by the probe commands ----------------------------------------------------------------------------------


def _probe(probe: str, options: dict[str, Any], given: SimpleNamespace) -> None:
    """Run `probe` with its own options, and with those that all probe commands share, by their Python names."""
    _check_run(given.model, given.revision, given.out, given.resume)
    opt.choice("--path", given.path, ("auto", "shared", "plain"))
    from kvnotes_interp import tasks as library

    chosen = opt.task_options(given.task_option)
    pairs = library.load(given.task, n=given.n, seed=given.seed, split=given.split, **chosen)
    where = {"device": given.device, "dtype": given.dtype, "revision": given.revision}
    if given.dry_run:
        from kvnotes_interp import dryrun

        _emit(dryrun.plan(probe, options, given.model, pairs, seed=given.seed, **where), given.as_json)
        return
    from kvnotes_interp import probes
    from kvnotes_interp.model import load

    loaded = load(given.model, **where)
    if not given.as_json:
        _say(f"{loaded.name} ({loaded.source.kind}) on {loaded.device} in {str(loaded.dtype).removeprefix('torch.')}")
    with _stoppable(given.out):
        result: Result = getattr(probes, probe)(
            loaded,
            pairs,
            **options,
            seed=given.seed,
            min_gap=given.min_gap,
            min_gap_noise=given.min_gap_noise,
            out=given.out,
            resume=given.resume,
            memory_budget=None if given.memory_budget is None else int(given.memory_budget * 2**30),
            path=given.path,
            progress=not (given.quiet or given.as_json),
        )
    _emit(result.summary(), given.as_json)
    if not result.summary().counts["n_competent"]:
        _say(
            f"No pair of {given.task} was competent: {loaded.name} does not change its answer, so nothing was measured."
        )
    if given.out is None:
        _say("Nothing was saved: add --out runs/NAME to keep the table, the manifest and the figures.")
    else:
        kinds = result.plots()
        _say(
            f"Saved in {given.out}"
            + (f"; open {given.out / 'figures' / kinds[0]}.html in a browser." if kinds else ".")
        )


def _check_run(
    model: str, revision: str | None, out: Path | None = None, resume: bool = False, *, marker: str = "manifest.json"
) -> None:
    """Refuse what can be refused before torch is imported: a wrong model name, a folder that is taken."""
    from kvnotes_interp import registry

    registry.resolve(model, revision)
    if resume and out is None:
        raise InputError("--resume needs --out, the folder of the run to go on with.")
    if out is not None and not resume and (out / marker).exists():
        raise InputError(f"{out} already holds a run. Pass --resume to take it up, or choose another folder.")


@contextmanager
def _stoppable(out: Path | None) -> Iterator[None]:
    """Ctrl-C says what is kept."""
    try:
        yield
    except KeyboardInterrupt:
        _say(f"Stopped. Finished pairs are in {out}: add --resume to go on." if out else "Stopped; nothing was saved.")
        raise typer.Exit(130) from None


# --- printing ------------------------------------------------------------------------------------------------------


def _emit(thing: Any, as_json: bool) -> None:
    if as_json:
        _print_json(thing.to_dict())
    else:
        from rich.console import Console

        Console().print(thing)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def _print_table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]], note: str = "") -> None:
    """A table that fits 80 columns; cells may hold rich markup."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, show_edge=False)
    for name in header:
        table.add_column(name, overflow="fold", justify="right" if name in ("params", "layers", "KV/token") else "left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    if note:
        Console().print(note, markup=False, highlight=False, style="dim")


def _say(text: str) -> None:
    from rich.console import Console

    # Into a file or a pipe a message goes as one line, so that it can be searched.
    Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=not sys.stderr.isatty())


def main() -> None:
    """Entry point: errors raised on purpose become one message on standard error and an exit code."""
    try:
        app()
    except KVNotesError as error:
        _say(f"error: {error}")
        sys.exit(error.exit_code)
    except OSError as error:  # a folder that cannot be written, a full disk
        _say(f"error: {error}")
        sys.exit(2)


if __name__ == "__main__":
    main()
