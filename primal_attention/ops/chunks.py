"""Walking over the tokens in pieces, so that what is recomputed fits the cache.

The ops take and give [B, N, H, C], the layout in which a projection leaves its heads; a piece is
worked on as [B, H, n, C], so that products of matrices read like the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from primal_attention.precision import accumulate

_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 25}  # of one piece


def token_chunks(tensor: Tensor) -> Iterator[slice]:
    """Slices of the token axis of a [B, N, H, C] tensor, each a piece of a fitting size."""
    B, N, H, C = tensor.shape
    elements = _ELEMENTS.get(tensor.device.type, _ELEMENTS["cuda"])
    return slices(N, max(1, elements // max(B * H * C, 1) // 16) * 16)


def piece_slices(tensor: Tensor) -> Iterator[tuple[slice, slice]]:
    """Slices of both axes of a [B, N, H, C] tensor: whole sequences together, or part of one."""
    B, N, H, C = tensor.shape
    together = _ELEMENTS.get(tensor.device.type, _ELEMENTS["cuda"]) // max(N * H * C, 1)
    for sequences in slices(B, max(together, 1)):
        tokens = token_chunks(tensor[sequences]) if together == 0 else slices(N, max(N, 1))
        yield from ((sequences, piece) for piece in tokens)


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


class Scratch:
    """Memory for what is made of one piece, used again for the next: it stays in the cache."""

    def __init__(self, like: Tensor):
        self.like, self.kept = accumulate(like.new_empty(0)), dict[str, Tensor]()

    def room(self, name: str, *shape: int) -> Tensor:
        """An unwritten tensor in the accumulation dtype; the same memory for the same name."""
        size = math.prod(shape)
        if name not in self.kept or self.kept[name].numel() < size:
            self.kept[name] = self.like.new_empty(size)
        return self.kept[name][:size].view(shape)

    def product(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        """The product of a [B, H, n, m] and b, which may lack the first axis."""
        result = self.room(name, *a.shape[:-1], b.shape[-1])
        torch.bmm(*_stacked(a, b), out=result.view(-1, *result.shape[-2:]))
        return result


def add_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Add the product of a [B, H, n, m] and b, which may lack the first axis, to the total."""
    total.view(-1, *total.shape[-2:]).baddbmm_(*_stacked(a, b))
    return total


def _stacked(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both as stacks of as many matrices."""
    return a.flatten(0, 1), b.expand(*a.shape[:2], *b.shape[-2:]).flatten(0, 1)
