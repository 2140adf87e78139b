"""Primal-Attention spelled out: features, e- and r-scores, their map to the output.

Everything is kept for the backward pass. The fast form beside it never builds the scores.

Letters: B batch, N tokens, H heads, C head dim, P feature dim, S directions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from einops import einsum
from torch import Tensor

from primal_attention.feature_maps import FIXED_MAPS
from primal_attention.precision import accumulate, exact


class PrimalResult(NamedTuple):
    """What one pass over the queries and keys gives."""

    out: Tensor  # [B, N, H, C]
    gram_q: Tensor  # [B, H, P, P] = Phi_q^T Phi_q over the real tokens
    gram_k: Tensor  # [B, H, P, P]


@exact
def primal_attention(
    q: Tensor,  # [B, N, H, C]
    k: Tensor,  # [B, N, H, C]
    w_e_given_x: Tensor,  # [B, H, P, S] or [H, P, S]
    w_r_given_x: Tensor,
    c_e: Tensor | None,  # [S, C]: the output map's part for e; None where e is not output
    c_r: Tensor | None,
    bias: Tensor | None = None,  # [C]
    *,
    token_mask: Tensor | None = None,  # [B, N], True = real token
    map_q: str = "cosine",
    map_k: str = "cosine",
) -> PrimalResult:
    r"""Attention outputs of eq. (9), mapped from the 2S scores to the head dimension.

    $o_i = C_e^\top e_i + C_r^\top r_i + b$ with $e_i = W_{e|X}^\top \phi_q(x_i)$ and
    $r_i = W_{r|X}^\top \phi_k(x_i)$; zero at padded tokens.
    """
    phi_q = masked(FIXED_MAPS[map_q].forward(accumulate(q)), token_mask)  # [B, N, H, P]
    phi_k = masked(FIXED_MAPS[map_k].forward(accumulate(k)), token_mask)
    e = einsum(phi_q, _batched(w_e_given_x, q), "b n h p, b h p s -> b n h s")
    r = einsum(phi_k, _batched(w_r_given_x, k), "b n h p, b h p s -> b n h s")
    output = [(score, c) for score, c in ((e, c_e), (r, c_r)) if c is not None]
    scores = torch.cat([score for score, _ in output], dim=-1)  # [B, N, H, 2S]
    out = scores @ accumulate(torch.cat([c for _, c in output]))
    if bias is not None:
        out = out + accumulate(bias)
    return PrimalResult(masked(out, token_mask).to(q.dtype), _gram(phi_q), _gram(phi_k))


def _batched(weights: Tensor, q: Tensor) -> Tensor:
    weights = accumulate(weights)
    return weights if weights.ndim == 4 else weights.expand(q.shape[0], *weights.shape)


def _gram(phi: Tensor) -> Tensor:
    return einsum(phi, phi, "b n h p, b n h o -> b h p o")


def masked(values: Tensor, token_mask: Tensor | None) -> Tensor:
    """The values [B, N, H, C] with zeros at the padded tokens."""
    return values if token_mask is None else torch.where(token_mask[:, :, None, None], values, 0.0)
