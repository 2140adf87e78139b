"""Walking over the tokens in pieces, so that what is recomputed fits the cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 25}  # of one [B, n, H, P] piece


def token_chunks(tensor: Tensor) -> Iterator[slice]:
    """Slices of the token axis of a [B, N, H, C] tensor, each a piece of a fitting size."""
    B, N, H, C = tensor.shape
    elements = _ELEMENTS.get(tensor.device.type, _ELEMENTS["cuda"])
    size = max(16, elements // max(B * H * C, 1))
    for start in range(0, N, size):
        yield slice(start, min(start + size, N))


def masked(values: Tensor, token_mask: Tensor | None) -> Tensor:
    """The values [B, n, H, C] with zeros at the padded tokens."""
    if token_mask is None:
        return values
    return torch.where(token_mask[:, :, None, None], values, 0.0)
