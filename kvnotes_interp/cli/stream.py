"""`kvprobe stream`: a text of any length through a cache of constant size, compacted again and again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvnotes_interp.cli import options as opt
from kvnotes_interp.cli.app import app
from kvnotes_interp.cli.compile import _of_files, _of_task
from kvnotes_interp.cli.printing import print_json, print_table, say, stoppable
from kvnotes_interp.errors import InputError

_SHOWN = 12  # rows of the table, evenly spread over the chunks


@app.command()
def stream(
    files: Annotated[list[Path] | None, typer.Argument(help="Text files, read one after another.")] = None,
    compactor: Annotated[str, typer.Option(metavar="NAME", help="Compactor, NAME@VALUE, or still@DIR.")] = "streaming",
    chunk: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens run between two compactions.")] = 512,
    budget: Annotated[int, typer.Option(metavar="N", min=1, help="Slots kept per KV head and layer.")] = 64,
    model: opt.ModelName = "smollm2-135m",
    task: Annotated[str | None, typer.Option(metavar="NAME", help="In place of files: a task's documents.")] = None,
    n: Annotated[int, typer.Option("--n", metavar="N", min=1, help="Questions whose documents are taken.")] = 16,
    seed: opt.Seed = 0,
    split: opt.Split = None,
    task_option: opt.TaskOption = None,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    revision: opt.Revision = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for the figure and its numbers.")] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Stream a long text and show that the cache stays as large as it is: slots, bytes, peak, seconds per chunk.

    In Python, operators.still.stream(model, compactor, token_ids, chunk=512, budget=64) gives the last cache.
    """
    from kvnotes_interp import registry
    from kvnotes_interp.operators import eviction

    registry.resolve(model, revision)
    if bool(files) == (task is not None):
        raise InputError("give text files, or --task NAME for a task's documents, and not both.")
    chosen = eviction.find(compactor)
    if task is None:
        text = "\n".join(_of_files(files or []).values())
    else:
        text = "\n".join(_of_task(task, n, seed, split, opt.task_options(task_option)))
    from kvnotes_interp.engine.budget import readable
    from kvnotes_interp.model import load
    from kvnotes_interp.probes.compaction.streaming import stream_rows

    loaded = load(model, device=device, dtype=dtype, revision=revision)
    if loaded.tokenizer is None:
        raise InputError(f"{loaded.name} has no tokenizer, so a text cannot be streamed through it.")
    ids = [int(i) for i in loaded.tokenizer(text, verbose=False)["input_ids"]]
    with stoppable(None):
        rows = stream_rows(loaded, chosen, ids, chunk=chunk, budget=budget)
    if as_json:
        print_json(rows)
    else:
        steps = sorted({round(i * (len(rows) - 1) / (_SHOWN - 1)) for i in range(_SHOWN)})
        table = [
            (
                str(row["chunk"]),
                str(row["tokens"]),
                str(row["slots"]),
                *(readable(row[name]) for name in ("bytes", "peak_bytes", "whole_bytes")),
                f"{row['seconds']:.3f}",
            )
            for row in (rows[i] for i in steps)
        ]
        print_table(("chunk", "tokens", "slots", "kept", "peak", "all tokens", "seconds"), table)
    if out is None:
        return
    from kvnotes_interp.plots import export
    from kvnotes_interp.plots.stream import draw

    out.mkdir(parents=True, exist_ok=True)
    fig = draw(
        rows,
        title=f"{chosen.name}: {budget} slots, chunks of {chunk} tokens",
        subtitle=f"{loaded.name}, {len(ids)} tokens. Peak: the cache before it is compacted.",
    )
    export.write(fig, out / "stream")
    say(f"Saved in {out}; open {out / 'stream.html'} in a browser.")
