"""Text and files that were read wrong without a word: part of a character, a key given twice, another encoding.

Every right value is worked out by hand, or by the tokenizer's own rendering; beside each stands a control that passes.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import shutil
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

import kvnotes_interp as kv
from kvnotes_interp import cards, cli, files, tasks
from kvnotes_interp.cli import options as opt
from kvnotes_interp.errors import InputError
from kvnotes_interp.operators.blocks import cut_pair, cut_texts
from kvnotes_interp.operators.eviction.trained_folder import TrainedFolder
from kvnotes_interp.results import Result, Summary
from kvnotes_interp.results.manifest import sha256_file
from kvnotes_interp.tasks.encode import is_delimiter
from kvnotes_interp.tasks.pair import Message, Pair, Piece
from kvnotes_interp.training import log
from tests.tiny_tokenizer import CHATML, PARAGRAPH, train

CHINESE = ("天空是蓝色的。", "红色", "，请记住规则：红停、绿行！", "现在我们")
SURROGATE = "\ud800"


def chinese_pair(old: str = "红色", new: str = "绿色") -> Pair:
    def prompt(value: str) -> tuple[Piece, ...]:
        texts = (CHINESE[0] + "灯是", value, CHINESE[2] + "\n", CHINESE[3])
        return tuple(
            Piece(text, region, f"{n}.0")  # type: ignore[arg-type]
            for n, (text, region) in enumerate(zip(texts, ("context", "field", "rule", "decision"), strict=True))
        )

    return Pair("mine", "derived", "mine.k", "mine:c", "train", prompt(old), prompt(new), "停", "行", chat=False)


def byte_level(*, merged: bool) -> PreTrainedTokenizerFast:
    """Characters as bytes: none merged at all, or as training on the text merges them."""
    return train(["".join(CHINESE)] if merged else ["a"], vocab=300 if merged else 262)


def byte_fallback() -> PreTrainedTokenizerFast:
    """As Llama's: known characters whole, all others as three byte tokens; blanks as an underscore."""
    signs = "▁abc.灯"
    vocab = {name: i for i, name in enumerate(["<unk>", *(f"<0x{i:02X}>" for i in range(256)), *signs])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])  # type: ignore
    core.decoder = decoders.Sequence(  # type: ignore[assignment]
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")


# --- delimiters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: byte_level(merged=False), lambda: byte_level(merged=True), byte_fallback])
def test_part_of_a_character_is_what_the_character_is(make: Callable[[], Any]) -> None:
    tokenizer, pair = make(), chinese_pair()
    encoded = tasks.encode(tokenizer, pair)
    text = pair.text_old
    offsets = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
    held = [text[start:stop].strip() for start, stop in offsets]
    want = [all(unicodedata.category(char)[0] == "P" for char in one) for one in held]
    if encoded.tokens_old[0] == "":  # the blank that SentencePiece puts in front is empty text
        want[0] = True
    assert list(encoded.delimiter) == want
    parts = [tokenizer.decode([i]) for i in encoded.old_ids]
    assert sum("\ufffd" in part for part in parts) > 10  # decoding one at a time could not tell
    assert sum(want) < len(want) / 2
    assert "".join(encoded.tokens_old).replace("\ufffd", "").strip() == text.strip()
    rule = [place for place, region in enumerate(encoded.regions) if region == "delimiter"]
    assert {held[place] for place in rule} <= {"，", "：", "、", "！", "", "！\n", "，请"[:1]}


def test_english_is_cut_as_before() -> None:
    tokenizer = train([PARAGRAPH])
    encoded = tasks.encode_all(tokenizer, tasks.pronoun(n=16))[0][0]
    for token, i, flag in zip(encoded.tokens_old, encoded.old_ids, encoded.delimiter, strict=True):
        assert token == tokenizer.decode([i])
        assert flag is (not any(char.isalnum() for char in token))


def test_a_special_token_is_no_delimiter() -> None:
    tokenizer = train(["a"], vocab=262, bos=True)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|>"]})
    pair = chinese_pair()
    held = dataclasses.replace(
        pair,
        old=(Piece("<|>.", "context", "x"), *pair.old),  # type: ignore[arg-type]
        new=(Piece("<|>.", "context", "x"), *pair.new),  # type: ignore[arg-type]
    )
    encoded = tasks.encode(tokenizer, held)
    assert encoded.tokens_old[:3] == ("<|startoftext|>", "<|>", ".")
    assert encoded.delimiter[:3] == (False, False, True)


@pytest.mark.parametrize(
    ("text", "yes"), [("\ufffd", False), (".\ufffd", False), ("。", True), ("中", False), (" ", True)]
)
def test_the_replacement_character_is_no_punctuation(text: str, yes: bool) -> None:
    assert is_delimiter(text) is yes


@pytest.mark.parametrize("make", [lambda: byte_level(merged=False), lambda: byte_level(merged=True)])
def test_sentences_end_behind_a_whole_character(make: Callable[[], Any]) -> None:
    tokenizer = make()
    cut = cut_pair(tasks.encode(tokenizer, chinese_pair()), min_tokens=1)
    # By hand: one sentence before the field's, then the one that holds it up to "！" and its newline.
    assert tokenizer.decode(list(cut.prefix)) == "天空是蓝色的。"
    assert [tokenizer.decode(list(chunk)) for chunk in cut.chunks] == ["灯是红色，请记住规则：红停、绿行！", "\n"] or [
        tokenizer.decode(list(chunk)) for chunk in cut.chunks
    ] == ["灯是红色，请记住规则：红停、绿行！\n"]
    assert tokenizer.decode(list(cut.suffix)) == "现在我们"


def test_tokens_of_cut_texts_are_the_text() -> None:
    cut = cut_texts(byte_level(merged=False), "天。\n", ["红。\n"], "我们")
    assert "".join(cut.tokens).replace("\ufffd", "") == "天。\n红。\n我们"


def test_blanks_that_decoding_leaves_out_are_kept() -> None:
    tokenizer = byte_fallback()
    cut = cut_texts(tokenizer, "a\n", ["b\n"], "c a")
    assert cut.tokens[-2:] == (" ", "a")
    assert tokenizer.decode([cut.blocks.suffix[-2]]) == ""  # control: decoded alone, the blank is gone


# --- chat templates --------------------------------------------------------------------------------------------------

OPENS = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TURNS = CHATML.removesuffix(OPENS)
INST = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %} {{ m['content'] }}</s>"
    "{% else %}[INST] {{ m['content'] }} [/INST]{% endif %}{% endfor %}"
)
LAST_ONLY = TURNS + "{% if messages[-1]['role'] == 'assistant' %}{{ raise_exception('no') }}{% endif %}"


def chat_pair() -> Pair:
    def prompt(value: str) -> tuple[Message, ...]:
        pieces = (
            Piece("The light is ", "context", "0.0"),
            Piece(value, "field", "field"),
            Piece(". Mind the rule.", "rule", "1.0"),
        )
        return (Message("user", pieces),)  # type: ignore[arg-type]

    return Pair("mine", "derived", "mine.k", "mine:c", "train", prompt("red"), prompt("tan"), "Yes", "No", chat=True)


@pytest.mark.parametrize("template", [CHATML, INST, TURNS + "<|im_start|>assistant\n"])
def test_a_template_that_opens_the_answer_passes(template: str) -> None:
    tokenizer = train(["a"], vocab=262)
    tokenizer.chat_template = template
    turns = [{"role": "user", "content": chat_pair().text_old}]
    want = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(list(tasks.encode(tokenizer, chat_pair()).old_ids)) == want


@pytest.mark.parametrize("template", [TURNS, LAST_ONLY, TURNS + "<|im_start|>user\n"])
@pytest.mark.parametrize("opening", [False, True])
def test_a_template_that_ignores_the_generation_prompt_is_refused(template: str, opening: bool) -> None:
    tokenizer, pair = train(["a"], vocab=262), chat_pair()
    if opening:
        forced = Message("assistant", (Piece("Decision:", "decision", "2.0"),))
        pair = dataclasses.replace(pair, old=(*pair.old, forced), new=(*pair.new, forced))  # type: ignore[arg-type]
    assert tasks.encode(tokenizer, pair)  # control: with the last block it is read
    tokenizer.chat_template = template
    for ask in (tasks.encode, lambda tokenizer, pair: tasks.encode_all(tokenizer, [pair])):
        with pytest.raises(InputError, match=r'"mine".*ignores add_generation_prompt.*chat=False') as caught:
            ask(tokenizer, pair)
        assert not hasattr(caught.value, "reason")  # every pair has it: raised, not counted


def test_a_template_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, seen = train(["a"], vocab=262), []
    plain = tokenizer.apply_chat_template
    monkeypatch.setattr(tokenizer, "apply_chat_template", lambda *a, **k: seen.append(k) or plain(*a, **k))
    tasks.encode_all(tokenizer, [chat_pair()] * 5)
    assert len(seen) == 11  # two prompts of five pairs, and one question
    tokenizer.chat_template = TURNS
    with pytest.raises(InputError):
        tasks.encode(tokenizer, chat_pair())


# --- pairs that are none ---------------------------------------------------------------------------------------------


def with_text(pair: Pair, region: str, text: str) -> Pair:
    def change(prompt: Any) -> Any:
        return tuple(dataclasses.replace(p, text=text) if p.region == region else p for p in prompt)

    return dataclasses.replace(pair, old=change(pair.old), new=change(pair.new))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: with_text(p, "rule", "a" + SURROGATE), r"piece 2.0: character 1 is half a character.*ud800"),
        (lambda p: with_text(p, "rule", "a\0b"), "piece 2.0: character 1 is NUL"),
        (lambda p: dataclasses.replace(p, answer_old="停\udfff"), "answer_old: character 1 is half"),
        (lambda p: dataclasses.replace(p, answer_new="\0"), "answer_new: character 0 is NUL"),
        (lambda p: dataclasses.replace(p, answer_new=""), "answer_new is empty"),
        (lambda p: dataclasses.replace(p, answer_new=p.answer_old), "both begin with token"),
        (lambda p: dataclasses.replace(p, new=p.old), "the old and the new prompt are the same"),
        (lambda p: dataclasses.replace(p, old=(), new=()), "the old prompt is empty"),
        (lambda p: dataclasses.replace(p, new=()), "the new prompt is empty"),
        (lambda p: with_text(p, "field", ""), "has an empty piece of region"),
        (lambda p: dataclasses.replace(p, old=p.old[:1]), "has 0 pieces of region"),
        (lambda p: dataclasses.replace(p, old=(*p.old, p.old[1])), "has 2 pieces of region"),
        (lambda p: dataclasses.replace(p, old=p.old[:2], new=p.new[:2]), "nothing follows the field"),
        (lambda p: dataclasses.replace(p, chat=True), "no turn to answer"),
    ],
)
def test_a_pair_that_is_none_is_refused(change: Callable[[Pair], Pair], words: str) -> None:
    tokenizer = byte_level(merged=False)
    assert tasks.encode(tokenizer, chinese_pair())
    with pytest.raises(InputError, match=words):
        tasks.encode(tokenizer, change(chinese_pair()))


def test_texts_that_are_cut_are_checked() -> None:
    for texts in (("a", ["b" + SURROGATE], "c"), ("aa\0", ["b"], "c")):
        with pytest.raises(InputError, match="the prompt and its answer: character 2"):
            cut_texts(byte_level(merged=False), *texts)


# --- files -----------------------------------------------------------------------------------------------------------

FAMILY = """kind: derived
about: x
source: x
content: thing
prompt:
  - context: "The {thing} is {field}. "
  - decision: "So we"
values:
  " stop": [red]
  " go": [green]
slots:
  thing: [light, lamp, bell, sign]
"""
CARD = """claim: x
paper: x
section: x
probe: local_patching
arms:
  derived: {task: pronoun}
expect:
  - {value: derived.field_only, below: 0.5}
"""

READERS: dict[str, tuple[str, str, Callable[[Path], Any]]] = {
    "family": ("mine.yaml", FAMILY, lambda path: tasks.load(path, n=2)),
    "family, JSON": (
        "mine.json",
        json.dumps(files.parse_yaml(FAMILY, "x"), indent=1),
        lambda path: tasks.load(path, n=2),
    ),
    "card": ("card.yaml", CARD, cards.read),
    "metrics": ("metrics.jsonl", '{"kind": "train", "step": 1}\n{"kind": "train", "step": 2}\n', log.read),
    "records": (
        "musique.jsonl",
        json.dumps(
            {
                "id": "2hop__1_2",
                "question": "Who?",
                "answer": "Ann\u2028Lee",
                "paragraphs": [{"title": "t", "paragraph_text": "p", "is_supporting": True}],
            },
            ensure_ascii=False,
        )
        + "\n",
        lambda path: tasks.documents.load("musique", n=1, file=str(path)),
    ),
}


def _twice(text: str) -> str:
    """The first key of the last object or mapping once more."""
    if text.lstrip().startswith("{"):
        line = text.strip().split("\n")[-1]
        key = line.split('"')[1] if line != "}" else "kind"
        last = text.rstrip()
        return last[:-1].rstrip() + f', "{key}": 1}}\n'
    return text + text.split(":")[0] + ": again\n"


@pytest.mark.parametrize("name", READERS)
def test_a_file_in_order_is_read_with_and_without_a_mark(name: str, tmp_path: Path) -> None:
    file, text, read = READERS[name]
    for data in (text.encode(), b"\xef\xbb\xbf" + text.encode(), text.replace("\n", "\r\n").encode()):
        (tmp_path / file).write_bytes(data)
        assert read(tmp_path / file)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda text: _twice(text).encode(), r"line \d+.*stands twice"),
        (
            lambda text: (
                text.replace("x", "é").replace("train", "tré").replace("Who", "é").encode("latin-1", "replace")
            ),
            "byte",
        ),
        (lambda text: text.encode("utf-16"), r"UTF-16.*Save it as UTF-8"),
        (lambda text: text.encode("utf-16-le"), r"NUL.*Save it as UTF-8"),
        (lambda text: text.replace(" ", '"', 1).encode() + b"\n{[\n", "not valid|json"),
        (lambda _: b"[1]\n", "mapping|list|dictionary"),
        (lambda _: b"3\n", "mapping|list|dictionary"),
        (lambda _: b'{"a": "\\ud800"}\n', "half a character"),
        (lambda _: b'{"\\udc00": 1}\n', "half a character"),
    ],
)
def test_a_faulty_file_is_refused_by_name(name: str, fault: Callable[[str], bytes], words: str, tmp_path: Path) -> None:
    file, text, read = READERS[name]
    (tmp_path / file).write_bytes(fault(text))
    with pytest.raises(InputError, match=words) as caught:
        read(tmp_path / file)
    assert file in str(caught.value)


@pytest.mark.parametrize(
    ("text", "line", "key"),
    [
        ('{"a": 1,\n"b": {"c": 1,\n"c": 2}}', 3, "c"),
        ('{"a": "b: {",\n"b": [{"a": 1}, {"a": 1}],\n"a": 3}', 3, "a"),
        ('[{"x": 1},\n {"x": 1, "\\u0078": 2}]', 2, "x"),
    ],
)
def test_the_line_of_a_key_that_stands_twice(text: str, line: int, key: str) -> None:
    for parse in (files.parse_json, files.parse_yaml):
        with pytest.raises(InputError, match=f'line {line}: the key "{key}"'):
            parse(text, "x")
    assert files.parse_json('{"a": {"b": 1}, "b": 2}', "x") == {"a": {"b": 1}, "b": 2}


def test_keys_that_yaml_takes_for_one_are_one() -> None:
    for text in ("yes: 1\ntrue: 2", "1: a\n1.0: b", "a: {b: 1, b: 1}"):
        with pytest.raises(InputError, match="stands twice"):
            files.parse_yaml(text, "x")
    merged = "a: &a {p: 1, q: 2}\nb: {<<: *a, p: 3}\nc: {<<: *a}"
    assert files.parse_yaml(merged, "x")["b"] == {"p": 3, "q": 2}  # control: a merge may be overridden


def test_filler_lines_are_cut_at_newlines_alone(tmp_path: Path) -> None:
    text = FAMILY.replace("  - decision", '  - filler: "- {filler}\\n"\n  - decision')
    (tmp_path / "mine.yaml").write_text(text + "fillers: {count: 2, lines: lines.txt}\n")
    (tmp_path / "lines.txt").write_text("One\u2028one.\nTwo.\n", encoding="utf-8")
    assert "One\u2028one." in tasks.load(tmp_path / "mine.yaml", n=1)[0].text_old
    (tmp_path / "lines.txt").write_bytes("Caf\u00e9.\nTwo.\n".encode("latin-1"))
    with pytest.raises(InputError, match=r"lines.txt is no UTF-8 text: byte 3 \(0xe9"):
        tasks.load(tmp_path / "mine.yaml", n=1)


# --- run folders and caches ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [{"quantity": "field_only", "mean": 0.5, "low": 0.25, "high": 0.75, "n": 4, "n_effective": 2}]
    summary = Summary.of("title", rows, counts={"n_tried": 4, "n_competent": 4, "set_aside": {}})
    frame = pd.DataFrame([{"pair": "a", "readout": "recovery", "value": 0.5}])
    manifest = {"request": {"seed": 0}}
    pairs = pd.DataFrame([{"pair": "a", "competent": True}])
    result = Result.build(probe="mine", frame=frame, pairs=pairs, summary=summary, manifest=manifest)
    return result.save(tmp_path_factory.mktemp("run") / "run", figures=False)


def _rehashed(folder: Path, **changes: Any) -> None:
    """The manifest with these changes, and with the right hashes, so that the hash is not what refuses."""
    about = json.loads((folder / "manifest.json").read_text())
    about["files"] = {name: sha256_file(folder / name) for name in about["files"] if (folder / name).exists()}
    (folder / "manifest.json").write_text(json.dumps({**about, **changes}))


RUN_FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "not JSON": (lambda f: (f / "manifest.json").write_text("{"), "manifest.json is not valid JSON, line 1"),
    "latin-1": (lambda f: (f / "manifest.json").write_bytes(b'{"probe": "\xe9"}'), "no UTF-8 text: byte 11"),
    "a list": (lambda f: (f / "manifest.json").write_text("[]"), "must hold a mapping"),
    "twice": (lambda f: (f / "manifest.json").write_text('{"schema": 1,\n"schema": 2}'), 'line 2: the key "schema"'),
    "probe is a number": (lambda f: _rehashed(f, probe=3), 'entry "probe": found a whole number: 3'),
    "request is a list": (lambda f: _rehashed(f, request=[]), 'entry "request": found a list'),
    "files is a list": (lambda f: _rehashed(f, files=[]), 'entry "files": found a list'),
    "files is empty": (lambda f: _rehashed(f, files={}), "table.parquet is not the file"),
    "status is null": (lambda f: _rehashed(f, status=None), 'entry "status": found nothing'),
    "schema is a list, versions too": (lambda f: _rehashed(f, schema=[1], versions=[2]), "has schema"),
    "no summary": (lambda f: (f / "summary.json").unlink(), "lacks summary.json"),
    "summary is broken": (lambda f: ((f / "summary.json").write_text("{"), _rehashed(f)), "summary.json is not valid"),
    "summary of a list": (
        lambda f: ((f / "summary.json").write_text('{"a": [1]}'), _rehashed(f)),
        "summary.json is not in",
    ),
    "summary of words": (
        lambda f: ((f / "summary.json").write_text('{"a": {"mean": "x"}}'), _rehashed(f)),
        "summary.json is not in the form",
    ),
    "controls is a list": (
        lambda f: ((f / "summary.json").write_text('{"controls": [1]}'), _rehashed(f)),
        "summary.json is not in the form",
    ),
    "table is text": (
        lambda f: ((f / "table.parquet").write_text("PAR1"), _rehashed(f)),
        "table.parquet is not a parquet",
    ),
    "pairs is another table": (
        lambda f: (pd.DataFrame({"x": [1]}).to_parquet(f / "pairs.parquet"), _rehashed(f)),
        "pairs.parquet: the column 'pair' is missing",
    ),
    "pairs are numbers": (
        lambda f: (pd.DataFrame({"pair": [1]}).to_parquet(f / "pairs.parquet"), _rehashed(f)),
        "pairs.parquet: the column 'pair' holds int64",
    ),
    "training without its end": (lambda f: _rehashed(f, probe="train"), "no 'trained'"),
}


@pytest.mark.parametrize("name", RUN_FAULTS)
def test_a_broken_run_folder_is_refused_by_name(name: str, saved: Path, tmp_path: Path, monkeypatch: Any) -> None:
    folder = shutil.copytree(saved, tmp_path / "run")
    assert Result.load(folder).frame["value"].tolist() == [0.5]  # control
    change, words = RUN_FAULTS[name]
    change(folder)
    if name != "training without its end":
        with pytest.raises(InputError, match=words):
            Result.load(folder)
    said: list[str] = []
    monkeypatch.setattr(cli, "say", said.append)
    monkeypatch.setattr(sys, "argv", ["kvprobe", "show", str(folder)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert re.search(words, said[0])


def _cache(path: Path, *, about: Any = None, **tensors: Any) -> Path:
    good = {
        "keys.0": torch.zeros(1, 1, 3, 2),
        "values.0": torch.zeros(1, 1, 3, 2),
        "token_ids": torch.tensor([[1, 2, 3]]),
        "positions": torch.arange(3),
    }
    said = {"format": "kvcache/1", "n_layers": 1, "interleaved": [False], "model_id": "x", "end": 3}
    text = about if isinstance(about, str) else json.dumps({**said, **(about or {})})
    kept = {name: tensor for name, tensor in {**good, **tensors}.items() if tensor is not None}
    save_file(kept, path, metadata={"kvnotes": text})
    return path


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"about": "{"}, "not valid JSON"),
        ({"about": "[]"}, "must hold a mapping"),
        ({"about": {"n_layers": "1"}}, '"n_layers": found text'),
        ({"about": {"n_layers": 2}}, "2 layers, interleaved has 1"),
        ({"about": {"end": None}}, '"end": found nothing'),
        ({"about": {"model_id": 3}}, '"model_id": found a whole'),
        ({"keys.0": None}, "no 'keys.0'"),
        ({"positions": None}, "no 'positions'"),
        ({"token_ids": torch.zeros(1, 3)}, "token_ids holds torch.float32"),
        ({"keys.0": torch.zeros(1, 1, 2, 2)}, "expected"),
        ({"values.0": torch.zeros(3)}, "expected|form"),
        ({"keys.0": torch.zeros(3)}, "form"),
    ],
)
def test_a_cache_file_of_another_form_is_refused(fault: dict[str, Any], words: str, tmp_path: Path) -> None:
    assert len(kv.KVCache.load(_cache(tmp_path / "good.safetensors"))) == 3
    with pytest.raises(InputError, match=words):
        kv.KVCache.load(_cache(tmp_path / "bad.safetensors", **fault))


def test_descriptions_of_what_is_learned_are_checked(tmp_path: Path) -> None:
    trained, where = TrainedFolder("still", "Still compactor"), tmp_path / "still.json"
    whole = {"format": "still/1", "model_id": "x", "source": {}, "settings": {}, "sha256": {}}
    where.write_text(json.dumps(whole))
    assert trained.read_about(tmp_path) == whole
    for text, words in (
        ("{", "not valid JSON"),
        ("[]", "a mapping"),
        ('{"format": 1, "format": 2}', "stands twice"),
        (json.dumps({**whole, "settings": []}), 'still.json, entry "settings"'),
        ('{"format": "still/1"}', 'no entry "model_id"'),
    ):
        where.write_text(text)
        with pytest.raises(InputError, match=words):
            trained.read_about(tmp_path)


# --- list options of the command line --------------------------------------------------------------------------------

BAD_LISTS = [
    (["splice", "--documents", ""], "--documents '' is empty"),
    (["splice", "--documents", " , "], "item 1 is empty"),
    (["splice", "--documents", "1,,2"], "item 2 is empty"),
    (["splice", "--documents", "1,1"], "'1' stands twice"),
    (["splice", "--documents", "0"], "each at least 1"),
    (["splice", "--documents", "1.5"], "is no whole number"),
    (["splice", "--documents", "1_0"], "is no whole number"),
    (["splice", "--shares", "0"], "each above 0 and at most 1"),
    (["splice", "--shares", "nan"], "is no number"),
    (["splice", "--shares", "0.5,0.50"], "stands twice"),
    (["splice", "--seam-repair", "-1"], "each at least 0"),
    (["splice", "--operators", "splize"], 'Did you mean "splice"'),
    (["splice", "--operators", ""], "--operators '' is empty"),
    (["splice", "--operators", "epic@2"], "share=2"),
    (["deviate", "--operators", "no_recompute,no_recompute"], "stands twice"),
    (["edit", "--wordings", "bare,tagd"], 'Did you mean "tagged"'),
    (["edit", "--wordings", ""], "--wordings '' is empty"),
    (["edit", "--ks", "0"], "each at least 1"),
    (["edit", "--rankings", "casual"], 'Did you mean "causal"'),
    (["edit", "--shares", "1.01"], "at most 1"),
    (["compact", "--compactors", "snapkw"], 'Did you mean "snapkv"'),
    (["compact", "--compactors", "h2o@x"], "recent is a number"),
    (["compact", "--ratios", "1"], "each above 1"),
    (["compact", "--ratios", "1e999"], "is too large"),
    (["compact", "--passes", "0"], "each at least 1"),
    (["survive", "--task", "gate,gate"], "stands twice"),
    (["survive", "--wording", "tagd"], 'Did you mean "tagged"'),
    (["keystone", "--seam-repair", "x"], "--seam-repair 'x'"),
    (["keystone", "--ks", "8,"], "item 2 is empty"),
    (["linear", "--layers", "-1"], "each at least 0"),
    (["linear", "--features", "none"], "choose from residual"),
    (["ablate", "--analyses", ""], "--analyses '' is empty"),
    (["ablate", "--ks", "a"], "write numbers"),
    (["patch", "--parts", "kv,kv"], "stands twice"),
    (["patch", "--views", "layers"], 'Did you mean "layer"'),
    (["patch", "--task-option", "fillers=1", "--task-option", "fillers=2"], "is given twice"),
    (["patch", "--task-option", 'x={"a": 1, "a": 2}'], 'the key "a" stands twice'),
    (["train", "still", "--out", "x", "--ratios", "4"], "the lowest and the highest"),
    (["train", "still", "--out", "x", "--ratios", "16,4"], "the lowest and the highest"),
    (["train", "sempic", "--out", "x", "--targets", "q_prj"], 'Did you mean "q_proj"'),
    (["train", "sempic", "--out", "x", "--docs", "0"], "each at least 1"),
]


def test_a_bad_list_is_refused_before_torch_is_imported() -> None:
    code = """
import io, json, sys, contextlib
from kvnotes_interp import cli
seen = []
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["kvprobe", *arguments]
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = stop.code
    seen.append([code, " ".join(err.getvalue().split()), "torch" in sys.modules])
print(json.dumps(seen))
"""
    arguments = [one for one, _ in BAD_LISTS]
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(arguments)], capture_output=True, text=True, check=True
    )
    for (given, words), (exit_code, said, torch_is_there) in zip(BAD_LISTS, json.loads(done.stdout), strict=True):
        assert (exit_code, torch_is_there) == (2, False), (given, said)
        assert words in said, given
        assert said.startswith("error: ")


def test_a_word_that_is_no_text_is_refused() -> None:
    done = subprocess.run([sys.executable, "-m", "kvnotes_interp.cli", "tasks", b"\xff"], capture_output=True)
    assert (done.returncode, b"word 2 of the command line" in done.stderr) == (2, True)


def test_blanks_round_items_are_no_part_of_them() -> None:
    assert opt.read_list("--wordings", "bare, tagged ", str, such_as="x") == ("bare", "tagged")
    assert opt.numbers("--ks", " 1, 2", int, least=1) == (1, 2)
    assert opt.numbers("--docs", "", int, empty=True) == ()
    assert opt.words("--views", " none ", opt.VIEWS) == ()
    assert opt.operators("--operators", "splice@8, epic@0.5") == ("splice@8", "epic@0.5")
    assert opt.shares("--shares", "1") == (1.0,)
    assert opt.wording("--wording", "It is {value} now.") == "It is {value} now."
    with pytest.raises(InputError, match="choose from"):
        opt.wording("--wording", "{vlaue}")


def test_names_that_are_written_twice_are_the_same() -> None:
    from kvnotes_interp.operators import eviction, writer
    from kvnotes_interp.operators.edits import erratum

    assert set(opt.WORDINGS) == set(erratum.WORDINGS)
    assert opt.TARGETS == writer.TARGETS
    for compactor in eviction.COMPACTORS.values():
        if compactor.setting:
            default = inspect.signature(compactor._implementation).parameters[compactor.setting].default
            assert compactor.number is (type(default) if type(default) in (int, float) else None), compactor.name


@pytest.mark.parametrize(
    ("text", "old", "new", "named"),
    [
        ("so it is open, not shut", " open", " shut", "new"),
        ("reopened", " open", " shut", None),  # the control: no part of a word
        ("所以门是开的。", "开", "关", "old"),
        ("ドアは閉まっています", "開", "閉", "new"),
        ("it costs $10, no: +5", " $10", " +5", "new"),
    ],
)
def test_answers_are_found_in_scripts_without_spaces_and_with_signs(
    text: str, old: str, new: str, named: str | None
) -> None:
    from kvnotes_interp.probes.editing.thought import named_last

    assert named_last(text, old, new) == named
