"""Walking over the tokens in pieces, so that what is recomputed fits the cache.

The ops take and give [B, N, H, C], the layout in which a projection leaves its heads; a piece is
worked on as [B, H, n, C], so that products of matrices read like the formulas.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from primal_attention.precision import accumulate

_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 25}  # of one piece


def token_chunks(tensor: Tensor) -> Iterator[slice]:
    """Slices of the token axis of a [B, N, H, C] tensor, each a piece of a fitting size."""
    B, N, H, C = tensor.shape
    elements = _ELEMENTS.get(tensor.device.type, _ELEMENTS["cuda"])
    return slices(N, max(16, elements // max(B * H * C, 1)))


def slices(length: int, size: int) -> Iterator[slice]:
    """Slices of at most the given size that cover the length."""
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def head_first(tensor: Tensor, piece: slice) -> Tensor:
    """A piece of a [B, N, H, C] tensor as [B, H, n, C], in the accumulation dtype."""
    return accumulate(tensor[:, piece].transpose(1, 2)).contiguous()


def mask_of(token_mask: Tensor | None, piece: slice) -> Tensor | None:
    """The piece of a mask [B, N], shaped for [B, H, n, C]."""
    return None if token_mask is None else token_mask[:, None, piece, None]


def zeroed(values: Tensor, mask: Tensor | None) -> Tensor:
    """The values with zeros where the mask, shaped for them, is False."""
    return values if mask is None else torch.where(mask, values, 0.0)


def masked(values: Tensor, token_mask: Tensor | None) -> Tensor:
    """The values [B, N, H, C] with zeros at the padded tokens."""
    return zeroed(values, None if token_mask is None else token_mask[:, :, None, None])
