"""Projections, dual weights and attention one after the other, differentiable at will.

Letters: B batch, N tokens, D model dim, H heads, C head dim, P feature dim, S directions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from primal_attention.ops.collapse.composed import collapse_composed
from primal_attention.ops.moment.reference import moment
from primal_attention.ops.primal.chunked import in_one_piece
from primal_attention.ops.projected.reference import ProjectedResult
from primal_attention.precision import accumulation_dtype, exact


class Heads(NamedTuple):
    """Views of one tensor of rows."""

    q: Tensor  # [B, N, H, P]
    k: Tensor
    h_e: Tensor  # [B, N, H, S]
    h_r: Tensor


def heads_of(rows: Tensor, num_heads: int, num_directions: int) -> Heads:
    """What stands side by side in the rows [B, N, 2 H P + 2 H S]."""
    of_h = num_heads * num_directions
    of_q = rows.shape[-1] // 2 - of_h
    ends = of_q, 2 * of_q, 2 * of_q + of_h
    sides = rows.tensor_split(ends, -1)
    return Heads(*(torch.unflatten(side, -1, (num_heads, -1)) for side in sides))


def directions_of(c_e: Tensor | None, c_r: Tensor | None) -> int:
    """S, from the output maps, of which there is at least one."""
    c = c_r if c_e is None else c_e
    assert c is not None
    return c.shape[0]


def inverse_counts(x: Tensor, token_mask: Tensor | None) -> Tensor:
    """1 / n for the n real tokens of each sequence, [B], and 1 where there are none."""
    dtype = accumulation_dtype(x.dtype)
    if token_mask is None:
        return x.new_full(x.shape[:1], 1 / max(x.shape[1], 1), dtype=dtype)
    counts = token_mask.sum(1, dtype=dtype)
    return counts.clamp_(min=1).reciprocal_()


@exact
def projected_dual_attention(
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
    q, k, h_e, h_r = heads_of(rows, num_heads, directions_of(c_e, c_r))
    inverse_n = inverse_counts(x, token_mask)[:, None, None, None]
    e = inverse_n * moment(k, h_r, token_mask=token_mask, feature_map=map_k)
    r = inverse_n * moment(q, h_e, token_mask=token_mask, feature_map=map_q)
    collapsed = collapse_composed(e, r, c_e, c_r)
    a_e, a_r = (None if c is None else a for a, c in zip(collapsed, (c_e, c_r), strict=True))
    result = in_one_piece(q, k, a_e, a_r, bias, token_mask, map_q, map_k)
    return ProjectedResult(*result, e, r)
