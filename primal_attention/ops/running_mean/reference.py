"""Running means of queries and keys over the real tokens, spelled out.

Letters: B batch, N tokens, H heads, C head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from primal_attention.ops.chunks import masked
from primal_attention.precision import accumulate


class RunningMean(NamedTuple):
    """Means up to each token, and the sum after the last one."""

    mean: Tensor  # [B, N, H, C]
    total: Tensor  # [B, H, C], accumulation dtype


def token_counts(z: Tensor, token_mask: Tensor | None, before: Tensor | None) -> Tensor:
    """How many real tokens each position has seen, itself included, [B, N]."""
    if token_mask is None:
        counts = torch.arange(1, z.shape[1] + 1, device=z.device).expand(z.shape[:2])
    else:
        counts = token_mask.cumsum(1)
    return counts if before is None else counts + before[:, None]


def running_mean(
    z: Tensor,  # [B, N, H, C]
    counts: Tensor,  # [B, N], from token_counts
    *,
    token_mask: Tensor | None = None,
    before: Tensor | None = None,  # [B, H, C]: the sum over earlier tokens
) -> RunningMean:
    r"""$\bar z_t = \frac{1}{t} \sum_{\tau \le t} z_\tau$, where t counts the real tokens."""
    sums = masked(accumulate(z), token_mask).cumsum(1)
    if before is not None:
        sums = sums + before[:, None]
    mean = sums / counts.clamp(min=1)[:, :, None, None]
    return RunningMean(mean.to(z.dtype), sums[:, -1])


def running_mean_gradients(
    d_mean: Tensor,  # [B, N, H, C]
    d_total: Tensor | None,  # [B, H, C]
    counts: Tensor,  # [B, N], from token_counts
    token_mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Gradients of the tokens and of the sum before them: the transposed map, which is linear."""
    shares = accumulate(d_mean) / counts.clamp(min=1)[:, :, None, None]
    sums = shares.flip(1).cumsum(1).flip(1)
    if d_total is not None:
        sums = sums + d_total[:, None]
    return masked(sums, token_mask).to(d_mean.dtype), sums[:, 0]
