"""Fixtures that several folders of tests share: the default model on real weights, and `kvprobe` called in process.

No test runs in the checkout, reads a run there, or writes to it; see `tests/elsewhere.py`.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import kvnotes_interp as kv
from tests.elsewhere import Checkout

ROOT = Path(__file__).parent.parent


def pytest_configure(config: pytest.Config) -> None:
    checkout = Checkout(ROOT)
    config.pluginmanager.register(checkout, "checkout")
    # A child process runs elsewhere, too, and imports from this checkout whatever is installed.
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", str(ROOT))]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *others])
    try:
        from hypothesis import configuration, settings
    except ImportError:
        return
    configuration.set_hypothesis_home_dir(checkout.base / "hypothesis")
    settings.register_profile("elsewhere", database=None)
    settings.load_profile("elsewhere")


@pytest.fixture(scope="session")
def smollm2() -> Any:
    """SmolLM2-135M in float32 on the CPU. Skipped only where it is not cached and there is no network to get it by."""
    try:
        return kv.load("smollm2-135m", device="cpu", dtype="float32")
    except kv.InputError as error:
        if "could be reached" not in str(error) or _online():
            raise
        pytest.skip(f"SmolLM2-135M is not on this machine and there is no network: {error}")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama on disk, with a tokenizer that has the names of the pronoun family as single tokens.

    It changes its answer on some pairs, by little: pass min_gap=0 and min_gap_noise=0.
    """
    from tests.architectures import build
    from tests.tiny_tokenizer import train

    folder = tmp_path_factory.mktemp("tiny-llama")
    pairs = kv.tasks.pronoun(n=400, seed=1)
    tokenizer = train((text for p in pairs for text in (p.text_old, p.text_new + " he she")), vocab=1000)
    build("llama", attn="sdpa", vocab=len(tokenizer), seed=3).float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _online() -> bool:
    try:
        socket.create_connection(("pypi.org", 443), timeout=5).close()
    except OSError:
        return False
    return True


@dataclass(frozen=True)
class Done:
    """What a command left: its exit code and both streams, without colours."""

    code: int
    out: str
    err: str

    @property
    def words(self) -> str:
        """Standard error with every run of blanks as one: independent of where lines were broken."""
        return " ".join(re.sub(r"[│╭╰╮╯─]", " ", self.err).split())


@pytest.fixture
def kvprobe(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """`kvprobe(*arguments)` in this process: no second import of torch. Streams are caught where C code writes, too."""
    from kvnotes_interp import cli

    monkeypatch.setenv("COLUMNS", "80")

    def call(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["kvprobe", *(str(a) for a in arguments)])
        capfd.readouterr()
        try:
            cli.main()
            code: Any = 0
        except SystemExit as stop:
            code = stop.code or 0
        sys.stdout.flush()
        out, err = (re.sub(r"\x1b\[[0-9;]*m", "", text) for text in capfd.readouterr())
        return Done(int(code), out, err)

    return call


@pytest.fixture
def loaded(smollm2: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Loading the default model gives the session's own, in Python and in `kvprobe`; any other name loads as ever."""
    import kvnotes_interp.model as module

    real = module.load

    def load(name: Any = "smollm2-135m", **options: Any) -> Any:
        asked = {key for key, value in options.items() if value is not None and key != "check"}
        return smollm2 if name == "smollm2-135m" and not asked else real(name, **options)

    monkeypatch.setattr(module, "load", load)
    monkeypatch.setattr(kv, "load", load)
    return smollm2
