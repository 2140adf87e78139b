"""Rotary positions: queries and keys turned by their place among the real tokens.

Letters: B batch, N tokens, H heads, C head dim.
"""

import torch
from torch import Tensor

from primal_attention.ops.causal import token_counts
from primal_attention.precision import accumulate

BASE = 10_000.0


def check_rotary(head_dim: int) -> None:
    """Raise unless heads of this size have pairs of channels to turn."""
    if head_dim % 2:
        raise ValueError(f"rotary=True needs an even head dimension, got {head_dim}")


def rotary_positions(x: Tensor, token_mask: Tensor | None, before: Tensor | None = None) -> Tensor:
    """Positions [B, N] of the real tokens of x [B, N, ...], counted from 0 or from ``before``."""
    return token_counts(x, token_mask, before) - 1


def rotated(z: Tensor, positions: Tensor) -> Tensor:
    """Turn z [B, N, H, C]: channels c and c + C/2 are a pair, of frequency BASE^(-2 c / C)."""
    rows = accumulate(z)
    half = z.shape[-1] // 2
    channels = torch.arange(half, device=z.device, dtype=rows.dtype)
    angles = positions[:, :, None, None].to(rows.dtype) * BASE ** (-channels / half)
    cos, sin = angles.cos(), angles.sin()
    first, second = rows[..., :half], rows[..., half:]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    return turned.to(z.dtype)
