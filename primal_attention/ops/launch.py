"""What the fused causal ops are launched with: the division of a sequence, tiles, dtypes.

A sequence is divided into blocks of tokens and segments of blocks, and one program walks over one
segment. Where sequences and heads are enough programs by themselves, a sequence is one segment and
the tokens are read once; else the sums of the segments come first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

PROGRAMS = 512  # wanted at the least: about four for each multiprocessor of a large GPU
SHORTEST = 4  # blocks of a segment, so that the first pass does not become most of the work

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# How the tensor cores are used. The sums of half precision may leave the range of float16, so its
# products are those of TensorFloat-32, which has as many digits.
PRECISION = {torch.bfloat16: "ieee", torch.float16: "tf32", torch.float32: "ieee"}


class Config(NamedTuple):
    """Sizes of a fused op for one size of tile."""

    block: int  # tokens
    num_warps: int
    num_stages: int


class Segments(NamedTuple):
    """The division of each sequence."""

    length: int  # blocks of a segment
    number: int  # segments of a sequence


def divide(z: Tensor, block: int) -> Segments:
    """Segments of the sequences z [B, N, H, C], so many that they make enough programs."""
    B, N, H, _ = z.shape
    blocks = _divided(N, block)
    wanted = min(_divided(PROGRAMS, B * H), _divided(blocks, SHORTEST))
    length = _divided(blocks, wanted)
    return Segments(length, _divided(blocks, length))


def _divided(number: int, by: int) -> int:
    return -(-number // by)


def padded(width: int) -> int:
    """The width of a tile: a power of two that tensor cores take."""
    return max(16, 1 << (width - 1).bit_length())


def contiguous_rows(tensor: Tensor) -> Tensor:
    """The tensor, copied where its last axis has gaps."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def mask_bytes(token_mask: Tensor | None, instead: Tensor) -> Tensor:
    """The mask as numbers; any tensor instead of one that is not there and will not be read."""
    return instead if token_mask is None else token_mask.view(torch.uint8)
