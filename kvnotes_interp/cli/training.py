"""`kvprobe train`: a Writer or a compactor is trained by distillation. What a KIND is made of is in `methods`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvnotes_interp.cli import options as opt
from kvnotes_interp.cli.app import app
from kvnotes_interp.cli.methods import BACKWARD, INITS, OUTPUTS, WRITERS, checked, method_of, parts_of
from kvnotes_interp.cli.printing import emit, say
from kvnotes_interp.cli.probes import check_run
from kvnotes_interp.errors import InputError

TARGETS = ",".join(opt.TARGETS)

# Panels of --help.
_QUESTIONS, _WRITER, _COMPACTOR, _TRAINING, _RUN = "Questions", "Writer", "Compactor", "Training", "Run"
_STILL, _SCORER = "Still", "Scorer"


def _option(panel: str, text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


def _number(panel: str, text: str, least: float = 1) -> Any:
    return _option(panel, text, metavar="N" if least else "X", min=least)


def _word(panel: str, text: str, choices: tuple[str, ...]) -> Any:
    return _option(panel, f"{text}: {', '.join(choices)}.", metavar="NAME")


@app.command()
def train(
    kind: Annotated[
        str, typer.Argument(metavar="KIND", help="sempic (LoRA), packet (header and trailer), joint; still, scorer.")
    ],
    model: opt.ModelName = "smollm2-135m",
    task: Annotated[str, _option(_QUESTIONS, "Document tasks, in equal parts.", metavar="LIST")] = "biography",
    docs: Annotated[
        str, _option(_QUESTIONS, "Numbers of documents, in equal parts; '' is the task's own.", metavar="LIST")
    ] = "2,3,5,7",
    samples: Annotated[int, _number(_QUESTIONS, "Training questions.")] = 1024,
    validation: Annotated[int, _number(_QUESTIONS, "Validation questions, about other contents.")] = 64,
    task_option: Annotated[
        list[str] | None,
        _option(_QUESTIONS, "Of all tasks, or of one: facts=3, biography.facts=3. Repeatable.", metavar="NAME=VALUE"),
    ] = None,
    rank: Annotated[int, _number(_WRITER, "Of the LoRA.")] = 8,
    alpha: Annotated[float, _option(_WRITER, "Of the LoRA.", metavar="X")] = 16.0,
    targets: Annotated[str, _option(_WRITER, "Projections with a LoRA.", metavar="LIST")] = TARGETS,
    wrapper_tokens: Annotated[int, _number(_WRITER, "Vectors in the header, and in the trailer.")] = 8,
    checkpointing: Annotated[
        bool, _option(_WRITER, "Recompute activations in backward: less memory, more time.", "--checkpointing")
    ] = False,
    ratios: Annotated[str, _option(_COMPACTOR, "Lowest and highest of tokens to slots.", metavar="LIST")] = "4,16",
    horizon: Annotated[int, _number(_STILL, "Most compactions of one context, a power of 2.")] = 1,
    backward: Annotated[str, _word(_STILL, "Through the last compaction, or all", BACKWARD)] = "truncated",
    consistency: Annotated[
        float, _number(_STILL, "Weight of the distance of several compactions to one, with a horizon.", 0)
    ] = 0.0,
    blocks: Annotated[int, _number(_STILL, "Of the Perceiver.")] = 2,
    feed_forward: Annotated[bool, _option(_STILL, "A network behind every block.", "--feed-forward")] = False,
    bias: Annotated[bool, _option(_STILL, "A key bias for every slot.", "--bias")] = False,
    outputs: Annotated[str, _word(_STILL, "Positions of the slots", OUTPUTS)] = "spread",
    init: Annotated[str, _word(_STILL, "Copies at first, or all at random", INITS)] = "identity",
    final_norm: Annotated[bool, _option(_STILL, "A norm behind the last block.", "--final-norm")] = False,
    hidden: Annotated[int, _number(_SCORER, "Width of the hidden layer.")] = 64,
    update_rank: Annotated[int, _option(_SCORER, "Of the update of kept slots; 0: copies.", metavar="N", min=0)] = 0,
    temperature: Annotated[float, _option(_SCORER, "Of the gate in training.", metavar="X")] = 1.0,
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
    seed: Annotated[int, _option(_TRAINING, "Of questions, parameters and order.", metavar="N")] = 0,
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
    own = checked(kind, locals())
    check_run(model, revision, out, resume)
    if out is None:
        raise InputError("training needs --out, the folder for what is learned, its metrics and its checkpoints.")
    parts = parts_of(task, docs, task_option)
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
        autocast=autocast,  # type: ignore[arg-type]
        max_new_tokens=max_new_tokens,
        top=top or None,
    )
    questions = training.draw_parts(parts, samples=samples, validation=validation, seed=seed)
    loaded = load(model, device=device, dtype=dtype, revision=revision)
    method = method_of(kind, loaded, seed=seed, **own)
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
    what = "Writer" if kind in WRITERS else "compactor"
    say(f"Saved in {out}: the {what} is {out / 'best'}, the figure {out / 'figures' / 'training.html'}.")
