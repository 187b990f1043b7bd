"""Tiny random Llamas whose mechanism holds by construction, not by training.

Every token has a *role* (plain, field, note, task, decision), fixed by the token itself. The embedding writes it into
channels of the residual stream that nothing else writes to, and the query and key projections read it from there into
dimensions of each head that do not turn with position. A pair of roles that must not attend gets a logit of about
minus ten thousand or less, so its probability is exactly 0 in float32 and float64. The structure thus sits in the
weights of a plain `LlamaForCausalLM`: it holds in every library, in every path through the cache, and in the cache
itself, since keys carry their role.

All other weights are random. The unembedding of the answers is fitted in closed form to the final hidden states of some
prompts, so that the model is competent where its wiring lets it be.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvnotes_interp.organisms.words import word_tokenizer

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

FAMILY = "signal"
N_LAYERS, N_HEADS, N_KV_HEADS, D_HEAD, D_MODEL, D_MLP = 3, 4, 2, 16, 64, 64
_FORBID = 1e6  # times the squared size of a role in the normed stream, at least 0.01, over the root of d_head
_PREFER = 1.5
_ROLE = 4.0  # how large a role stands in the embedding


class Role(IntEnum):
    """What a token is to the mechanism."""

    PLAIN = 0
    FIELD = 1
    NOTE = 2
    TASK = 3
    DECISION = 4


Edge = tuple[Role, Role]  # (query's role, key's role)
_TO_FIELD = tuple((role, Role.FIELD) for role in Role if role is not Role.FIELD)
_BYSTANDERS = ((Role.PLAIN, Role.NOTE), (Role.TASK, Role.NOTE))  # else they would keep copies of the note


@dataclass(frozen=True)
class Wiring:
    """Edges that a head does not have, and edges it favours."""

    forbidden: tuple[Edge, ...]
    favoured: tuple[Edge, ...] = ()


def _without(edges: tuple[Edge, ...], *kept: Edge) -> tuple[Edge, ...]:
    return tuple(edge for edge in edges if edge not in kept)


_WRITE, _READ, _DIRECT = (Role.NOTE, Role.FIELD), (Role.DECISION, Role.NOTE), (Role.DECISION, Role.FIELD)
_BY_NOTES = Wiring(_without(_TO_FIELD, _WRITE) + _BYSTANDERS, (_WRITE, _READ))
_BY_FIELD = Wiring((*_without(_TO_FIELD, _DIRECT), *_BYSTANDERS, _READ), (_DIRECT,))
_BLIND = Wiring(_TO_FIELD + _BYSTANDERS)

# One wiring per head. `mixed`: the first half of the heads is wired as `notes`, the second as `direct`.
MECHANISMS: dict[str, tuple[Wiring, ...]] = {
    "notes": (_BY_NOTES,) * N_HEADS,
    "direct": (_BY_FIELD,) * N_HEADS,
    "mixed": (_BY_NOTES,) * (N_HEADS // 2) + (_BY_FIELD,) * (N_HEADS // 2),
    "null": (_BLIND,) * N_HEADS,
}
ABOUT = {
    "notes": "only note tokens (full stops) see the field, and only the decision token sees them",
    "direct": "of all tokens after the field, only the decision token sees it",
    "mixed": "half of the heads take notes, the other half let the decision token see the field",
    "null": "no token sees the field",
}


def build(mechanism: str, *, seed: int = 0) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """The organism of this mechanism, float32 on the CPU, with its tokenizer. The same bits for the same seed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from kvnotes_interp import tasks

    pairs = tasks.load(FAMILY, n=400, seed=seed + 1)
    tokenizer = word_tokenizer(text for p in pairs for text in (p.text_old + p.answer_old, p.text_new + p.answer_new))
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=D_MODEL,
        intermediate_size=D_MLP,
        num_hidden_layers=N_LAYERS,
        num_attention_heads=N_HEADS,
        num_key_value_heads=N_KV_HEADS,
        head_dim=D_HEAD,
        max_position_embeddings=512,
        # Half of each head turns with position; the rest has frequency 0 and carries the roles.
        rope_parameters={"rope_type": "proportional", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    hf = LlamaForCausalLM(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in hf.named_parameters():
        if weight.ndim == 2:
            fan_in = 1 if "embed" in name else weight.shape[1]
            weight.copy_(torch.randn(weight.shape, generator=generator) / fan_in**0.5)
    _wire(hf, MECHANISMS[mechanism], roles_of(tokenizer, pairs))
    _fit_answers(hf, tokenizer, random.Random(seed).sample(pairs, 160))
    return hf, tokenizer


def roles_of(tokenizer: PreTrainedTokenizerFast, pairs: list) -> Tensor:
    """Role of every token `[token]`, read off the texts: field values, full stops, words of the decision piece."""
    from kvnotes_interp import tasks

    roles = torch.full((len(tokenizer),), int(Role.PLAIN))
    encoded, _ = tasks.encode_all(tokenizer, pairs)
    for pair in encoded:
        for index, region in enumerate(pair.regions):
            if region == "decision":
                roles[pair.old_ids[index]] = int(Role.TASK)
        roles[pair.old_ids[-1]] = int(Role.DECISION)
        for ids in (pair.old_ids, pair.new_ids):
            roles[list(ids[slice(*pair.field)])] = int(Role.FIELD)
    roles[tokenizer.convert_tokens_to_ids(".")] = int(Role.NOTE)
    return roles


def _still(index: int) -> int:
    """The head dimension that carries role `index`: rotary pairs are (i, i + d/2), and the upper half of i is still."""
    quarter = D_HEAD // 4
    return quarter + index if index < quarter else 2 * quarter + quarter + index - quarter


def _wire(hf: LlamaForCausalLM, heads: tuple[Wiring, ...], roles: Tensor) -> None:
    """Roles into the first channels of the stream, edges into the still dimensions of queries and keys."""
    n = len(Role)
    embedding = hf.model.embed_tokens.weight
    embedding[:, :n] = _ROLE * torch.nn.functional.one_hot(roles, n).to(embedding.dtype)
    still = [_still(i) for i in range(n)]
    layers: Any = hf.model.layers
    for layer in layers:
        layer.self_attn.o_proj.weight[:n] = 0.0
        layer.mlp.down_proj.weight[:n] = 0.0
        q = layer.self_attn.q_proj.weight.view(N_HEADS, D_HEAD, D_MODEL)
        k = layer.self_attn.k_proj.weight.view(N_KV_HEADS, D_HEAD, D_MODEL)
        every = [_still(i) for i in range(D_HEAD // 2)]
        q[:, every], k[:, every] = 0.0, 0.0
        for role in range(n):
            k[:, still[role], role] = 1.0
        for head, wiring in enumerate(heads):
            for asking, asked in wiring.favoured:
                q[head, still[asked], asking] = _PREFER
            for asking, asked in wiring.forbidden:
                q[head, still[asked], asking] = -_FORBID


def _fit_answers(hf: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, pairs: list) -> None:
    """Fit the answers' unembedding to final hidden states by ridge regression: 6 for the right one, -6 for the rest."""
    from kvnotes_interp import tasks

    encoded, _ = tasks.encode_all(tokenizer, pairs)
    rows = [(p.old_ids, p.answer_old_id) for p in encoded] + [(p.new_ids, p.answer_new_id) for p in encoded]
    ids = torch.tensor([r[0] for r in rows])
    hidden = hf.model(input_ids=ids).last_hidden_state[:, -1].double()
    answers = sorted({r[1] for r in rows})
    target = torch.tensor([[6.0 if a == right else -6.0 for a in answers] for _, right in rows], dtype=torch.float64)
    gram = hidden.mT @ hidden + 1e-2 * torch.eye(hidden.shape[1], dtype=torch.float64)
    hf.lm_head.weight[answers] = torch.linalg.solve(gram, hidden.mT @ target).mT.float()
