"""Held-out accuracy of the organism, from the public task generators alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvnotes_interp import tasks
from kvnotes_interp.tasks import documents

Item = tuple[list[int], int]  # prompt ids, first token of the answer


def next_logits(model: Any, prompts: Sequence[list[int]], *, rows: int = 16) -> torch.Tensor:
    """Logits after each prompt, `[prompt, vocab]`; prompts are grouped by length, so nothing is padded."""
    out: list[Any] = [None] * len(prompts)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    with torch.inference_mode():
        while order:
            size = len(prompts[order[0]])
            group = [i for i in order[:rows] if len(prompts[i]) == size]
            order = order[len(group) :]
            ids = torch.tensor([prompts[i] for i in group])
            hidden = model.model(ids, use_cache=False).last_hidden_state[:, -1]
            for i, row in zip(group, model.lm_head(hidden), strict=True):
                out[i] = row.float()
    return torch.stack(out)


def pair_items(tokenizer: Any, name: str, *, n: int, seed: int, fillers: int) -> list[tuple[Item, Item]]:
    """(old, new) items of a pair family's test split."""
    encoded, aside = tasks.encode_all(tokenizer, tasks.load(name, n=n, seed=seed, split="test", fillers=fillers))
    assert not aside, aside[0].detail
    return [((list(p.old_ids), p.answer_old_id), (list(p.new_ids), p.answer_new_id)) for p in encoded]


def question_items(tokenizer: Any, questions: Sequence[documents.Question]) -> list[Item]:
    """Prompt ids and first answer token of each question."""
    return [(tokenizer(q.text)["input_ids"], tokenizer(q.answer)["input_ids"][0]) for q in questions]


def pair_accuracy(model: Any, items: Sequence[tuple[Item, Item]], *, gap: float = 0.25) -> float:
    """Share of pairs with s_old < 0 < s_new, s_new - s_old >= gap, and both answers the most likely of all tokens."""
    flat = [item for pair in items for item in pair]
    logits = next_logits(model, [ids for ids, _ in flat])
    good = 0
    for place, ((_, old), (_, new)) in enumerate(items):
        first, second = logits[2 * place], logits[2 * place + 1]
        s_old, s_new = float(first[new] - first[old]), float(second[new] - second[old])
        top = int(first.argmax()) == old and int(second.argmax()) == new
        good += s_old < 0 < s_new and s_new - s_old >= gap and top
    return good / len(items)


def accuracy(model: Any, items: Sequence[Item]) -> float:
    """Share of prompts whose answer is the most likely next token of the whole vocabulary."""
    best = next_logits(model, [ids for ids, _ in items]).argmax(-1).tolist()
    return sum(a == answer for a, (_, answer) in zip(best, items, strict=True)) / len(items)


def accuracies(model: Any, tokenizer: Any, *, n: int, longest: int = 512, seed: int = 99) -> dict[str, float]:
    """Accuracy per task and size on `n` held-out instances each; sizes whose prompts exceed `longest` are left out.

    Keys: gate@F and badge@F (F neutral lines), biography@D (D documents), needle@W (W words) and needle+3@W (three more
    needles).
    """
    was = model.training
    model.eval()
    found = {}
    for fillers in (0, 4, 12, 30, 48):
        for name in ("gate", "badge"):
            if 58 + 9 * fillers <= longest:
                found[f"{name}@{fillers}"] = pair_accuracy(
                    model, pair_items(tokenizer, name, n=n, seed=seed, fillers=fillers)
                )
    for count in (1, 2, 3, 5, 7, 12, 16):
        if 28 + 30 * count <= longest:
            items = question_items(
                tokenizer, documents.load("biography", n=n, seed=seed, split="test", documents=count)
            )
            found[f"biography@{count}"] = accuracy(model, items)
    for size in (40, 100, 200, 400):
        for others in (0, 3):
            if 30 + 1.1 * size <= longest and size >= 8 * (1 + others):
                questions = documents.load("needle", n=n, seed=seed, split="test", length=size, others=others)
                name = f"needle+{others}@{size}" if others else f"needle@{size}"
                found[name] = accuracy(model, question_items(tokenizer, questions))
    model.train(was)
    return {key: round(value, 4) for key, value in found.items()}
