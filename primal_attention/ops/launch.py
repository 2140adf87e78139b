"""What the fused causal ops are launched with: the division of a sequence, tiles, dtypes.

A sequence is divided into blocks of tokens and segments of blocks, and one program walks over one
segment. Where sequences and heads are enough programs by themselves, a sequence is one segment and
the tokens are read once; else the sums of the segments come first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

PROGRAMS = 512  # wanted at the least: about four for each multiprocessor of a large GPU
SHORTEST = 4  # blocks of a segment, so that the first pass does not become most of the work

# The arithmetic of products. Sums along the tokens may leave the range of float16, and gradients
# divided by the number of tokens too; TensorFloat-32 has its digits and a wider range.
PRECISION = {torch.bfloat16: "bf16", torch.float16: "tf32", torch.float32: "ieee"}

# How many bfloat16 numbers hold the digits of one, as it comes and after arithmetic; float32 is not
# taken apart.
PARTS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 0}
PARTS_OF_GRADIENT = {torch.bfloat16: 2, torch.float16: 2, torch.float32: 0}


class Config(NamedTuple):
    """Sizes of a fused op for one size of tile."""

    block: int  # tokens
    num_warps: int
    num_stages: int


class Segments(NamedTuple):
    """The division of each sequence."""

    tokens: int  # of a segment
    number: int  # of segments

    def whole(self, N: int, block: int) -> bool:
        """Whether all blocks of N tokens are: segments may be made of other blocks than these."""
        return N % block == 0 and self.tokens % block == 0


def divide(z: Tensor, block: int, programs: int | None = None) -> Segments:
    """Segments of the sequences z [B, N, H, C], so many that they make enough programs."""
    B, N, H, _ = z.shape
    blocks = _divided(N, block)
    wanted = min(_divided(programs or PROGRAMS, B * H), _divided(blocks, SHORTEST))
    length = _divided(blocks, wanted)
    return Segments(length * block, _divided(blocks, length))


def _divided(number: int, by: int) -> int:
    return -(-number // by)


def padded(width: int) -> int:
    """The width of a tile: a power of two that tensor cores take."""
    return max(16, 1 << (int(width) - 1).bit_length())


def contiguous_rows(tensor: Tensor) -> Tensor:
    """The tensor, copied where its last axis has gaps."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def mask_bytes(token_mask: Tensor | None) -> Tensor | None:
    """The mask as contiguous numbers."""
    return None if token_mask is None else token_mask.contiguous().view(torch.uint8)


def compiled_for(width: int, config: Config) -> dict[str, Any]:
    """What a fused op with one width of tiles is compiled for."""
    return {
        "C": width,
        "WIDTH": padded(width),
        "BLOCK": config.block,
        "STAGES": config.num_stages,
        "num_warps": config.num_warps,
    }


def float32(like: Tensor, *shape: int) -> Tensor:
    """An unwritten tensor on the same device."""
    return like.new_empty(shape, dtype=torch.float32)


def contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    """Small tensors as the fused ops read them."""
    return [None if x is None else x.contiguous() for x in tensors]


def empty_rows(tensor: Tensor) -> Tensor:
    """An unwritten, contiguous tensor of the same shape and dtype."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)
