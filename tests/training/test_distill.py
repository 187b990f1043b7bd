"""The loop: what it writes, that it learns, and that a run killed anywhere goes on bit by bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import kvnotes_interp as kv
from kvnotes_interp.errors import InputError, KVNotesError
from kvnotes_interp.model import Model
from kvnotes_interp.training import Settings, Trained, checkpoint, distill, log
from kvnotes_interp.training import distill as distill_function
from tests.training.conftest import Offsets

loop = sys.modules[distill_function.__module__]
SETTINGS = Settings(steps=8, batch=3, lr=0.03, validate_every=4, checkpoint_every=3, max_new_tokens=2, top=40)
TIMES = ("seconds", "tokens_per_s", "peak_memory")


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("teacher")


@pytest.fixture
def go(model: Model, questions: Any, teacher: Path) -> Callable[..., Trained]:
    """`go(out, method=..., settings=..., resume=...)`: distill on the small questions."""

    def call(out: Path, *, method: Any = None, settings: Settings = SETTINGS, **options: Any) -> Trained:
        method = Offsets(model, noise=0.1) if method is None else method
        options = {"progress": False, "teacher": teacher} | options
        return distill(method, model, *questions, settings=settings, out=out, **options)

    return call


def numbers(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what the clock and the machine decide."""
    return [{k: v for k, v in line.items() if k not in TIMES} for line in log.read(folder / "metrics.jsonl")]


def weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return load_file(folder / name / "offsets.safetensors")


@pytest.fixture(scope="module")
def whole(model: Model, questions: Any, teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never stopped."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    options = {"settings": SETTINGS, "teacher": teacher, "progress": False}
    distill(Offsets(model, noise=0.1), model, *questions, out=out, **options)
    return out


def same(a: Path, b: Path) -> None:
    assert numbers(a) == numbers(b)
    for name in ("best", "last"):
        ours, theirs = weights(a, name), weights(b, name)
        assert all(torch.equal(ours[key], theirs[key]) for key in (*ours, *theirs)), name
    assert Trained.load(a).best_step == Trained.load(b).best_step


# --- what it writes ------------------------------------------------------------------------------------------------


def test_what_a_run_leaves(whole: Path, model: Model, questions: Any) -> None:
    names = {str(p.relative_to(whole)) for p in whole.rglob("*") if p.is_file()}
    figures = {f"figures/training.{ending}" for ending in ("html", "json", "csv")}
    kept = {"best/offsets.safetensors", "last/offsets.safetensors", "manifest.json", "metrics.jsonl"}
    assert names == kept | figures
    lines = log.read(whole / "metrics.jsonl")
    train = [line for line in lines if line["kind"] == "train"]
    assert [line["step"] for line in train] == list(range(1, 9))
    assert [line["lr"] for line in train] == pytest.approx([0.03 * (8 - i) / 8 for i in range(8)])
    assert [line["epoch"] for line in train] == [3 * i // 10 for i in range(8)]
    assert all(line["tokens_per_s"] > 0 and line["peak_memory"] > 0 and line["grad_norm"] > 0 for line in train)
    assert [line["step"] for line in lines if line["kind"] == "validation"] == [0, 4, 8]
    manifest = json.loads((whole / "manifest.json").read_text())
    assert manifest["status"] == "complete"
    assert manifest["request"]["method"]["noise"] == 0.1
    assert manifest["request"]["settings"] == SETTINGS.model_dump()
    assert manifest["request"]["train"]["n"] == 10
    assert manifest["machine"]["device"] == "cpu"
    trained = Trained.load(whole)
    assert (trained.steps, trained.stopped_early) == (8, False)
    assert trained.last["kl"] == next(x["kl"] for x in lines[::-1] if x["kind"] == "validation")
    assert set(trained.metrics()["kind"]) == {"train", "validation"}
    assert trained.to_dict()["best"]["kl"] == trained.best["kl"]
    assert "token f1" in kv.results.summary.render(trained)
    assert {trace.name for trace in trained.plot().data} >= {"training loss", "validation KL", "token F1"}


def test_the_loss_falls_the_model_is_untouched_and_without_a_learning_rate_nothing_happens(
    model: Model, go: Callable[..., Trained], tmp_path: Path
) -> None:
    before = {name: p.clone() for name, p in model.hf.named_parameters()}
    settings = SETTINGS.model_copy(update={"steps": 12, "validate_every": 12, "batch": 5})
    trained = go(tmp_path / "run", method=Offsets(model), settings=settings)
    assert trained.last["kl"] < 0.98 * trained.before["kl"]
    for name, parameter in model.hf.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None
    still = go(tmp_path / "still", method=Offsets(model), settings=settings.model_copy(update={"lr": 1e-12}))
    assert still.last["kl"] == pytest.approx(still.before["kl"], rel=1e-6)


def test_the_manifest_comes_before_the_first_number(
    go: Callable[..., Trained], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        assert json.loads((tmp_path / "run/manifest.json").read_text())["status"] == "running"
        raise RuntimeError("no teacher")

    monkeypatch.setattr(loop, "teach", fail)
    with pytest.raises(RuntimeError, match="no teacher"):
        go(tmp_path / "run")


def test_accumulated_passes_are_one_large_batch(model: Model, go: Callable[..., Trained], tmp_path: Path) -> None:
    runs = []
    for name, batch, accumulate in (("one", 4, 1), ("two", 2, 2), ("other", 2, 1)):
        options = {"steps": 2, "batch": batch, "accumulate": accumulate, "validate_every": 2}
        go(tmp_path / name, method=Offsets(model), settings=SETTINGS.model_copy(update=options))
        runs.append([(x["loss"], x["grad_norm"]) for x in numbers(tmp_path / name) if x["kind"] == "train"])
    one, two, other = (torch.tensor(run, dtype=torch.float64) for run in runs)
    torch.testing.assert_close(one, two, atol=1e-10, rtol=0)
    assert float((one - other).abs().max()) > 1e-6


# --- killed and resumed --------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for whatever ends a process between two lines."""


def kill_at(monkeypatch: pytest.MonkeyPatch, where: str, count: int) -> None:
    """The `count`-th call of `where` ("module.function" or "method") does not happen."""
    owner: Any = {"checkpoint": checkpoint, "log": log.MetricsLog, "loop": loop._Loop, "method": Offsets}[
        where.partition(".")[0]
    ]
    name = where.partition(".")[2]
    plain, calls = getattr(owner, name), [0]

    def killed(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == count:
            raise Killed
        return plain(*args, **kwargs)

    monkeypatch.setattr(owner, name, killed)


@pytest.mark.parametrize(
    ("where", "count"),
    [
        ("method.caches", 1),  # in the first validation: nothing is there but the manifest
        ("method.caches", 2),  # in step 1
        ("method.caches", 5),  # in step 4, behind the checkpoint of step 3
        ("method.caches", 9),  # somewhere in step 7
        ("log.append", 6),  # step done, line not written
        ("checkpoint.save", 1),  # line written, no checkpoint yet
        ("checkpoint.save", 2),
        ("checkpoint.save", 3),  # validation line written, its checkpoint not
        ("checkpoint.save", 5),  # all but the last checkpoint
        ("loop._save_if_best", 1),  # checkpoint written, best not
        ("loop._save_if_best", 3),
        ("loop._save", 99),  # never: the control
    ],
)
def test_killed_anywhere_and_resumed_is_the_same_run(
    whole: Path, model: Model, go: Callable[..., Trained], tmp_path: Path, where: str, count: int
) -> None:
    method = Offsets(model, noise=0.1)
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, where, count)
        if count == 99:
            go(tmp_path / "run")
        else:
            with pytest.raises(Killed):
                go(tmp_path / "run", method=method)
            assert not bool(method.keys.any()), "a stopped run leaves the method as it came"
    torch.manual_seed(count)  # the state of the generators outside must not matter
    go(tmp_path / "run", method=method, resume=True)
    same(tmp_path / "run", whole)


def test_stopped_several_times_with_torn_and_stray_files(
    whole: Path, model: Model, go: Callable[..., Trained], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    for count in (4, 3, 2):
        with pytest.MonkeyPatch.context() as patch:
            kill_at(patch, "method.caches", count)
            with pytest.raises(Killed):
                go(out, resume=True)
        with open(out / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write('{"kind": "train", "step": 7, "loss": 1.0}\n{"kind": "tra')
        (out / "checkpoints" / "step-00000009.part").mkdir(exist_ok=True)
        (out / "best.part").mkdir(exist_ok=True)
    go(out, resume=True)
    same(out, whole)
    assert not list(out.glob("*.part"))
    # The control of `same`: another seed of the loop is another run.
    go(tmp_path / "other", settings=SETTINGS.model_copy(update={"seed": 1}))
    assert numbers(tmp_path / "other") != numbers(whole)


def test_one_whole_checkpoint_is_there_at_any_time(model: Model, tmp_path: Path) -> None:
    method = Offsets(model)
    optimizer = torch.optim.AdamW(method.parameters().values(), lr=0.1)
    (method.keys.sum() + method.values.square().sum()).backward()
    optimizer.step()
    state = {"best": {"step": 0, "kl": 1.0}, "worse": 0}
    for step in (0, 3):
        checkpoint.save(tmp_path, step, method.parameters(), optimizer, state)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000003"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            checkpoint.save(tmp_path, 6, method.parameters(), optimizer, state)
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found.name == "step-00000003"
    noise = torch.rand(3)
    torch.set_rng_state(load_file(found / "state.safetensors")["rng.cpu"])
    other = Offsets(model)
    fresh = torch.optim.AdamW(other.parameters().values(), lr=0.1)
    values, back = checkpoint.restore(found, other.parameters(), fresh)
    assert back == {"step": 3, **state}
    assert torch.equal(values["keys"], method.keys)
    assert torch.equal(torch.rand(3), noise)
    for name, parameter in method.parameters().items():
        mine, theirs = optimizer.state.get(parameter, {}), fresh.state.get(other.parameters()[name], {})
        assert set(mine) == set(theirs)
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)


def test_a_finished_run_is_only_read_and_a_taken_folder_refused(
    whole: Path, model: Model, go: Callable[..., Trained]
) -> None:
    method = Offsets(model, noise=0.1)
    assert go(whole, method=method, resume=True) == Trained.load(whole)
    assert method.calls == 0
    with pytest.raises(InputError, match="already holds a finished run"):
        go(whole)


def test_another_request_is_refused_by_the_names_of_what_differs(
    model: Model, questions: Any, go: Callable[..., Trained], tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, "method.caches", 4)
        with pytest.raises(Killed):
            go(tmp_path / "run")
    method = Offsets(model, noise=0.2)
    with pytest.raises(InputError) as caught:
        go(tmp_path / "run", method=method, settings=SETTINGS.model_copy(update={"lr": 0.5}), resume=True)
    assert "request.method.noise: 0.1 -> 0.2; request.settings.lr: 0.03 -> 0.5" in str(caught.value)
    with torch.no_grad():
        method.keys += 1
    with pytest.raises(InputError, match=r"request\.method\.initial_sha256"):
        go(tmp_path / "run", method=method, resume=True)


CHILD = """
import sys
from pathlib import Path
from kvnotes_interp.training import distill, draw
from tests.tiny import tiny_with_tokenizer
from tests.tiny_tokenizer import train
from tests.training.conftest import Offsets
from tests.training.test_distill import SETTINGS
questions = draw("biography", samples=10, validation=3, docs=(2, 3), seed=0, facts=2)
model = tiny_with_tokenizer("llama", train((q.text + q.answer for part in questions for q in part), vocab=512))
out, teacher = sys.argv[1:]
distill(Offsets(model, noise=0.1), model, *questions, settings=SETTINGS, out=out, teacher=teacher, resume=True)
"""


@pytest.mark.slow
def test_sigkill(whole: Path, go: Callable[..., Trained], teacher: Path, tmp_path: Path) -> None:
    """A real process, killed once it has written some lines."""
    out = tmp_path / "run"
    command = [sys.executable, "-c", CHILD, str(out), str(teacher)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as child:
        until = time.monotonic() + 120
        while child.poll() is None and len(log.read(out / "metrics.jsonl")) < 5:
            assert time.monotonic() < until
            time.sleep(0.002)
        child.send_signal(signal.SIGKILL)
    assert len(log.read(out / "metrics.jsonl")) >= 5, "it was killed too early"
    go(out, resume=True)
    same(out, whole)


def test_ctrl_c_says_how_to_go_on(
    go: Callable[..., Trained], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, calls = Offsets.caches, [0]

    def interrupted(self: Offsets, examples: Any) -> Any:
        calls[0] += 1
        if calls[0] == 6:
            raise KeyboardInterrupt
        return plain(self, examples)

    monkeypatch.setattr(Offsets, "caches", interrupted)
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "run", progress=True)
    said = " ".join(capsys.readouterr().err.split())
    assert "loss" in said
    assert "tokens/s" in said
    assert "goes on from the checkpoint of step 3 with resume=True (--resume)" in said
    go(tmp_path / "run", resume=True)
    assert capsys.readouterr() == ("", ""), "quiet when progress is off"


# --- stopping and refusing -------------------------------------------------------------------------------------------


def test_patience_ends_the_run_and_best_stays(
    model: Model, go: Callable[..., Trained], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = iter([3.0, 1.0, 2.0, 1.5, 0.5, 0.4])
    scores = {"token_f1": 0.5, "exact_match": 0.5, "first_token": 0.5}
    monkeypatch.setattr(loop, "validate", lambda *_, **__: {"kl": next(found), **scores})
    settings = SETTINGS.model_copy(update={"validate_every": 1, "patience": 2, "steps": 20})
    trained = go(tmp_path / "run", settings=settings)
    assert (trained.steps, trained.best_step, trained.stopped_early) == (3, 1, True)
    assert trained.best["kl"] == 1.0
    assert not torch.equal(weights(tmp_path / "run", "best")["keys"], weights(tmp_path / "run", "last")["keys"])


def test_a_loss_that_is_not_finite_is_an_error(model: Model, go: Callable[..., Trained], tmp_path: Path) -> None:
    class Bad(Offsets):
        def caches(self, examples: Any) -> Any:
            if self.calls == 3:
                self.values.data.fill_(float("nan"))
            return super().caches(examples)

    with pytest.raises(KVNotesError, match=r"step 3: the loss is nan .* Lower lr \(0\.03\)"):
        go(tmp_path / "run", method=Bad(model))


def test_refusals(model: Model, go: Callable[..., Trained], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="autocast='bf16' needs CUDA"):
        go(tmp_path / "run", settings=SETTINGS.model_copy(update={"autocast": "bf16"}))

    class Nothing(Offsets):
        def parameters(self) -> Any:
            return {}

    with pytest.raises(InputError, match="has no parameters to train"):
        go(tmp_path / "run", method=Nothing(model))
    assert not (tmp_path / "run").exists()
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, "method.caches", 2)
        with pytest.raises(Killed):
            go(tmp_path / "run")
    with pytest.raises(InputError, match=r"holds no finished training: probe 'train', status 'running'"):
        Trained.load(tmp_path / "run")


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_methods_own_loss_is_trained_on_per_question(
    go: Callable[..., Trained], model: Model, tmp_path: Path, accumulate: int
) -> None:
    """The sum over a batch is divided by all questions of the step, as the answers' loss is; `loss` is without it."""

    class Own(Offsets):
        def caches(self, examples: Any) -> Any:
            self.own_loss = 5 * len(examples) * self.idle.sum()
            return super().caches(examples)

    settings = SETTINGS.model_copy(update={"accumulate": accumulate, "steps": 1, "clip": 1e9})
    own, grads = Own(model), list[torch.Tensor]()
    own.idle.register_hook(lambda grad: grads.append(grad.clone()))
    go(tmp_path / "own", method=own, settings=settings)
    plain = Offsets(model)
    go(tmp_path / "plain", method=plain, settings=settings)
    assert len(grads) == accumulate
    torch.testing.assert_close(sum(grads), torch.full((2,), 5.0))
    assert float((own.idle.detach() - 1).abs().min()) > 0
    assert float((plain.idle.detach() - 1).abs().max()) == 0
    first = [next(line for line in numbers(tmp_path / n) if line["kind"] == "train") for n in ("own", "plain")]
    assert first[0]["loss"] == first[1]["loss"]
