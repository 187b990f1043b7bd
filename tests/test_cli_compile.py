"""`kvprobe compile`: caches of files and tasks on disk, by the model or a Writer, read back and joined."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import kvnotes_interp as kv
from kvnotes_interp import operators
from kvnotes_interp.model import Model
from kvnotes_interp.operators import Skill, Writer
from tests.conftest import Done
from tests.writers import stirred

TEXTS = {"a.txt": "John went to the market.\n", "b.txt": "Mary went home, and she was happy.\n"}

Call = Callable[..., Done]


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> Model:
    return kv.load(str(tiny_folder))


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    for name, text in TEXTS.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return [tmp_path / name for name in TEXTS]


def test_files_become_caches_that_python_joins(
    kvprobe: Call, model: Model, tiny_folder: Path, files: list[Path], tmp_path: Path
) -> None:
    base = ("compile", *files, "--model", tiny_folder, "--out", tmp_path / "caches")
    done = kvprobe(*base)
    assert done.code == 0, done.err
    assert "2 documents in" in done.words
    assert "the plain model" in done.words
    assert all(len(line) <= 80 for line in done.out.splitlines())
    writer = stirred(model, "packet")
    adapter = writer.save(tmp_path / "writer")
    wrapped = kvprobe(*base, "--adapter", adapter, "--json")
    plain = kvprobe(*base, "--json")
    assert (wrapped.code, plain.code) == (0, 0), wrapped.err + plain.err
    rows = {name: json.loads(done.out) for name, done in (("plain", plain), ("packet", wrapped))}
    assert len(list((tmp_path / "caches").glob("*.safetensors"))) == 4, "each its own, none made twice"
    assert not {row["file"] for row in rows["plain"]} & {row["file"] for row in rows["packet"]}
    for name, extra in (("plain", 0), ("packet", 16)):
        skills = [Skill.load(row["file"], model) for row in rows[name]]
        assert [skill.text for skill in skills] == list(TEXTS.values())
        for row, skill in zip(rows[name], skills, strict=True):
            ids = model.tokenizer(skill.text, add_special_tokens=False)["input_ids"]
            assert (row["tokens"], row["slots"]) == (len(ids), len(ids) + extra)
            assert row["bytes"] == Path(row["file"]).stat().st_size
        joined = operators.splice_skills(model, "", skills, "Where did John go?", add_special_tokens=False)
        if name == "plain":
            want = operators.no_recompute(model, joined.blocks)
        else:
            want = operators.OPERATORS["packet"](model, joined.blocks, adapter=Writer.load(adapter, model))
        assert joined.made.cache == want.cache


def test_documents_of_a_task_are_compiled_once_each(kvprobe: Call, tiny_folder: Path, tmp_path: Path) -> None:
    options = ("--task", "biography", "--n", "3", "--task-option", "documents=2", "--task-option", "facts=2")
    done = kvprobe("compile", *options, "--model", tiny_folder, "--out", tmp_path, "--json")
    assert done.code == 0, done.err
    questions = kv.tasks.documents.load("biography", n=3, documents=2, facts=2)
    texts = dict.fromkeys(text for question in questions for text in question.documents)
    rows = json.loads(done.out)
    assert [json.loads(Path(row["file"]).with_suffix(".json").read_text())["text"] for row in rows] == list(texts)
    assert rows[0]["document"] == f"{questions[0].key}[0]"


def test_wrong_uses_are_one_line(kvprobe: Call, tiny_folder: Path, files: list[Path], tmp_path: Path) -> None:
    model = ("--model", tiny_folder, "--out", tmp_path / "caches")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    for arguments, words in (
        ((), "give text files, or --task NAME"),
        ((files[0], "--task", "biography"), "and not both"),
        ((tmp_path / "c.txt",), "there is no file"),
        ((tmp_path / "empty.txt",), "empty.txt is empty"),
        ((tmp_path / "bytes.txt",), "bytes.txt is no UTF-8 text"),
        (("--task", "biographie"), 'Did you mean "biography"'),
        ((files[0], "--adapter", tmp_path), "there is no writer.json in"),
    ):
        done = kvprobe("compile", *arguments, *model)
        assert done.code == 2, arguments
        assert words in done.words, done.err
        assert "Traceback" not in done.err
    assert not (tmp_path / "caches").exists()
