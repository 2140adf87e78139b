"""The real tokens of a sequence in M segments of nearly equal length, and their means.

Letters: B batch, N tokens, H heads, C head dim, M segments.
"""

import torch
from einops import einsum
from torch import Tensor

from primal_attention.precision import accumulate, exact


def token_segments(x: Tensor, mask: Tensor | None, num_segments: int) -> Tensor:
    """Which tokens of x [B, N, ...] each segment holds, bool [B, M, N].

    The i-th of n real tokens is in segment i M // n: no segment is empty where n is at least M, and
    none holds more than one token where n is at most M.
    """
    mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask
    place, num_real = mask.cumsum(1) - 1, mask.sum(1, keepdim=True).clamp(min=1)
    of_token = (place * num_segments // num_real)[:, None]
    segment = torch.arange(num_segments, device=x.device)[:, None]
    return (of_token == segment) & mask[:, None]


@exact
def segment_means(z: Tensor, segments: Tensor) -> Tensor:
    """Means [B, M, H, C] of the tokens [B, N, H, C] of each segment; zero where it has none."""
    wide = accumulate(z)
    sums = einsum(segments.to(wide.dtype), wide, "b m n, b n h c -> b m h c")
    return (sums / segments.sum(2).clamp(min=1)[:, :, None, None]).to(z.dtype)
