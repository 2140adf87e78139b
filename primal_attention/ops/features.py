"""Features of one piece of queries or keys, and what their gradient needs of them.

Map and derivative are those of ``FIXED_MAPS``. Only the cosine map is spelled here once more: with
phi available its derivative (d - phi (phi . d)) / |z| needs nothing of z but 1 / |z|, and all of it
is written to memory that stays in the cache.

Letters: B batch, N tokens, H heads, C head dim, P features, n tokens of a piece.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from primal_attention.feature_maps import FIXED_MAPS, cosine
from primal_attention.ops.chunks import Scratch, mask_of, zeroed
from primal_attention.precision import accumulate


class Features(NamedTuple):
    """The features of a piece; with zeros, which gradients keep, at the padded tokens."""

    phi: Tensor  # [B, H, n, P], contiguous
    feature_map: str
    z: Tensor | None  # [B, H, n, C]; None for the cosine map
    mask: Tensor | None  # [B, 1, n, 1]
    inverse: Tensor | None  # [B, H, n, 1]: 1 / |z| of the cosine map; None for the others

    def pull_back(self, d_phi: Tensor, dz: Tensor, scratch: Scratch) -> None:
        """Write the gradient of z to dz [B, n, H, C]; d_phi [B, H, n, P] is lost."""
        dz = dz.transpose(1, 2)
        if self.inverse is not None:
            product = torch.mul(self.phi, d_phi, out=scratch.room("product", *d_phi.shape))
            radial = product.sum(-1, keepdim=True)
            d_phi.addcmul_(self.phi, radial, value=-1.0)
            _write_product(d_phi, self.inverse, dz)
        else:
            assert self.z is not None
            dz.copy_(zeroed(FIXED_MAPS[self.feature_map].vjp(self.z, d_phi), self.mask))


def features_of(
    z: Tensor, piece: slice, token_mask: Tensor | None, feature_map: str, scratch: Scratch
) -> Features:
    """Features of a piece of z [B, N, H, C], in the accumulation dtype."""
    z, mask = z[:, piece].transpose(1, 2), mask_of(token_mask, piece)
    if not is_cosine(feature_map):
        z = accumulate(z)
        phi = zeroed(FIXED_MAPS[feature_map].forward(z), mask)
        return Features(_copied(phi, z), feature_map, z, mask, None)
    phi = scratch.room("phi", *z.shape).copy_(z)
    squared = torch.mul(phi, phi, out=scratch.room("product", *z.shape)).sum(-1, keepdim=True)
    nonzero = squared >= torch.finfo(phi.dtype).tiny
    if mask is not None:
        nonzero &= mask
    inverse = torch.where(nonzero, squared.rsqrt_(), 0.0)
    return Features(zeroed(phi.mul_(inverse), mask), feature_map, None, mask, inverse)


def is_cosine(feature_map: str) -> bool:
    """Return whether the map of this name is the library's cosine map."""
    return FIXED_MAPS[feature_map].forward is cosine


def _copied(phi: Tensor, z: Tensor) -> Tensor:
    """Phi, contiguous and not z itself, which gradients may be written over."""
    return phi.clone(memory_format=torch.contiguous_format) if phi is z else phi.contiguous()


def _write_product(a: Tensor, b: Tensor, result: Tensor) -> None:
    if result.dtype == a.dtype:
        torch.mul(a, b, out=result)
    else:
        result.copy_(a * b)
