"""`kvprobe train`: a Writer or a compactor is trained by distillation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvnotes_interp.cli import options as opt
from kvnotes_interp.cli.app import app
from kvnotes_interp.cli.printing import emit, say
from kvnotes_interp.cli.probes import check_run
from kvnotes_interp.errors import InputError

# As in operators/writer.py, which cannot be asked without importing torch; a test holds them together.
WRITERS = ("sempic", "packet", "joint")
KINDS = (*WRITERS, "still")
TARGETS = "q_proj,k_proj,v_proj,o_proj"

_QUESTIONS, _WRITER, _STILL, _TRAINING, _RUN = "Questions", "Writer", "Still", "Training", "Run"


def _option(panel: str, text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


def _number(panel: str, text: str, least: float = 1) -> Any:
    return _option(panel, text, metavar="N" if least else "X", min=least)


@app.command()
def train(
    kind: Annotated[
        str, typer.Argument(metavar="KIND", help="sempic (LoRA), packet (header and trailer), joint; still.")
    ],
    model: opt.ModelName = "smollm2-135m",
    task: Annotated[str, _option(_QUESTIONS, "Document task.", metavar="NAME")] = "biography",
    docs: Annotated[
        str, _option(_QUESTIONS, "Numbers of documents, in equal parts; '' is the task's own.", metavar="LIST")
    ] = "2,3,5,7",
    samples: Annotated[int, _number(_QUESTIONS, "Training questions.")] = 1024,
    validation: Annotated[int, _number(_QUESTIONS, "Validation questions, about other contents.")] = 64,
    task_option: Annotated[
        list[str] | None,
        _option(_QUESTIONS, "Option of the task, such as facts=3. Repeatable.", metavar="NAME=VALUE"),
    ] = None,
    rank: Annotated[int, _number(_WRITER, "Of the LoRA.")] = 8,
    alpha: Annotated[float, _option(_WRITER, "Of the LoRA.", metavar="X")] = 16.0,
    targets: Annotated[str, _option(_WRITER, "Projections with a LoRA.", metavar="LIST")] = TARGETS,
    wrapper_tokens: Annotated[int, _number(_WRITER, "Vectors in the header, and in the trailer.")] = 8,
    checkpointing: Annotated[
        bool, _option(_WRITER, "Recompute activations in backward: less memory, more time.", "--checkpointing")
    ] = False,
    ratios: Annotated[str, _option(_STILL, "Lowest and highest ratio of tokens to slots.", metavar="LIST")] = "4,16",
    horizon: Annotated[int, _number(_STILL, "Most compactions of one context, a power of 2.")] = 1,
    epochs: Annotated[int, _number(_TRAINING, "Passes over the questions.")] = 5,
    steps: Annotated[int | None, _number(_TRAINING, "Optimizer steps, in place of epochs.")] = None,
    batch: Annotated[int, _number(_TRAINING, "Questions per forward pass.")] = 16,
    accumulate: Annotated[int, _number(_TRAINING, "Forward passes per step.")] = 1,
    lr: Annotated[float, _option(_TRAINING, "Of the first step; it falls to 0.", metavar="X")] = 5e-4,
    weight_decay: Annotated[float, _number(_TRAINING, "Of AdamW.", 0)] = 0.0,
    clip: Annotated[float, _option(_TRAINING, "Largest norm of the gradient.", metavar="X")] = 1.0,
    tau: Annotated[float, _option(_TRAINING, "Temperature of the distillation.", metavar="X")] = 1.0,
    top: Annotated[int, _option(_TRAINING, "Tokens kept of the teacher; 0 keeps all.", metavar="N", min=0)] = 256,
    max_new_tokens: Annotated[int, _number(_TRAINING, "Longest answer.")] = 64,
    validate_every: Annotated[int | None, _number(_TRAINING, "Steps; by default a tenth of the run.")] = None,
    patience: Annotated[int | None, _number(_TRAINING, "Stop after so many validations without progress.")] = None,
    checkpoint_every: Annotated[int, _number(_TRAINING, "Steps; every validation writes one, too.")] = 50,
    autocast: Annotated[str | None, _option(_TRAINING, "bf16, on CUDA.", metavar="NAME")] = None,
    seed: Annotated[int, _option(_TRAINING, "Of questions, Writer and order.", metavar="N")] = 0,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    revision: opt.Revision = None,
    out: Annotated[
        Path | None, _option(_RUN, "Run folder: best, last, metrics.jsonl, checkpoints, figure.", metavar="DIR")
    ] = None,
    teacher: Annotated[
        Path | None, _option(_RUN, "Where the teacher's targets are kept; runs can share it.", metavar="DIR")
    ] = None,
    resume: opt.Resume = False,
    quiet: opt.Quiet = False,
    as_json: opt.AsJson = False,
) -> None:
    """Train a Writer or a compactor: what it makes is read like the full context. Needs --out."""
    opt.choice("KIND", kind, KINDS)
    check_run(model, revision, out, resume)
    if out is None:
        raise InputError("training needs --out, the folder for what is learned, its metrics and its checkpoints.")
    from kvnotes_interp import tasks

    known = (*tasks.documents.names(), *tasks.documents.names_from_files())
    if task not in known:
        raise InputError(f'--task "{task}": training needs a document task; use {", ".join(known)}.')
    chosen, numbers = opt.task_options(task_option), opt.numbers("--docs", docs, int) or None
    from kvnotes_interp import training
    from kvnotes_interp.model import load

    settings = training.Settings(
        epochs=epochs,
        steps=steps,
        batch=batch,
        accumulate=accumulate,
        lr=lr,
        weight_decay=weight_decay,
        clip=clip,
        tau=tau,
        seed=seed,
        validate_every=validate_every,
        patience=patience,
        checkpoint_every=checkpoint_every,
        autocast=autocast,
        max_new_tokens=max_new_tokens,
        top=top or None,
    )
    questions = training.draw(task, samples=samples, validation=validation, docs=numbers, seed=seed, **chosen)
    loaded = load(model, device=device, dtype=dtype, revision=revision)
    method: training.Method
    if kind == "still":
        from kvnotes_interp.operators.still import StillSettings, new_still
        from kvnotes_interp.training.compacting import Compacting

        limits = opt.numbers("--ratios", ratios, float)
        if len(limits) != 2:
            raise InputError(f"--ratios {ratios!r}: write the lowest and the highest, such as 4,16.")
        still = new_still(loaded, settings=StillSettings(seed=seed))
        method = Compacting(loaded, still, ratios=(limits[0], limits[1]), horizon=horizon)
    else:
        from kvnotes_interp.operators.writer import new_writer

        words = tuple(word.strip() for word in targets.split(","))
        sizes = {"rank": rank, "alpha": alpha, "targets": words, "wrapper_tokens": wrapper_tokens}
        writer = new_writer(loaded, kind, seed=seed, **sizes)  # type: ignore[arg-type]
        method = training.Writing(loaded, writer, checkpointing=checkpointing)
    size = sum(parameter.numel() for parameter in method.parameters().values())
    if not as_json:
        say(f"{kind} with {size:,} parameters on {loaded.name} ({loaded.device}); {samples} questions of {task}")
    try:
        trained = training.distill(
            method,
            loaded,
            *questions,
            settings=settings,
            out=out,
            teacher=teacher,
            resume=resume,
            progress=not (quiet or as_json),
        )
    except KeyboardInterrupt:  # distill has said how to go on
        raise typer.Exit(130) from None
    emit(trained, as_json)
    what = "compactor" if kind == "still" else "Writer"
    say(f"Saved in {out}: the {what} is {out / 'best'}, the figure {out / 'figures' / 'training.html'}.")
