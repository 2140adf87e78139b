"""Launch sizes of fused ops: the division of the tokens, and tensors they can read and write.

*Shares* are for sums in any order: a program takes one share of the tokens of one sequence and
head, or several whole sequences. *Segments* are for walks with a carry: one program walks over the
blocks of one segment; where sequences and heads are programs enough, a sequence is one segment.

What a program sums along the tokens is written apart and added up afterwards, so that the same
inputs give the same bits. Letters: B batch, N tokens, H heads, C columns of a token.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from primal_attention.ops.triton.launcher import Descriptor, ask_the_gpu

# The dtype of the products.
DOTS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
# The arithmetic of products of float32 matrices, by the dtype of the tokens behind them. Six
# products of bfloat16 parts hold all digits. TensorFloat-32 has those of float16, more than
# bfloat16, and the range of both: beside tokens of half precision its errors are small.
PRODUCTS = {torch.bfloat16: "tf32", torch.float16: "tf32", torch.float32: "bf16x6"}
# The arithmetic of products. Sums along the tokens may leave the range of float16, and gradients
# divided by the number of tokens too; TensorFloat-32 has its digits and a wider range.
PRECISION = {torch.bfloat16: "bf16", torch.float16: "tf32", torch.float32: "ieee"}
# How many bfloat16 numbers hold the digits of one, as it comes and after arithmetic; float32 is not
# taken apart.
PARTS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 0}
PARTS_OF_GRADIENT = {torch.bfloat16: 2, torch.float16: 2, torch.float32: 0}

PROGRAMS = 512  # of segments, at least: about four for each multiprocessor of a large GPU
SHORTEST = 4  # blocks of a segment, so that the first pass does not become most of the work
_FEW_PROGRAMS = 800  # about six for each multiprocessor of a large GPU
_ROWS = 1 << 7  # more tokens than any block has
_SUMS = 3  # blocks that take as long as to write the sums of a share and to add them up


class Config(NamedTuple):
    """Sizes of a fused op, found by measuring."""

    block: int  # tokens
    num_warps: int
    num_stages: int
    tile: int = 0  # columns of a matrix that one program takes
    programs: int = 264  # shares that are under way at once: two for each multiprocessor
    least: int = 4  # blocks of a share, so that its sums are small beside its tokens

    @property
    def launch(self) -> dict[str, int]:
        """Options of the compiler."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


def warps_of(programs: int) -> int:
    """Choose the warps of a pass over small matrices, through whose code each program runs once."""
    # With few programs the time goes with the length of the code, which is the shorter the less of
    # a matrix a thread has; with many, threads that have more of it do more at once.
    return 8 if programs <= _FEW_PROGRAMS else 4


class Shares(NamedTuple):
    """The division of each sequence, or several whole sequences for each program."""

    programs: int  # all together
    splits: int  # of a sequence
    tokens: int  # of a share, at most
    whole: bool  # whether all of its blocks are
    sequences: int = 1  # of a program, at most


def spread_shares(z: Tensor, config: Config) -> Shares:
    """Divide the sequences z [B, N, H, C] so that a GPU is busy; some shares have a block less."""
    B, N, H, _ = z.shape
    blocks = -(-N // config.block)
    splits = _splits(B * H, blocks, config.programs, config.least)
    tokens = -(-blocks // splits) * config.block
    return Shares(B * H * splits, splits, tokens, N % config.block == 0)


def shares_of(z: Tensor, config: Config) -> Shares:
    """Divide like `spread_shares`, into equal shares except possibly the last of a sequence."""
    (B, N, H, _), spread = z.shape, spread_shares(z, config)
    splits = -(-N // spread.tokens)
    return spread._replace(programs=B * H * splits, splits=splits)


def in_runs(z: Tensor, shares: Shares, config: Config) -> Shares:
    """Give a program several whole sequences z, so that fewer sums over all are written."""
    if shares.splits > 1:
        return shares
    B, _, H, _ = z.shape
    sequences = _sequences(B, H, shares.tokens // config.block, config.programs)
    return shares._replace(programs=-(-B // sequences) * H, sequences=sequences)


@cache
def _splits(sequences: int, blocks: int, programs: int, least: int) -> int:
    """Choose how many shares of a sequence take the least time; sums cost some blocks each."""
    return min(
        range(1, max(1, blocks // least) + 1),
        key=lambda splits: -(-sequences * splits // programs) * (blocks / splits + _SUMS),
    )


@cache
def _sequences(B: int, H: int, blocks: int, programs: int) -> int:
    """Choose how many whole sequences of a program take the least time, with all at once."""
    return min(
        range(1, -(-B // max(1, programs // H)) + 1),
        key=lambda each: -(-(-(-B // each) * H) // programs) * (each * blocks + _SUMS),
    )


class Segments(NamedTuple):
    """The division of each sequence."""

    tokens: int  # of a segment
    number: int  # of segments

    def whole(self, N: int, block: int) -> bool:
        """Return whether such blocks divide N and the segments, made perhaps of other blocks."""
        return N % block == 0 and self.tokens % block == 0


def divide(z: Tensor, block: int, programs: int | None = None) -> Segments:
    """Divide the sequences z [B, N, H, C] into segments that make enough programs."""
    B, N, H, _ = z.shape
    blocks = -(-N // block)
    wanted = min(-(-(programs or PROGRAMS) // (B * H)), -(-blocks // SHORTEST))
    length = -(-blocks // wanted)
    return Segments(length * block, -(-blocks // length))


def padded(width: int) -> int:
    """Return the width of a tile: a power of two that tensor cores take."""
    return max(16, 1 << (int(width) - 1).bit_length())


@contextmanager
def writable(tensor: Tensor | None) -> Iterator[Tensor | None]:
    """Yield the tensor, or one with adjacent columns that is copied into it on leaving."""
    if tensor is None or _adjacent(tensor):
        yield tensor
        return
    rows = tensor.new_empty(tensor.shape)
    yield rows
    tensor.copy_(rows)


def readable(tensor: Tensor) -> Tensor:
    """Return the tensor [B, N, H, C], copied where its columns are not adjacent."""
    return tensor if _adjacent(tensor) else tensor.contiguous()


def _adjacent(tensor: Tensor) -> bool:
    """Return whether columns are adjacent, and rows so near that a block has short offsets."""
    near = tensor.stride(1) * _ROWS < 1 << 31
    return near and (tensor.stride(-1) == 1 or tensor.shape[-1] == 1)


def contiguous_rows(tensor: Tensor) -> Tensor:
    """Return the tensor, copied where its last axis has gaps."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def mask_bytes(token_mask: Tensor | None) -> Tensor | None:
    """Return the mask as contiguous numbers."""
    return None if token_mask is None else token_mask.contiguous().view(torch.uint8)


def float32(like: Tensor, *shape: int) -> Tensor:
    """Allocate a float32 tensor on the same device."""
    return like.new_empty(shape, dtype=torch.float32)


def empty_rows(tensor: Tensor) -> Tensor:
    """Allocate a contiguous tensor of the same shape and dtype."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    """Return small tensors as the fused ops read them."""
    return [None if x is None else x.contiguous() for x in tensors]


def described(z: Tensor, block: int) -> Tensor | Descriptor:
    """Describe blocks of one head's tokens of z [B, N, H, C] where possible, else return z.

    Described blocks are loaded without addresses in registers, but whole: all tokens must be real.
    The descriptor is of [B, N, H C], so that the heads of a token must lie beside each other.
    """
    B, N, H, C = z.shape
    of_batch, of_tokens, of_heads, _ = z.stride()
    columns = (H - 1) * of_heads + C
    aligned = (z.data_ptr() | (of_batch | of_tokens | of_heads) * z.element_size()) % 16 == 0
    if not aligned or columns > of_tokens or not loads_blocks(z.device):
        return z
    if z.is_cuda:
        ask_the_gpu()
    return Descriptor(z, [B, N, columns], [of_batch, of_tokens, 1], [1, block, C])


@cache
def loads_blocks(device: torch.device) -> bool:
    """Return whether this device, the current one, has descriptors: Hopper GPUs and later."""
    if knobs.runtime.interpret:
        return True
    target = driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch >= 90)


constant = cache(tl.constexpr)  # one object for each number, which is soon found to be the same


def strides(tensor: Tensor | None) -> tuple[Any, ...]:
    """Return strides of a tensor [B, N, H, C] that may be missing."""
    if tensor is None:
        return 0, 0, 0
    of_batch, of_tokens, of_heads, _ = tensor.stride()
    # That of the tokens is compiled for, since it does not change with their number: the rows of a
    # block are then known distances apart, and a thread keeps one address for all of its own.
    return of_batch, constant(of_tokens), of_heads


def count_strides(counts: Tensor | None) -> tuple[int, ...]:
    """Strides of counts [B, N] that may be missing."""
    return (0, 0) if counts is None else counts.stride()


def batch_stride(matrix: Tensor | None) -> int:
    """Return the stride of the sequences of contiguous matrices [B, H, R, C]; 0 for [H, R, C]."""
    return matrix.stride(0) if matrix is not None and matrix.ndim == 4 else 0
