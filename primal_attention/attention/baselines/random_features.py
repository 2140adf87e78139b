r"""Attention with the positive random features of the softmax kernel, in few passes over them.

The features $g(z) = \exp(w^\top z - |z|^2 / 2) + \epsilon$ are by far the largest tensors. So
epsilon is added to their sums, $\sum_j g(k_j) v_j^\top = \sum_j \exp(\cdot) v_j^\top + \epsilon
\sum_j v_j^\top$, and all factors that cancel between numerator and normaliser, $P^{-1/2}$ among
them, are left out or applied to the moments.

Letters: B batch, N tokens, T source tokens, H heads, C head dim, P random features.
"""

import torch
from torch import Tensor

from primal_attention.attention.base.masks import zero_padding
from primal_attention.precision import accumulate, exact


@exact
def attend_exponentials(
    q: Tensor,  # [B, N, H, C]
    k: Tensor,  # [B, T, H, C]
    v: Tensor,  # [B, T, H, C]
    source_mask: Tensor | None,  # [B, T], True = real token
    directions: Tensor,  # [P, C]
    *,
    eps: float,
    least: float,
) -> Tensor:
    r"""$y_i = \frac{g(q_i)^\top \sum_j g(k_j) v_j^\top}{g(q_i)^\top \sum_j g(k_j)}$, [B, N, H, C].

    The normaliser is at least ``least`` once the largest $\sum_j g(k_j)$ of a head is 1.
    """
    ones = torch.ones_like(v[..., :1])
    values = accumulate(zero_padding(torch.cat([v, ones], dim=-1), source_mask).transpose(1, 2))
    moments = values.mT @ exponentials(zero_padding(k, source_mask), directions)  # [B, H, C + 1, P]
    moments = moments + eps * values.sum(-2)[..., None]
    largest = moments.detach()[..., -1:, :].amax(-1, keepdim=True)
    moments = moments / largest.clamp(min=least)
    read = exponentials(q, directions) @ moments.mT + eps * moments.sum(-1)[..., None, :]
    return (read[..., :-1] / read[..., -1:].clamp(min=least)).transpose(1, 2).to(v.dtype)


def exponentials(z: Tensor, directions: Tensor) -> Tensor:
    r"""$\exp(w_p^\top z - |z|^2 / 2)$ of z [B, N, H, C] over $C^{1/4}$, [B, H, N, P].

    The square is one more channel of the product.
    """
    z = accumulate(z.transpose(1, 2))
    scale, P = z.shape[-1] ** -0.25, len(directions)
    directions = scale * directions.to(z.dtype)
    weights = torch.cat([directions, directions.new_full((P, 1), -(scale**2) / 2)], dim=-1)
    return (torch.cat([z, torch.linalg.vecdot(z, z)[..., None]], dim=-1) @ weights.mT).exp_()
