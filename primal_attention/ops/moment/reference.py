"""The moment spelled out. Letters: B batch, N tokens, H heads, C head dim, P features, S values."""

from __future__ import annotations

from einops import einsum
from torch import Tensor

from primal_attention.feature_maps import FIXED_MAPS
from primal_attention.ops.chunks import masked
from primal_attention.precision import accumulate, exact


@exact
def moment(
    z: Tensor,  # [B, N, H, C]
    values: Tensor,  # [B, N, H, S]
    *,
    token_mask: Tensor | None = None,  # [B, N], True = real token
    feature_map: str = "cosine",
) -> Tensor:
    r"""$\sum_i \phi(z_i) h_i^\top$ over the real tokens, [B, H, P, S]: the sums of eq. (14)."""
    phi = masked(FIXED_MAPS[feature_map].forward(accumulate(z)), token_mask)
    return einsum(phi, masked(accumulate(values), token_mask), "b n h p, b n h s -> b h p s")
