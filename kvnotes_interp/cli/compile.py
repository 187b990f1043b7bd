"""`kvprobe compile`: documents to caches on disk, by the plain model or by a trained Writer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvnotes_interp.cli import options as opt
from kvnotes_interp.cli.app import app
from kvnotes_interp.cli.printing import print_json, print_table, say, stoppable
from kvnotes_interp.errors import InputError
from kvnotes_interp.files import read_text


@app.command("compile")
def compile_documents(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the caches; what is there is not made again.")],
    files: Annotated[list[Path] | None, typer.Argument(help="Text files, each one document.")] = None,
    adapter: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Writer from kvprobe train; the plain model without it.")
    ] = None,
    model: opt.ModelName = "smollm2-135m",
    task: Annotated[str | None, typer.Option(metavar="NAME", help="In place of files: a task's documents.")] = None,
    n: Annotated[int, typer.Option("--n", metavar="N", min=1, help="Questions whose documents are taken.")] = 16,
    seed: opt.Seed = 0,
    split: opt.Split = None,
    task_option: opt.TaskOption = None,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    revision: opt.Revision = None,
    as_json: opt.AsJson = False,
    quiet: opt.Quiet = False,
) -> None:
    """Compile documents to caches on disk: one safetensors file each, and a JSON file that says whose it is.

    In Python, operators.Skill.load(FILE, model) reads one, and operators.splice_skills(model, prefix, skills, suffix)
    joins some behind a prefix.
    """
    from kvnotes_interp import registry

    registry.resolve(model, revision)
    if bool(files) == (task is not None):
        raise InputError("give text files, or --task NAME for a task's documents, and not both.")
    documents = (
        _of_files(files or []) if task is None else _of_task(task, n, seed, split, opt.task_options(task_option))
    )
    from kvnotes_interp.engine.budget import readable
    from kvnotes_interp.model import load
    from kvnotes_interp.operators import SkillStore, Writer
    from kvnotes_interp.progress import Bar

    loaded = load(model, device=device, dtype=dtype, revision=revision)
    writer = None if adapter is None else Writer.load(adapter, loaded)
    store = SkillStore(out, loaded, writer=writer)
    rows = []
    with stoppable(out), Bar(total=len(documents), description="compiling", enabled=not (quiet or as_json)) as bar:
        for name, text in documents.items():
            skill = store.get(text)
            path = store.path(text)
            line = {"document": name, "tokens": len(skill.token_ids), "slots": len(skill.cache)}
            rows.append({**line, "bytes": path.stat().st_size, "file": str(path)})
            bar.advance()
    if as_json:
        print_json(rows)
        return
    table = [
        (row["document"], str(row["tokens"]), str(row["slots"]), readable(row["bytes"]), Path(row["file"]).name)
        for row in rows
    ]
    print_table(("document", "tokens", "slots", "size", "file"), table)
    by = f"the {writer.kind} Writer in {adapter}" if writer is not None else "the plain model"
    total = readable(sum(row["bytes"] for row in rows))
    say(f"{len(rows)} documents in {out}, {total}, compiled by {by} ({loaded.name}).")


def _of_files(files: list[Path]) -> dict[str, str]:
    """Name -> text. Raises InputError for a file that is not there, is empty, or holds no UTF-8 text."""
    found = {}
    for path in files:
        if not path.is_file():
            raise InputError(f"there is no file {path}.")
        if str(path) in found:
            raise InputError(f"{path} is given twice: name every document once.")
        found[str(path)] = read_text(path, "document")
        if not found[str(path)]:
            raise InputError(f"{path} is empty: a document needs at least one token.")
    return found


def _of_task(task: str, n: int, seed: int, split: str | None, options: dict) -> dict[str, str]:
    """Name -> text of every document of `n` questions; a text that several questions hold is taken once."""
    from kvnotes_interp.tasks import documents

    questions = documents.load(task, n=n, seed=seed, split=split, **options)  # type: ignore[arg-type]
    named: dict[str, str] = {}
    for question in questions:
        for i, text in enumerate(question.documents):
            named.setdefault(text, f"{question.key}[{i}]")
    return {name: text for text, name in named.items()}
