"""Sends prompts to an OpenAI-compatible server at given times and reads what each one found in its cache.

Prompts go as token ids to /v1/completions (vLLM, SGLang and llama.cpp take them so), streamed. What was cached is the
server's own count, never a guess: `usage.prompt_tokens_details.cached_tokens` (vLLM with
--enable-prompt-tokens-details, SGLang with --enable-cache-report, llama.cpp) or llama.cpp's `timings.cache_n`.
"""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

from kvnotes_interp.errors import InputError

COUNTERS = {
    "queries": ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_queries"),
    "hits": ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_hits"),
}


@dataclass
class Answer:
    """One request. Times are in seconds after the start of the run; None where nothing came or nothing was reported.

    Attributes:
        number: place in the order of arrival. due: when it should be sent. sent: when it was.
        first: when the first text came. done: when the stream ended.
        prompt, cached, output: the server's counts of tokens.
        error: "" or what went wrong.
    """

    number: int
    due: float
    sent: float | None = None
    first: float | None = None
    done: float | None = None
    prompt: int | None = None
    cached: int | None = None
    output: int | None = None
    error: str = ""

    @property
    def ttft(self) -> float | None:
        """Seconds from due to first text: time in a queue counts, on the server's side and on ours."""
        return None if self.first is None else self.first - self.due

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ttft": self.ttft}


def ask(
    url: str,
    ids: Sequence[int],
    answer: Answer,
    *,
    model: str,
    output_tokens: int,
    started: float,
    timeout_s: float,
    api_key: str = "",
) -> Answer:
    """Send one request and fill in `answer`. Errors are kept in it, not raised."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    body = {
        "model": model,
        "prompt": list(ids),
        "max_tokens": output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    end = time.monotonic() + timeout_s
    connection = kind(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        answer.sent = time.monotonic() - started
        connection.request("POST", f"{parts.path.rstrip('/')}/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            answer.error = f"HTTP {response.status}: {response.read(300).decode(errors='replace')}"
            return answer
        for line in response:
            now = time.monotonic()
            if now > end:  # the socket's own limit is per read
                answer.error = f"not done after {timeout_s:g} s"
                return answer
            if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                _read(json.loads(data), answer, now - started)
        answer.done = time.monotonic() - started
        if answer.first is None:
            answer.error = "the stream ended without a token"
    except (OSError, http.client.HTTPException, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    finally:
        connection.close()
    return answer


def _read(event: dict[str, Any], answer: Answer, now: float) -> None:
    if "error" in event:
        raise ValueError(str(event["error"])[:300])
    # A token whose text is held back (half of a character) still is the first token.
    if answer.first is None and event.get("choices"):
        answer.first = now
    usage, timings = event.get("usage") or {}, event.get("timings") or {}
    answer.prompt = usage.get("prompt_tokens", answer.prompt)
    answer.output = usage.get("completion_tokens", answer.output)
    details = usage.get("prompt_tokens_details") or {}
    if details.get("cached_tokens") is not None:
        answer.cached = int(details["cached_tokens"])
    elif timings.get("cache_n") is not None:
        answer.cached = int(timings["cache_n"])


def send_all(
    url: str,
    prompts: Sequence[Sequence[int]],
    times: Sequence[float] | None,
    *,
    model: str,
    output_tokens: int = 8,
    limit_s: float = 300,
    api_key: str = "",
) -> list[Answer]:
    """Send every prompt at its time and wait for all, at most `limit_s` seconds in total.

    Args:
        times: seconds after the start, one per prompt, rising; None sends each when the one before has ended.

    A request that is not done in time ends with an error; none is sent again and none after the limit.
    """
    if times is not None and len(times) != len(prompts):
        raise InputError(f"{len(times)} times for {len(prompts)} prompts: one each.")
    started = time.monotonic()
    answers = [Answer(number, 0.0 if times is None else times[number]) for number in range(len(prompts))]
    threads = []

    def one(number: int) -> None:
        left = limit_s - (time.monotonic() - started)
        ask(
            url,
            prompts[number],
            answers[number],
            model=model,
            output_tokens=output_tokens,
            started=started,
            timeout_s=left,
            api_key=api_key,
        )

    for answer in answers:
        now = time.monotonic() - started
        if times is None:
            answer.due = now
        if max(now, answer.due) >= limit_s:
            answer.error = f"not sent within {limit_s:g} s"
            continue
        if times is None:
            one(answer.number)
            continue
        time.sleep(max(0.0, answer.due - now))
        thread = threading.Thread(target=one, args=(answer.number,), daemon=True)
        thread.start()
        threads.append(thread)
    for thread in threads:
        thread.join()
    return answers


def first_model(url: str, *, api_key: str = "") -> str:
    """The id of the first model that the server names. Raises InputError when it cannot be asked."""
    request = urllib.request.Request(f"{url.rstrip('/')}/v1/models")
    if api_key:
        request.add_header("Authorization", f"Bearer {api_key}")
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return str(json.loads(answer.read())["data"][0]["id"])
    except (urllib.error.URLError, OSError, ValueError, LookupError, TypeError) as error:
        raise InputError(f"{url} does not answer /v1/models as an OpenAI-compatible server does: {error}") from error


def counters(url: str) -> dict[str, float]:
    """vLLM's prefix-cache counters, in tokens, summed over labels: `queries` and `hits`; empty where there are none."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/metrics", timeout=5) as answer:
            text = answer.read().decode(errors="replace")
    except (urllib.error.URLError, OSError):
        return {}
    found: dict[str, float] = {}
    for line in text.splitlines():
        match = re.fullmatch(r"([\w:]+)(?:\{.*\})?\s+(\S+)(?:\s+\d+)?", line)
        for key, names in COUNTERS.items():
            if match and match[1] in names:
                found[key] = found.get(key, 0.0) + float(match[2])
    return found
