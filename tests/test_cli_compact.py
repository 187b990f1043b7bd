"""`kvprobe compact`, `survive` and `stream`: run folders, several families, flat memory, one-line errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvnotes_interp as kv
from kvnotes_interp import engine
from kvnotes_interp.cli import options as cli_options
from kvnotes_interp.operators import eviction
from kvnotes_interp.probes.compaction.points import COMPACTORS
from tests.conftest import Done

Call = Callable[..., Done]
QUESTIONS = ("--task-option", "documents=2", "--task-option", "facts=2")


def test_compact_leaves_a_run_folder(kvprobe: Call, tiny_folder: Path, tmp_path: Path) -> None:
    command = (
        *("compact", "--model", tiny_folder, "--n", 2, *QUESTIONS, "--compactors", "streaming@2", "--ratios", "2,4"),
        *("--timing", 0, "--max-new-tokens", 2, "--quiet", "--out", tmp_path / "run"),
    )
    done = kvprobe(*command)
    assert done.code == 0, done.err
    assert max(map(len, done.out.splitlines())) <= 80
    assert "figures/compaction_ratio.html" in done.words
    summary = json.loads(kvprobe("show", tmp_path / "run", "--json").out)
    assert {"f1_full", "f1_no_context", "f1_streaming@2_2x", "f1_random@4_4x"} <= set(summary)
    assert kvprobe(*command, "--resume").out == done.out


def test_compact_in_passes_and_in_chunks(kvprobe: Call, tiny_folder: Path, tmp_path: Path) -> None:
    base = ("compact", "--model", tiny_folder, "--n", 1, *QUESTIONS, "--compactors", "streaming@2", "--timing", 0)
    done = kvprobe(*base, "--ratios", 4, "--passes", "1,2", "--quiet", "--out", tmp_path / "run")
    assert done.code == 0, done.err
    assert "figures/compaction_passes.html" in done.words
    summary = json.loads(kvprobe("show", tmp_path / "run", "--json").out)
    assert {"kl_streaming@2_4x", "kl_streaming@2_4x_2p", "peak_share_random@4_4x_2p"} <= set(summary)
    assert "ratio_1_in_parts" in summary["controls"]
    done = kvprobe(*base, "--iterative", "--chunk", 16, "--budget", 8, "--json")
    assert done.code == 0, done.err
    assert "kl_streaming@2_8slots" in json.loads(done.out)


def test_survive_takes_several_families(kvprobe: Call, tiny_folder: Path) -> None:
    done = kvprobe(
        *("survive", "--model", tiny_folder, "--task", "pronoun,language", "--n", 8, "--seed", 2),
        *("--compactors", "streaming", "--ratios", "2", "--min-gap", 0, "--min-gap-noise", 0, "--json"),
    )
    assert done.code == 0, done.err
    summary = json.loads(done.out)
    assert summary["n_tried"] == 16
    assert any(name.endswith("gap_streaming_2x") for name in summary)


def test_a_stream_is_flat(kvprobe: Call, tiny_folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "long.txt"
    text.write_text("John went to the market. " * 80, encoding="utf-8")
    base = ("stream", text, "--model", tiny_folder, "--chunk", 32, "--budget", 8, "--compactor")
    done = kvprobe(*base, "snapkv@4", "--json")
    assert done.code == 0, done.err
    rows: list[dict[str, Any]] = json.loads(done.out)
    model = kv.load(str(tiny_folder))
    ids = model.tokenizer(text.read_text(encoding="utf-8"))["input_ids"]
    assert [row["tokens"] for row in rows] == [min(32 * (i + 1), len(ids)) for i in range(len(rows))]
    assert len(rows) == -(-len(ids) // 32) > 10
    assert {row["slots"] for row in rows} == {8}
    assert len({row["bytes"] for row in rows}) == 1
    assert len({row["peak_bytes"] for row in rows[1:-1]}) == 1
    whole = engine.prefill(model, ids)
    assert rows[-1]["whole_bytes"] == whole.nbytes
    assert rows[0]["peak_bytes"] == whole[:32].nbytes
    assert rows[1]["peak_bytes"] * 32 == rows[0]["peak_bytes"] * 40
    shown = kvprobe(*base, "streaming", "--out", tmp_path / "figure")
    assert shown.code == 0, shown.err
    assert max(map(len, shown.out.splitlines())) <= 80
    assert (tmp_path / "figure" / "stream.html").is_file()
    assert "whole_bytes" in (tmp_path / "figure" / "stream.csv").read_text(encoding="utf-8")


def test_wrong_uses_are_one_line(kvprobe: Call, tiny_folder: Path) -> None:
    model = ("--model", tiny_folder)
    for arguments, words in (
        (("compact", *model, "--task", "pronoun"), "compact answers document questions"),
        (("compact", *model, "--compactors", "snapkw"), 'Did you mean "snapkv"'),
        (("compact", *model, "--ratios", "two"), "write numbers"),
        (("compact", *model, "--n", 1, *QUESTIONS, "--passes", "0"), "each at least 1"),
        (("compact", *model, "--n", 1, *QUESTIONS, "--passes", "2", "--iterative"), "leave one out"),
        (("compact", *model, "--n", 1, *QUESTIONS, "--ratios", "1"), "each above 1"),
        (("survive", *model, "--task", "gate,bagde"), 'Did you mean "badge"'),
        (("survive", *model, "--sliding", "kep"), 'Did you mean "keep"'),
        (("survive", *model, "--task", "biography", "--n", 2), "takes counterfactual pairs"),
        (("stream", *model), "give text files, or --task NAME"),
        (("stream", "no.txt", *model), "there is no file"),
        (("stream", "no.txt", *model, "--compactor", "stil@x"), "there is no compactor"),
    ):
        done = kvprobe(*arguments)
        assert done.code == 2, (arguments, done.out, done.err)
        assert words in done.words, (arguments, done.err)
        assert "Traceback" not in done.err


def test_the_command_line_lists_what_python_runs() -> None:
    assert tuple(cli_options.COMPACTORS.split(",")) == COMPACTORS
    for name in COMPACTORS:
        eviction.find(name)
    with pytest.raises(kv.InputError, match="Compactors:"):
        eviction.find("h20")
