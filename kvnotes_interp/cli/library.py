"""Commands about models, tasks, cards and finished runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvnotes_interp.cli import options as opt
from kvnotes_interp.cli.app import app
from kvnotes_interp.cli.printing import emit, print_json, print_table, say, stoppable
from kvnotes_interp.cli.probes import check_run

if TYPE_CHECKING:
    from kvnotes_interp.tasks.documents import Question


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

    check_run(model, revision, out, resume, marker="verdict.json")
    chosen = cards.read(card)
    from kvnotes_interp.model import load

    with stoppable(out):
        verdict = cards.run(
            chosen,
            load(model, device=device, dtype=dtype, revision=revision),
            n=n,
            out=out,
            resume=resume,
            progress=not (quiet or as_json),
        )
    emit(verdict, as_json)


@app.command()
def check(
    model: opt.ModelName = "smollm2-135m",
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    revision: opt.Revision = None,
    as_json: opt.AsJson = False,
) -> None:
    """Prove on a model that its cache can be forked, moved and patched."""
    check_run(model, revision)
    from kvnotes_interp.model import load

    report = load(model, device=device, dtype=dtype, revision=revision, check=False).check()
    emit(report, as_json)
    if not report.passed:
        raise typer.Exit(1)


@app.command()
def calibrate(
    n: Annotated[int, typer.Option("--n", metavar="N", min=4, help="Pairs per organism.")] = 12,
    seed: opt.Seed = 0,
    device: opt.Device = None,
    as_json: opt.AsJson = False,
    quiet: opt.Quiet = False,
) -> None:
    """Run every probe on models whose answer is known: expected against measured."""
    from kvnotes_interp.calibrate import calibrate as run_all

    found = run_all(n=n, seed=seed, device=device, progress=not (quiet or as_json))
    emit(found, as_json)
    if not found.passed:
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
        print_json(rows)
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
    print_table(
        ("alias", "hub id", "params", "layers", "KV/token"),
        table,
        f"Default: {registry.DEFAULT}. KV/token in bf16. * gated: needs a hub account that accepted the licence. "
        "Any other hub id, folder or .gguf file works too.",
    )


@app.command()
def tasks(
    name: Annotated[str | None, typer.Argument(help="A family or document task: shows an example.")] = None,
    seed: opt.Seed = 0,
    as_json: opt.AsJson = False,
) -> None:
    """List task families and document tasks, or show an example of one."""
    from kvnotes_interp import tasks as library
    from kvnotes_interp.tasks import documents as questions

    if name is None:
        listed = {key: {"kind": f.kind, "about": f.about, "source": f.source} for key, f in library.families().items()}
        listed |= {key: {"kind": "question", "about": questions.about(key)} for key in questions.names()}
        if as_json:
            print_json(listed)
        else:
            print_table(("task", "kind", "about"), [(key, one["kind"], one["about"]) for key, one in listed.items()])
        return
    pair = library.load_items(name, n=1, seed=seed)[0]
    if isinstance(pair, questions.Question):
        _show_question(pair, as_json)
        return
    info = library.info(name)
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
        print_json({**about, "old": pair.text_old, "new": pair.text_new, **answers, "content": pair.content})
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
    print_table(("", "an example"), rows)


def _show_question(question: Question, as_json: bool) -> None:
    """One question: what was drawn, the prompt and its answer."""
    from kvnotes_interp.tasks import documents as questions

    about = {
        "task": question.family,
        "kind": "question",
        "about": questions.about(question.family),
        "options": questions.options(question.family),
    }
    drawn = {"content": question.content, "details": dict(question.details), "gold": list(question.gold)}
    if as_json:
        texts = {"prefix": question.prefix, "documents": question.documents, "suffix": question.suffix}
        answers = {"answer": question.answer, "distractors": question.distractors}
        print_json({**about, **texts, **answers, **drawn})
        return
    from rich.markup import escape

    rows = [
        *((key, escape(str(value))) for key, value in {**about, **drawn}.items()),
        ("prompt", escape(question.text)),
        ("answer", escape(repr(question.answer))),
        ("distractors", escape(", ".join(map(repr, question.distractors)))),
    ]
    print_table(("", "an example"), rows)


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
    from kvnotes_interp.results import manifest as manifests

    if manifests.read(folder)["probe"] == "train":
        from kvnotes_interp.training import Trained

        emit(Trained.load(folder), as_json)
        return
    result = Result.load(folder)
    emit(result.summary(), as_json)
    if figures is not None:
        from kvnotes_interp.plots import export

        written = export.write_all({kind: result.plot(kind) for kind in result.plots()}, figures)
        for path in written:
            say(f"wrote {path}")
        for name, reason in written.skipped.items():
            say(f"{name} was not drawn: {reason}")
