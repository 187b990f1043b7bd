"""Least squares with weights that may not be negative, by block principal pivoting.

(Kim & Park, "Fast Nonnegative Matrix Factorization: An Active-Set-Like Method and Comparisons", SIAM J. Sci. Comput.
2011, section 3: whole groups of variables change sides at a time; when that stops helping, one variable at a time.)
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from kvnotes_interp.errors import UnsupportedError

_TRIES = 3  # exchanges of whole groups without progress before single ones


def nnls(a: Float[Tensor, "row column"], b: Float[Tensor, " row"]) -> Float[Tensor, " column"]:
    """The x >= 0 that minimises |a x - b|, exactly (up to rounding), in float64; the columns must be independent.

    Raises UnsupportedError when rounding keeps it from settling, which dependent columns cause.
    """
    a, b = a.double(), b.double()
    gram, target = a.mT @ a, a.mT @ b
    n = len(target)
    free = torch.ones(n, dtype=torch.bool, device=a.device)
    small = 1e-12 * float(target.abs().max()) if n else 0.0
    least, tries = n + 1, _TRIES
    for _ in range(10 * n + 100):
        x = torch.zeros_like(target)
        at = free.nonzero()[:, 0]
        if len(at):
            part, singular = torch.linalg.solve_ex(gram[at][:, at], target[at])
            if int(singular):
                break
            x[at] = part
        slope = gram @ x - target
        wrong = torch.where(free, x < 0, slope < -small)
        count = int(wrong.sum())
        if count == 0:
            return x
        if count < least:
            least, tries = count, _TRIES
        elif tries:
            tries -= 1
        else:
            last = int(wrong.nonzero()[-1])
            wrong = torch.zeros_like(wrong)
            wrong[last] = True
        free = free ^ wrong
    raise UnsupportedError(
        f"no non-negative weights found for {n} columns; they are nearly dependent: raise the ridge."
    )
