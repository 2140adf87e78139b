"""Projections, weights and attention one after the other, differentiable as often as one likes.

Letters: B batch, N tokens, D model dim, H heads, C head dim, P feature dim, S directions,
M landmarks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from primal_attention.ops.collapse.composed import collapse_composed
from primal_attention.ops.primal.chunked import in_one_piece
from primal_attention.ops.running_mean.reference import running_mean, token_counts
from primal_attention.ops.sampled.reference import sampled_weights
from primal_attention.precision import accumulate, exact


class ProjectedResult(NamedTuple):
    """What the layer outputs and what its objective needs."""

    out: Tensor  # [B, N, H, C]
    gram_q: Tensor  # [B, H, P, P] = Phi_q^T Phi_q over the real tokens; empty unless wanted
    gram_k: Tensor
    e: Tensor  # W_{e|X}: [B, H, P, S], or [H, P, S] without landmarks
    r: Tensor


@exact
def projected_attention(
    x: Tensor,
    weight: Tensor,
    shift: Tensor | None,
    w_e: Tensor,
    w_r: Tensor,
    c_e: Tensor | None,
    c_r: Tensor | None,
    bias: Tensor | None,
    index: Tensor | None,
    scale: float,
    causal: bool,
    token_mask: Tensor | None,
    map_q: str,
    map_k: str,
) -> ProjectedResult:
    """The op by its formulas, with both Gram matrices."""
    qk = F.linear(x, weight, shift)
    q, k = rearrange(qk, "b n (two h p) -> two b n h p", two=2, h=w_e.shape[0])
    if causal:
        counts = token_counts(q, token_mask, None)
        q, k = (running_mean(z, counts, token_mask=token_mask).mean for z in (q, k))
    if index is None:
        e, r = accumulate(w_e), accumulate(w_r)
        collapsed = collapse_composed(e, r, c_e, c_r)
        a_e, a_r = (None if c is None else a for a, c in zip(collapsed, (c_e, c_r), strict=True))
    else:
        e, r, a_e, a_r = sampled_weights(x, index, w_e, w_r, c_e, c_r, scale)
    result = in_one_piece(q, k, a_e, a_r, bias, token_mask, map_q, map_k)
    return ProjectedResult(*result, e, r)
