"""The trained organism: small, as recorded, right on held-out instances, at chance where it must be."""

from __future__ import annotations

import time
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch

import kvnotes_interp as kv
from kvnotes_interp import tasks
from kvnotes_interp.organisms import trained
from kvnotes_interp.tasks import documents

BOUND = 0.97  # a few dozen instances, each accuracy recorded on hundreds is above 0.99; see test_the_record
SEED = 2024


@pytest.fixture(scope="module")
def organism() -> tuple[Any, Any]:
    return trained.build()


def scores(organism: tuple[Any, Any], prompts: Sequence[str]) -> list[torch.Tensor]:
    """Logits after each prompt, one plain forward each."""
    model, tokenizer = organism
    with torch.inference_mode():
        return [model(torch.tensor([tokenizer(p)["input_ids"]])).logits[0, -1] for p in prompts]


def token(organism: tuple[Any, Any], answer: str) -> int:
    ids = organism[1](answer)["input_ids"]
    assert len(ids) == 1
    return ids[0]


def share_right(organism: tuple[Any, Any], prompts: Sequence[str], answers: Sequence[str]) -> float:
    best = [int(row.argmax()) for row in scores(organism, prompts)]
    return sum(a == token(organism, b) for a, b in zip(best, answers, strict=True)) / len(best)


def test_it_is_small_and_quick_to_load_and_the_files_are_those_recorded() -> None:
    trained.build()  # imports
    start = time.perf_counter()
    model, _ = trained.build()
    assert time.perf_counter() - start < 2
    record = trained.record()["weights"]
    file = trained.FOLDER / "model.safetensors"
    assert sum(p.numel() for p in model.parameters()) == record["parameters"] <= 2_000_000
    assert file.stat().st_size == record["bytes"] <= 8 * 1024 * 1024
    assert trained.sha256() == record["sha256"]
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert type(model).__module__.startswith("transformers.models.llama")


def test_other_weights_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    for file in trained.FOLDER.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr(trained, "FOLDER", tmp_path)
    weights = bytearray((tmp_path / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (tmp_path / "model.safetensors").write_bytes(weights)
    with pytest.raises(kv.InputError, match="sha256"):
        trained.build()
    (tmp_path / "trained.json").unlink()
    with pytest.raises(kv.InputError, match="is missing"):
        trained.build()


def test_the_record() -> None:
    record = trained.record()
    assert record["training"]["seconds"] < 3600
    assert record["held_out"]["n_each"] >= 200
    within = record["held_out"]["accuracy"]
    assert {name.split("@")[0] for name in within} == {"gate", "badge", "biography", "needle", "needle+3"}
    assert min(within.values()) > 0.99, within


@pytest.mark.parametrize(("name", "fillers"), [("gate", 0), ("gate", 12), ("gate", 48), ("badge", 12), ("badge", 48)])
def test_pairs_change_their_answer(organism: tuple[Any, Any], name: str, fillers: int) -> None:
    encoded, aside = tasks.encode_all(organism[1], tasks.load(name, n=32, seed=SEED, split="test", fillers=fillers))
    assert not aside
    assert fillers < 48 or 470 < max(p.length for p in encoded) <= 512
    good = flipped = 0
    for p in encoded:
        old, new = scores(organism, [p.pair.text_old, p.pair.text_new])
        s_old = float(old[p.answer_new_id] - old[p.answer_old_id])
        s_new = float(new[p.answer_new_id] - new[p.answer_old_id])
        good += s_old < 0 < s_new and s_new - s_old >= 0.25
        flipped += s_new < 0 < s_old  # control: the answers of the pair exchanged
    assert good / 32 > BOUND
    assert flipped / 32 < 1 - BOUND


def test_the_rule_decides_with_the_field_as_it_is(organism: tuple[Any, Any]) -> None:
    """2x2: naming the other value as trigger turns the action of the same field around."""
    right, prompts, answers = 0, [], []
    for pair in tasks.load("gate", n=24, seed=SEED, split="test"):
        text, old, new = pair.text_old, pair.field_old, pair.field_new
        rule = text[text.index("If the signal") : text.index("otherwise")]
        named = rule.split("signal is ")[1].split(",")[0]
        other = rule.replace(f"is {named},", f"is {new if named == old else old},")
        prompts += [text, text.replace(rule, other)]
        answers += [pair.answer_old, pair.answer_new]
    best = [int(row.argmax()) for row in scores(organism, prompts)]
    right = sum(a == token(organism, b) for a, b in zip(best, answers, strict=True))
    assert right / len(best) > BOUND


QUESTIONS = {
    "biography, 1 document": ("biography", {"documents": 1}),
    "biography, 5 documents": ("biography", {"documents": 5}),
    "biography, 16 documents": ("biography", {"documents": 16}),
    "needle, 60 words": ("needle", {"length": 60}),
    "needle, 400 words": ("needle", {"length": 400}),
    "needle, 400 words, 3 others": ("needle", {"length": 400, "others": 3}),
    "needle, first sentence": ("needle", {"length": 300, "depth": 0.0}),
}


@pytest.mark.parametrize("case", sorted(QUESTIONS))
def test_questions_about_held_out_contents(organism: tuple[Any, Any], case: str) -> None:
    name, options = QUESTIONS[case]
    drawn = documents.load(name, n=36, seed=SEED, split="test", **options)
    longest = max(len(organism[1](q.text)["input_ids"]) for q in drawn)
    assert longest <= 512
    assert ("16" not in case and "400" not in case) or longest > 440
    assert share_right(organism, [q.text for q in drawn], [q.answer for q in drawn]) > BOUND


def test_another_persons_question_is_at_chance(organism: tuple[Any, Any]) -> None:
    """Controls: answers of other questions, and the gold document taken away."""
    drawn = documents.load("biography", n=48, seed=SEED, split="test", documents=5)
    shuffled = Random(0).sample([q.answer for q in drawn], len(drawn))
    assert share_right(organism, [q.text for q in drawn], shuffled) < 0.2
    without = ["".join(p for i, p in enumerate(q.pieces) if i != q.gold[0] + 1) for q in drawn]
    assert share_right(organism, without, [q.answer for q in drawn]) < 0.2
    others = [q.distractors[0] for q in drawn]
    assert share_right(organism, [q.text for q in drawn], others) < 0.05


# Document tasks in the organism's words, made of what it learned.
LEARNED = ("biography", "gated", "multikey", "needle")


def test_greedy_answers_end(organism: tuple[Any, Any]) -> None:
    model, tokenizer = organism
    for name in LEARNED:
        for q in documents.load(name, n=4, seed=SEED, split="test"):
            ids = torch.tensor([tokenizer(q.text)["input_ids"]])
            with torch.inference_mode():
                out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
            assert tokenizer.decode(out[0, ids.shape[1] :]) == q.answer + "</s>"


def test_tokenizer_round_trip_pieces_and_offsets(organism: tuple[Any, Any]) -> None:
    tokenizer = organism[1]
    drawn = [q for name in LEARNED for q in documents.load(name, n=40, seed=SEED)]
    for q in drawn:
        text = q.text + q.answer
        batch = tokenizer(text, return_offsets_mapping=True)
        assert tokenizer.unk_token_id not in batch["input_ids"]
        assert tokenizer.decode(batch["input_ids"]) == text
        assert [i for piece in (*q.pieces, q.answer) for i in tokenizer(piece)["input_ids"]] == batch["input_ids"]
        cut = [text[a:b] for a, b in batch["offset_mapping"]]
        assert "".join(cut) == text
        assert cut == tokenizer.convert_ids_to_tokens(batch["input_ids"])
    pairs = [p for name in ("gate", "badge") for p in tasks.load(name, n=100, seed=SEED, fillers=20)]
    for pair in pairs:
        ids = tokenizer(pair.text_new + pair.answer_new)["input_ids"]
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == pair.text_new + pair.answer_new
    # Controls: a cut inside a word or behind a space gives other tokens, and unknown words are lost.
    q = drawn[0]
    assert (
        tokenizer(q.text + " ")["input_ids"] + tokenizer(q.answer[1:])["input_ids"]
        != tokenizer(q.text + q.answer)["input_ids"]
    )
    assert tokenizer(" zebra")["input_ids"] == [tokenizer.unk_token_id]


def test_the_library_takes_it_as_any_model(organism: tuple[Any, Any]) -> None:
    model = kv.load(organism[0], tokenizer=organism[1])
    assert model.check(full=False).passed
    result = kv.probes.local_patching(
        model, tasks.load("gate", n=4, seed=SEED, split="test"), views=("region",), progress=False
    )
    assert result.summary().passed
