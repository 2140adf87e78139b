"""Projections and causal attention with dual weights one after the other, differentiable at will.

Letters: B batch, N tokens, D model dim, H heads, C head dim, P feature dim, S directions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from primal_attention.ops.dual_causal.reference import dual_causal_attention
from primal_attention.ops.projected.reference import ProjectedResult
from primal_attention.ops.projected_dual.reference import directions_of, inverse_counts
from primal_attention.ops.running_mean import token_counts
from primal_attention.precision import exact


def sides_of(rows: Tensor, num_heads: int, num_directions: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views q, k [B, N, H, P] and h [B, N, 2, H, S] of the rows [B, N, 2 H P + 2 H S]."""
    of_h = 2 * num_heads * num_directions
    of_q = (rows.shape[-1] - of_h) // 2
    q, k, h = rows.tensor_split((of_q, 2 * of_q), -1)
    q, k = (torch.unflatten(z, -1, (num_heads, -1)) for z in (q, k))
    return q, k, torch.unflatten(h, -1, (2, num_heads, -1))


@exact
def projected_dual_causal_attention(
    x: Tensor,
    weight: Tensor,
    shift: Tensor | None,
    c_e: Tensor | None,
    c_r: Tensor | None,
    bias: Tensor | None,
    num_heads: int,
    token_mask: Tensor | None,
    map_q: str,
    map_k: str,
) -> ProjectedResult:
    """The op by its formulas, with both Gram matrices."""
    rows = F.linear(x, weight, shift)
    q, k, h = sides_of(rows, num_heads, directions_of(c_e, c_r))
    counts = token_counts(q, token_mask, None)
    result = dual_causal_attention(
        q,
        k,
        h,
        c_e,
        c_r,
        bias,
        None,
        None,
        counts=counts,
        token_mask=token_mask,
        map_q=map_q,
        map_k=map_k,
    )
    inverse_n = inverse_counts(x, token_mask)[:, None, None, None]
    weights = result.k_side * inverse_n, result.q_side * inverse_n
    return ProjectedResult(result.out, result.gram_q, result.gram_k, *weights)
