"""The distillation loop: any `Method` is trained so that the frozen model answers from its caches as from the context.

Loss: KL to the teacher on the tokens of the teacher's own greedy answer, summed over the answer, mean over questions
(SemPIC, arXiv 2607.28069; KV Packet, arXiv 2604.13226; Still, arXiv 2606.07878 use the same).

The model is never changed: only `method.parameters()` get gradients. A run may be killed at any moment and taken up
with `resume=True`: parameters, AdamW, order and random generators go on from the last checkpoint, metrics.jsonl is cut
back to it, and the losses are those of a run that was never stopped (bit by bit on the same machine and thread count).

What a low KL does not prove: that the caches are near those of full recompute. Measure that with `probes`.
"""

from __future__ import annotations

import hashlib
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

from kvnotes_interp import fingerprint
from kvnotes_interp.errors import InputError, KVNotesError
from kvnotes_interp.files import entry
from kvnotes_interp.probes.request import request_of
from kvnotes_interp.results import manifest as manifests
from kvnotes_interp.results.run import Run
from kvnotes_interp.tasks.documents.question import Question
from kvnotes_interp.training import checkpoint
from kvnotes_interp.training.examples import Example, examples_of, stretch
from kvnotes_interp.training.live import Show, live
from kvnotes_interp.training.log import MetricsLog
from kvnotes_interp.training.loss import kl_to_teacher
from kvnotes_interp.training.method import Method
from kvnotes_interp.training.settings import Settings
from kvnotes_interp.training.teacher import Target, teach
from kvnotes_interp.training.trained import METRICS, Trained, draw
from kvnotes_interp.training.validate import student_logits, validate

if TYPE_CHECKING:
    from kvnotes_interp.model import Model

CHECKPOINTS = "checkpoints"


def distill(
    method: Method,
    model: Model,
    train_questions: Sequence[Question],
    validation_questions: Sequence[Question],
    *,
    out: str | Path,
    settings: Settings | None = None,
    teacher: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
) -> Trained:
    """Train `method` on the first questions and watch it on the second; see the module for the loss.

    Args:
        out: run folder: manifest.json (first), metrics.jsonl, checkpoints, `best` and `last` (as the method saves
            them), figures. settings: defaults are SemPIC's.
        teacher: folder where the teacher's targets are kept; give several runs the same one to compute them once.
        resume: take up the run in `out`, which must have asked for the same; where there is none, start one.

    The method holds the last parameters afterwards (a run found complete is only read), and those it came with when
    the run was stopped by an error or Ctrl-C, so that the same call with `resume=True` goes on.

    Raises:
        InputError: questions that do not fit (see `examples_of`), a taken folder, a request that differs from the one
            to resume (each key is named), autocast without CUDA.
        KVNotesError: a loss that is not finite.
    """
    settings = settings or Settings()
    if settings.autocast and model.device.type != "cuda":
        raise InputError(f"autocast={settings.autocast!r} needs CUDA; {model.name} is on {model.device}. Leave it out.")
    if not method.parameters():
        raise InputError(f"method {method.name!r} has no parameters to train.")
    train, validation = examples_of(model, train_questions), examples_of(model, validation_questions)
    initial = {name: parameter.detach().clone() for name, parameter in method.parameters().items()}
    request = {
        **request_of("train", model, [*train_questions, *validation_questions], {}),
        "method": {"name": method.name, **method.describe(), "initial_sha256": _sha256(initial)},
        "settings": settings.model_dump(),
        "train": _about(train_questions, train),
        "validation": _about(validation_questions, validation),
    }
    folder = Path(out)
    devices = [model.device] if model.device.type == "cuda" else []
    with Run.open(folder, request=request, extra={"machine": _machine(model)}, resume=resume) as run:
        if run.complete:
            shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)  # killed between the manifest and the tidying up
            return Trained.load(folder)
        kept = Path(teacher) if teacher is not None else folder / "teacher"
        targets = [
            teach(
                model,
                examples,
                folder=kept,
                max_new_tokens=settings.max_new_tokens,
                top=settings.top,
                tau=settings.tau,
                progress=progress,
            )
            for examples in (train, validation)
        ]
        data = (train, validation, targets[0], targets[1])
        loop = _Loop(method, model, settings, folder, request, *data)
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(settings.seed)
            try:
                trained = loop.run(progress)
            except BaseException as error:
                method.load_state(initial)
                if isinstance(error, KeyboardInterrupt) and progress:
                    _say_how_to_go_on(folder)
                raise
        draw(folder, method.name, model.name)
        finished = {"status": "complete", "finished": manifests.utc_now(), "trained": trained}
        run.manifest = manifests.merged(run.manifest, finished)
        manifests.write_json(folder / "manifest.json", run.manifest)
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    return Trained.load(folder)


@dataclass
class _Loop:
    """The state of a run between two steps."""

    method: Method
    model: Model
    settings: Settings
    folder: Path
    request: Mapping[str, Any]
    train: Sequence[Example]
    validation: Sequence[Example]
    train_targets: Sequence[Target]
    validation_targets: Sequence[Target]
    step: int = 0
    best: dict[str, Any] = field(default_factory=lambda: {"step": 0, "kl": math.inf})
    worse: int = 0  # validations since the best one

    def run(self, progress: bool) -> dict[str, Any]:
        """Go on from the last checkpoint to the end; returns what the manifest keeps."""
        settings, n = self.settings, len(self.train)
        total, interval = settings.total_steps(n), settings.validation_interval(n)
        parameters = self.method.parameters()
        # The learning rate is set anew at every step.
        optimizer = AdamW(parameters.values(), lr=settings.lr, weight_decay=settings.weight_decay)
        found = checkpoint.latest(self.folder / CHECKPOINTS)
        if found is not None:
            values, state = checkpoint.restore(found, parameters, optimizer)
            self.method.load_state(values)
            where = f'checkpoint "{found}"'
            self.step, self.worse = (entry(state, name, int, where) for name in ("step", "worse"))
            self.best = entry(state, "best", dict, where)
            for name, kind in (("step", int), ("kl", (float, int))):
                entry(self.best, name, kind, f"{where}, best")
            self._save_if_best()
        log = MetricsLog(self.folder / METRICS, step=self.step if found is not None else -1)
        cuda = self.model.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats(self.model.device)
        try:
            if found is None:
                self._validate(log)
                self._checkpoint(log, optimizer)
            with live(total=total, done=self.step, description=self.method.name, enabled=progress) as show:
                while self.step < total and not self._out_of_patience():
                    self._train_step(log, optimizer, total, show)
                    validated = self.step % interval == 0 or self.step == total
                    if validated:
                        self._validate(log)
                    if validated or self.step % settings.checkpoint_every == 0:
                        self._checkpoint(log, optimizer)
        finally:
            log.close()
        self._save("last", self.step)
        return {"steps": self.step, "best_step": self.best["step"], "stopped_early": self.step < total}

    def _out_of_patience(self) -> bool:
        return self.settings.patience is not None and self.worse >= self.settings.patience

    def _train_step(self, log: MetricsLog, optimizer: AdamW, total: int, show: Show) -> None:
        start = time.perf_counter()
        settings, size = self.settings, self.settings.batch * self.settings.accumulate
        lr = settings.lr * (1 - self.step / total)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad(set_to_none=True)
        places = stretch(len(self.train), settings.seed, self.step * size, size)
        loss, beside, tokens = 0.0, 0.0, 0
        for at in range(0, size, settings.batch):
            part = [self.train[place] for place in places[at : at + settings.batch]]
            targets = [self.train_targets[place] for place in places[at : at + settings.batch]]
            with torch.autocast(self.model.device.type, torch.bfloat16, enabled=settings.autocast == "bf16"):
                logits = student_logits(self.model, self.method.caches(part), part, targets)
            share = kl_to_teacher(targets, logits, tau=settings.tau).sum() / size
            own = getattr(self.method, "own_loss", None)
            (share if own is None else share + own / size).backward()
            beside += 0.0 if own is None else float(own.detach()) / size
            loss += float(share.detach())
            tokens += sum(len(e.blocks) + len(t.answer) - 1 for e, t in zip(part, targets, strict=True))
        norm = float(clip_grad_norm_(self.method.parameters().values(), settings.clip))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise KVNotesError(
                f"step {self.step + 1}: the loss is {loss} and the gradient's norm {norm}, so nothing can be learned "
                f"from here on. Lower lr ({settings.lr}), or train in float32."
            )
        optimizer.step()
        seconds, peak = time.perf_counter() - start, _peak_memory(self.model)
        self.step += 1
        log.append(
            {
                "kind": "train",
                "step": self.step,
                "epoch": (self.step - 1) * size // len(self.train),
                "loss": loss,
                **({"own_loss": beside} if hasattr(self.method, "own_loss") else {}),
                "lr": lr,
                "grad_norm": norm,
                "tokens_per_s": tokens / seconds,
                "seconds": seconds,
                "peak_memory": peak,
            }
        )
        memory = "" if peak is None else f", {peak / 2**30:.2f} GiB"
        show(self.step, f"loss {loss:.4f}, {tokens / seconds:,.0f} tokens/s{memory}")

    def _validate(self, log: MetricsLog) -> None:
        start = time.perf_counter()
        found = validate(
            self.method,
            self.model,
            self.validation,
            self.validation_targets,
            tau=self.settings.tau,
            batch=self.settings.batch,
            max_new_tokens=self.settings.max_new_tokens,
        )
        if not math.isfinite(found["kl"]):
            raise KVNotesError(f"step {self.step}: the validation KL is {found['kl']}; lower lr ({self.settings.lr}).")
        seconds = time.perf_counter() - start
        log.append({"kind": "validation", "step": self.step, **found, "n": len(self.validation), "seconds": seconds})
        better = found["kl"] < self.best["kl"]
        self.best, self.worse = ({"step": self.step, **found}, 0) if better else (self.best, self.worse + 1)

    def _checkpoint(self, log: MetricsLog, optimizer: AdamW) -> None:
        log.sync()
        state = {"best": self.best, "worse": self.worse}
        checkpoint.save(self.folder / CHECKPOINTS, self.step, self.method.parameters(), optimizer, state)
        # After the checkpoint: a run killed in between saves it on resume, so `best` is never of a step undone.
        self._save_if_best()

    def _save_if_best(self) -> None:
        if self.best["step"] == self.step:
            self._save("best", self.step)

    def _save(self, name: str, step: int) -> None:
        """Write the method's parameters as `name`; the folder of this name is replaced when the new one is whole."""
        part = self.folder / f"{name}.part"
        shutil.rmtree(part, ignore_errors=True)
        self.method.save(part, training={"step": step, **{k: self.request[k] for k in ("settings", "train")}})
        shutil.rmtree(self.folder / name, ignore_errors=True)
        part.rename(self.folder / name)


def _about(questions: Sequence[Question], examples: Sequence[Example]) -> dict[str, Any]:
    whole = fingerprint.of([list(questions), list(examples)])
    return {"n": len(questions), "tasks": sorted({q.family for q in questions}), "questions_and_token_ids": whole}


def _sha256(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}".encode())
        digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _machine(model: Model) -> dict[str, str]:
    name = f" ({torch.cuda.get_device_name(model.device)})" if model.device.type == "cuda" else ""
    return {"device": f"{model.device}{name}", "dtype": str(model.dtype).removeprefix("torch.")}


def _peak_memory(model: Model) -> int | None:
    """Bytes: the allocator's peak on CUDA, else the process's largest resident size, where the system tells it."""
    if model.device.type == "cuda":
        return torch.cuda.max_memory_allocated(model.device)
    try:
        import resource
        import sys
    except ImportError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _say_how_to_go_on(folder: Path) -> None:
    from rich.console import Console

    found = checkpoint.latest(folder / CHECKPOINTS)
    where = f"the checkpoint of step {int(found.name.removeprefix('step-'))}" if found is not None else "the beginning"
    Console(stderr=True).print(
        f"Stopped. {folder} goes on from {where} with resume=True (--resume).", highlight=False, markup=False
    )
