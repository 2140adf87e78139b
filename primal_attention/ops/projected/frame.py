r"""What every op that begins with the tokens ends its backward pass with: the gradients of W x + b.

What is made of the rows W x + b gives their gradients side by side, in one tensor.

Letters: B batch, N tokens, D model dim, R rows of W.
"""

from __future__ import annotations

from torch import Tensor

from primal_attention.ops.products import affine


def projection_gradients(
    x: Tensor,
    weight: Tensor,
    d_rows: Tensor,  # [B, N, R], contiguous
    *,
    of_x: bool,
    of_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x and W; None where they are not wanted. That of b is the sum of the rows."""
    rows = d_rows.flatten(0, 1)
    dx = affine(rows, weight.mT).view(x.shape) if of_x else None
    d_weight = rows.mT @ x.flatten(0, 1) if of_weight else None
    return dx, d_weight


def given_or_empty(x: Tensor, *tensors: Tensor | None) -> list[Tensor]:
    """What an op returns for tensors that may be missing."""
    return [x.new_empty(0) if each is None else each for each in tensors]
