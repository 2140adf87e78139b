"""Scores and their energies spelled out.

Letters: B batch, N tokens, H heads, C head dim, P feature dim, S directions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from einops import einsum
from torch import Tensor

from primal_attention.feature_maps import FIXED_MAPS
from primal_attention.ops.chunks import masked
from primal_attention.precision import accumulate, exact


class ScoresResult(NamedTuple):
    """The scores e and r, side by side, and what the objective needs of them."""

    scores: Tensor  # [B, N, 2, H, S], zero at padded tokens
    energies: Tensor  # [B, 2, H, S]: the sums of their squares over the tokens


@exact
def primal_scores(
    qk: Tensor,  # [B, N, 2, H, C]: queries and keys
    w_e_given_x: Tensor,  # [B, H, P, S] or [H, P, S]
    w_r_given_x: Tensor,
    token_mask: Tensor | None = None,  # [B, N], True = real token
    map_q: str = "cosine",
    map_k: str = "cosine",
) -> ScoresResult:
    r"""$e_i = W_{e|X}^\top \phi_q(x_i)$ and $r_i = W_{r|X}^\top \phi_k(x_i)$ of eq. (9)."""
    q, k = qk.unbind(2)
    sides = []
    for z, weights, feature_map in ((q, w_e_given_x, map_q), (k, w_r_given_x, map_k)):
        phi = masked(FIXED_MAPS[feature_map].forward(accumulate(z)), token_mask)
        batched = accumulate(weights).expand(len(z), *weights.shape[-3:])
        sides.append(einsum(phi, batched, "b n h p, b h p s -> b n h s"))
    scores = torch.stack(sides, 2)
    return ScoresResult(scores.to(qk.dtype), scores.square().sum(1))
