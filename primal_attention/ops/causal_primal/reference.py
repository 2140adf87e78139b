"""Causal Primal-Attention with static weights spelled out: running means, then the scores.

Letters: B batch, N tokens, H heads, C head dim, P feature dim, S directions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from primal_attention.ops.primal.reference import primal_attention
from primal_attention.ops.running_mean.reference import running_mean


class CausalResult(NamedTuple):
    """Outputs, Gram matrices of the features of the means, and the sums after the last token."""

    out: Tensor  # [B, N, H, C]
    gram_q: Tensor  # [B, H, P, P], accumulation dtype
    gram_k: Tensor
    q_total: Tensor  # [B, H, C], accumulation dtype
    k_total: Tensor


def causal_primal_attention(
    q: Tensor,  # [B, N, H, C]
    k: Tensor,
    w_e: Tensor,  # [H, P, S]
    w_r: Tensor,
    c_e: Tensor | None,  # [S, C]: the output map's part for e; None where e is not output
    c_r: Tensor | None,
    bias: Tensor | None,  # [C]
    q_before: Tensor | None,  # [B, H, C]: the sum over earlier tokens
    k_before: Tensor | None,
    *,
    counts: Tensor,  # [B, N], from token_counts
    token_mask: Tensor | None = None,  # [B, N], True = real token
    **maps: Any,
) -> CausalResult:
    r"""Primal-Attention of $\bar q_t$ and $\bar k_t$, the means over the real tokens up to t."""
    q_mean, q_total = running_mean(q, counts, token_mask=token_mask, before=q_before)
    k_mean, k_total = running_mean(k, counts, token_mask=token_mask, before=k_before)
    result = primal_attention(
        q_mean, k_mean, w_e, w_r, c_e, c_r, bias, token_mask=token_mask, **maps
    )
    return CausalResult(*result, q_total, k_total)
