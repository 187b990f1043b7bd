"""Train the organism from scratch: `python -m experiments.organisms.train --out runs/organism`.

One process, one thread by default, fixed seeds. A killed run goes on where its last checkpoint was written. The weights
with the tokenizer are left in OUT/model, the log in OUT/log.jsonl.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy

from experiments.organisms import data, vocabulary
from experiments.organisms.evaluate import accuracies

SHORTEST = 40.0  # tokens in the rows at the beginning


@dataclass(frozen=True)
class Plan:
    """Everything that decides the result, besides versions and the machine."""

    seed: int = 0
    tokens: int = 10_000_000
    tokens_per_step: int = 3072
    layers: int = 4
    width: int = 128
    heads: int = 4
    mlp: int = 384
    lr: float = 3e-3
    warmup: float = 0.02
    muon: bool = True
    decay: float = 0.01
    other: float = 0.05
    longest: int = 512
    growth: float = 0.004
    ready: float = 0.4
    drills: float = 0.8
    spread: float = 0.5
    shared: float = 0.5


def lengths(top: float, rng: Random) -> int:
    """Row length of a step: the longest allowed so far, or one between that and the shortest."""
    return round(SHORTEST * (top / SHORTEST) ** rng.random()) if rng.random() < 0.5 else round(top)


def longer(plan: Plan, top: float, recent: float) -> float:
    """The next step's longest row: it grows only while the answers of recent steps are mostly right.

    What a token must find stands among few others in a short row; in long rows nothing is found for thousands of steps.
    """
    return min(plan.longest, top * (1 + plan.growth)) if recent < plan.ready else top


def batch(
    plan: Plan, step: int, top: float, vocab: dict[str, int]
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], int]:
    """Shorter and longer rows of a step, as token ids and weights in the loss; and the number of tokens not padding."""
    rng = Random(f"train|{plan.seed}|{step}")
    length = lengths(top, rng)
    # Drills give way to the tasks as rows grow.
    drilled = plan.drills - (plan.drills - 0.15) * math.log(top / SHORTEST) / math.log(plan.longest / SHORTEST)
    rows = []
    for _ in range(max(4, plan.tokens_per_step // length)):
        names, shares = (data.DRILLS, data.DRILL_WEIGHTS) if rng.random() < drilled else (data.TASKS, data.WEIGHTS)
        task = rng.choices(names, shares)[0]
        rows.append(data.ids_of(data.row(rng, task, length), vocab))
    rows.sort(key=lambda row: len(row[0]))
    middle = len(rows) // 2
    return [_padded(rows[:middle]), _padded(rows[middle:])], sum(len(row) for row, _ in rows)


def _padded(rows: list[tuple[list[int], list[float]]]) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.full((len(rows), longest), vocabulary.PAD)
    weights = torch.zeros((len(rows), longest))
    for place, (row, marks) in enumerate(rows):
        ids[place, : len(row)] = torch.tensor(row)
        weights[place, : len(row)] = torch.tensor(marks)
    return ids, weights


def build(plan: Plan, vocab: int) -> Any:
    """The untrained model. Padding stands only at the right, where causal attention never sees it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(plan.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab,
            hidden_size=plan.width,
            intermediate_size=plan.mlp,
            num_hidden_layers=plan.layers,
            num_attention_heads=plan.heads,
            num_key_value_heads=plan.heads,
            max_position_embeddings=1024,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            tie_word_embeddings=False,
            initializer_range=0.02,
            bos_token_id=None,
            eos_token_id=vocabulary.EOS,
            pad_token_id=vocabulary.PAD,
        )
    )
    # Words must stay apart from each other: embeddings small against their learning rate become alike in a few steps.
    # What all words share lets a head look at a distance whatever the words are: there are no biases to do it.
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        embedding.normal_(std=plan.spread).add_(plan.shared * torch.randn(plan.width))
    return model


def optimizers(plan: Plan, model: Any) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embeddings, head and norms; or AdamW for all."""
    inner = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name]
    rest = [p for name, p in model.named_parameters() if p.ndim != 2 or "layers" not in name]
    if not plan.muon:
        groups = [{"params": inner, "weight_decay": plan.decay}, {"params": rest, "weight_decay": 0.0}]
        return [torch.optim.AdamW(groups, lr=plan.lr, betas=(0.9, 0.98))]
    return [
        torch.optim.Muon(inner, lr=plan.lr, weight_decay=plan.decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=plan.lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def rate(plan: Plan, done: float) -> float:
    """Learning rate as a share of `plan.lr`: linear warm-up, then a cosine down to 2 %."""
    if done < plan.warmup:
        return max(done / plan.warmup, 0.01)
    return 0.02 + 0.49 * (1 + math.cos(math.pi * min(1.0, (done - plan.warmup) / (1 - plan.warmup))))


def step_loss(
    plan: Plan, model: Any, ids: torch.Tensor, weights: torch.Tensor, total: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss to minimise, its part of the answers) of half a step whose weights sum to `total` over both halves."""
    hidden = model.model(ids[:, :-1], use_cache=False).last_hidden_state
    target = ids[:, 1:]
    real = target != vocabulary.PAD
    marks = weights[:, 1:][real]
    each = cross_entropy(model.lm_head(hidden[real]), target[real], reduction="none")
    answers = (each * marks).sum() / total
    return answers + 0.5 * plan.other * each[marks == 0].mean(), answers.detach()


def train(plan: Plan, out: Path, *, every: int = 250) -> None:
    """Run the plan, or go on with it."""
    out.mkdir(parents=True, exist_ok=True)
    vocab = vocabulary.vocabulary(data.every_text())
    tokenizer = vocabulary.save(vocab, out / "model")
    model = build(plan, len(vocab))
    opts = optimizers(plan, model)
    print(sum(p.numel() for p in model.parameters()), "parameters,", len(vocab), "tokens", flush=True)
    state = {"step": 0, "tokens": 0, "seconds": 0.0, "top": SHORTEST, "recent": 9.0}
    if (out / "checkpoint.safetensors").is_file():
        state = load_checkpoint(out, model, opts)
    start, seen = time.monotonic() - state["seconds"], []
    with (out / "log.jsonl").open("a", encoding="utf-8") as log:
        while state["tokens"] < plan.tokens:
            done = state["tokens"] / plan.tokens
            halves, count = batch(plan, state["step"], state["top"], vocab)
            total, answers = sum(float(weights.sum()) for _, weights in halves), 0.0
            for ids, weights in halves:
                loss, part = step_loss(plan, model, ids, weights, total)
                loss.backward()
                answers += float(part)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for opt in opts:
                for group in opt.param_groups:
                    group["lr"] = plan.lr * rate(plan, done)
                opt.step()
                opt.zero_grad(set_to_none=True)
            state["step"] += 1
            state["tokens"] += count
            seen.append(answers)
            state["recent"] = 0.95 * state["recent"] + 0.05 * answers
            state["top"] = longer(plan, state["top"], state["recent"])
            last = state["tokens"] >= plan.tokens
            if state["step"] % 50 == 0 or last:
                state["seconds"] = time.monotonic() - start
                mean = round(sum(seen) / len(seen), 4)
                line: dict[str, Any] = {**state, "length": halves[1][0].shape[1], "answers": mean}
                seen = []
                if state["step"] % every == 0 or last:
                    top = min(512, max(100, round(1.5 * state["top"]))) if not last else 512
                    line["held_out"] = accuracies(model, tokenizer, n=48, longest=top)
                    save_checkpoint(out, model, opts, state)
                log.write(json.dumps(line) + "\n")
                log.flush()
    state["seconds"] = time.monotonic() - start
    model.generation_config.eos_token_id = vocabulary.EOS
    model.generation_config.pad_token_id = vocabulary.PAD
    model.save_pretrained(out / "model")
    (out / "run.json").write_text(json.dumps({"plan": asdict(plan), **state}, indent=1) + "\n", encoding="utf-8")


def save_checkpoint(out: Path, model: Any, opts: list[torch.optim.Optimizer], state: dict[str, Any]) -> None:
    """Weights and optimizer state as safetensors, the counters as its metadata, written aside and renamed."""
    tensors = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    for number, opt in enumerate(opts):
        for index, entry in opt.state_dict()["state"].items():
            tensors |= {f"opt.{number}.{index}.{key}": torch.as_tensor(value) for key, value in entry.items()}
    save_file(
        {key: value.clone().contiguous() for key, value in tensors.items()},
        out / "checkpoint.tmp",
        metadata={"state": json.dumps(state)},
    )
    os.replace(out / "checkpoint.tmp", out / "checkpoint.safetensors")


def load_checkpoint(out: Path, model: Any, opts: list[torch.optim.Optimizer]) -> dict[str, Any]:
    """Put a checkpoint back and return the counters."""
    from safetensors import safe_open

    tensors = load_file(out / "checkpoint.safetensors")
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(tensors[f"model.{name}"])
    for number, opt in enumerate(opts):
        whole = opt.state_dict()
        for key, value in tensors.items():
            if key.startswith(f"opt.{number}."):
                _, _, index, name = key.split(".")
                whole["state"].setdefault(int(index), {})[name] = value
        opt.load_state_dict(whole)
    with safe_open(out / "checkpoint.safetensors", framework="pt") as file:
        return json.loads(file.metadata()["state"])


def main() -> None:
    """Read the options and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the run; an unfinished run in it goes on")
    parser.add_argument("--threads", type=int, default=1)
    for one in fields(Plan):
        kind = (lambda text: text == "true") if one.type == "bool" else {"int": int, "float": float}[str(one.type)]
        parser.add_argument(f"--{one.name.replace('_', '-')}", type=kind, default=one.default)
    given = vars(parser.parse_args())
    torch.set_num_threads(given.pop("threads"))
    train(Plan(**{k: v for k, v in given.items() if k != "out"}), given["out"])


if __name__ == "__main__":
    main()
