"""Positions as sinusoids, Vaswani et al. 2017: no table, so no longest sequence."""

import torch
from torch import Tensor

_LONGEST_WAVE = 10_000.0  # in units of 2 pi tokens


def sinusoids(positions: Tensor, dim: int) -> Tensor:
    r"""Sines, then cosines of $t \cdot 10000^{-2i/D}$ for positions t, [..., D] in float64.

    The angles of late positions need the digits of float64.
    """
    pairs = torch.arange((dim + 1) // 2, dtype=torch.float64, device=positions.device)
    angles = positions[..., None] * _LONGEST_WAVE ** (-2 * pairs / dim)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)[..., :dim]
