"""What is measured: one old and one new prompt, and every layer x position cell between them.

The prompts differ in one early token. A cell copies the key and the value at one layer and one position from the new
run into the old run; its score is the logit of the new answer minus that of the old one, at the last token.
"""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from kvnotes_interp import engine
from kvnotes_interp.cache import KVCache
from kvnotes_interp.errors import InputError
from kvnotes_interp.sites import Site

if TYPE_CHECKING:
    from kvnotes_interp.model import Model

Cell = tuple[int, int]  # layer, position

# The field is " Mary" or " John"; the filler below names nobody.
_HEAD = "The new manager of the shop is called Mary. "
_FILLER = (
    "The shop lies on a quiet street near the river and opens at nine. It sells bread, fruit, paper and lamps. "
    "On market days the square fills early, and the bells of the old town ring twice before noon. "
    "The walls were painted last spring, the floor was cleaned, and a long table was put under the window. "
)
_TAIL = " The new manager of the shop is called"


@dataclass(frozen=True, eq=False)
class Problem:
    """One prompt pair on one model; everything the methods share."""

    model: Model
    old: tuple[int, ...]
    new: tuple[int, ...]
    answers: tuple[int, int]

    @property
    def n_tokens(self) -> int:
        return len(self.old)

    @cached_property
    def field(self) -> int:
        """The one position at which the prompts differ."""
        return next(i for i, (a, b) in enumerate(zip(self.old, self.new, strict=True)) if a != b)

    @cached_property
    def base(self) -> KVCache:
        """Cache of the old prompt but for its last token."""
        return engine.prefill(self.model, self.old[:-1])

    @cached_property
    def donor(self) -> KVCache:
        """Cache of the new prompt but for its last token."""
        return engine.prefill(self.model, self.new[:-1])

    @cached_property
    def cells(self) -> list[Cell]:
        """The full grid: every layer at every position before the last token."""
        return [(layer, pos) for layer in range(self.model.shape.n_layers) for pos in range(self.n_tokens - 1)]

    def ids(self, which: str = "old") -> Tensor:
        """Token ids `[1 pos]` on the model's device."""
        return torch.tensor([self.old if which == "old" else self.new], device=self.model.device)

    def difference(self, logits: Tensor) -> Tensor:
        """Logit of the new answer minus that of the old one, from `[*rows vocab]`, on the CPU, in at least float32."""
        both = logits[..., list(self.answers)].cpu()
        both = both.to(torch.promote_types(both.dtype, torch.float32))
        return both[..., 1] - both[..., 0]

    def sample(self, n: int, *, seed: int) -> list[Cell]:
        """`n` cells drawn evenly over the layers (all when the grid is smaller)."""
        if n >= len(self.cells):
            return self.cells
        rng, layers = random.Random(seed), list(range(self.model.shape.n_layers))
        order = [layer for _ in range(-(-n // len(layers))) for layer in rng.sample(layers, len(layers))][:n]
        return [(layer, rng.randrange(self.n_tokens - 1)) for layer in order]

    def shared_sample(self, n: int, *, seed: int) -> list[Cell]:
        """Cells on which the methods are compared: a third are the field's strongest, so that there is an effect."""
        column = [(layer, self.field) for layer in range(self.model.shape.n_layers)]
        sites = [Site(()), *(Site((pos,), layers=(layer,)) for layer, pos in column)]
        found = engine.sweep(self.model, self.base, self.donor, sites, self.old[-1:], self.answers).difference
        strongest = (found[1:] - found[0]).abs().argsort(descending=True)[: -(-n // 3)].tolist()
        return [*(column[i] for i in strongest), *self.sample(n - len(strongest), seed=seed)]


def english(model: Model, n_tokens: int) -> Problem:
    """A prompt pair of exactly `n_tokens` tokens in English."""
    tok = model.tokenizer

    def ids(text: str) -> list[int]:
        return list(tok(text, add_special_tokens=False)["input_ids"])

    head, tail, filler = ids(_HEAD), ids(_TAIL), ids(_FILLER)
    room = n_tokens - len(head) - len(tail)
    if room < 0:
        raise InputError(f"a prompt of {n_tokens} tokens: at least {len(head) + len(tail)} are needed.")
    (mary,), (john,) = ids(" Mary"), ids(" John")
    old = (*head, *(filler * (room // len(filler) + 1))[:room], *tail)
    at = old.index(mary)
    return Problem(model, old, (*old[:at], john, *old[at + 1 :]), (mary, john))


def random_ids(model: Model, n_tokens: int, *, seed: int = 0) -> Problem:
    """A prompt pair of random tokens, for models without a tokenizer."""
    rng, vocab = random.Random(seed), model.shape.vocab
    old = tuple(rng.randrange(3, vocab) for _ in range(n_tokens))
    at = 2
    new = (*old[:at], 3 + (old[at] - 2) % (vocab - 3), *old[at + 1 :])
    return Problem(model, old, new, (1, 2))


def twin(hf: nn.Module) -> nn.Module:
    """A second module tree over the same weights, for libraries that rewrite the model they are given."""
    shared = {id(t): t for t in (*hf.parameters(), *hf.buffers())}
    return copy.deepcopy(hf, shared)
