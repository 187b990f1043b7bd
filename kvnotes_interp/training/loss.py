"""KL divergence from the teacher's distribution to the student's, over the tokens that were kept of the teacher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

if TYPE_CHECKING:
    from kvnotes_interp.training.teacher import Target


def kl_to_teacher(
    targets: Sequence[Target], logits: Sequence[Float[Tensor, "row token"]], *, tau: float
) -> Float[Tensor, " example"]:
    """tau^2 KL(teacher || student) at temperature `tau`, summed over the rows of every example, in nats.

    Where only the teacher's top tokens were kept, all others are one outcome for teacher and student alike: the value
    is then a lower bound of the full KL, and exact when all were kept. In float32 (float64 for float64 logits).
    (SemPIC, arXiv 2607.28069: summed over answer tokens; Still, arXiv 2606.07878: top-200 support.)
    """
    rows = [len(target.log_probs) for target in targets]
    student = torch.cat(list(logits))
    exact = torch.promote_types(student.dtype, torch.float32)
    log_q = (student.to(exact) / tau).log_softmax(-1)
    log_p = _stacked([target.log_probs for target in targets], log_q)
    if targets[0].ids is None:
        found = (log_p.exp() * (log_p - log_q)).sum(-1)
    else:
        ids = torch.cat([target.ids for target in targets if target.ids is not None]).to(log_q.device)
        log_rest = _stacked([target.log_rest for target in targets], log_q)
        # The others' own sum: 1 minus the sum of the top ones would lose all digits where they hold nearly all.
        rest = log_q.scatter(-1, ids, float("-inf")).logsumexp(-1)
        found = (log_p.exp() * (log_p - log_q.gather(-1, ids))).sum(-1) + log_rest.exp() * (log_rest - rest)
    owner = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(rows)).to(found.device)
    return tau**2 * found.new_zeros(len(rows)).index_add(0, owner, found)


def _stacked(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat(list(parts)).to(like)
