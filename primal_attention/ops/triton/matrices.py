"""Load and store small contiguous matrices, whole or in blocks; called from Triton code.

Blocks are padded to powers of two, zero outside the matrix.
"""

import triton
import triton.language as tl


@triton.jit
def _matrix_places(
    tensor, row, column,
    R: tl.constexpr, C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    r, c = row + tl.arange(0, BLOCK_R), column + tl.arange(0, BLOCK_C)
    return tensor + (r[:, None] * C + c[None, :]), (r < R)[:, None] & (c < C)[None, :]


@triton.jit
def load_matrix(
    tensor, row, column,
    R: tl.constexpr, C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """A block of a contiguous matrix [R, C], in float32."""
    return load_operand(tensor, row, column, R, C, BLOCK_R, BLOCK_C).to(tl.float32)


@triton.jit
def load_operand(
    tensor, row, column,
    R: tl.constexpr, C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """A block of a contiguous matrix [R, C], in its own dtype."""
    places, exists = _matrix_places(tensor, row, column, R, C, BLOCK_R, BLOCK_C)
    return tl.load(places, mask=exists, other=0.0)


@triton.jit
def store_matrix(tensor, matrix, column, R: tl.constexpr, C: tl.constexpr):
    """Write a block of columns of a contiguous matrix [R, C]."""
    places, exists = _matrix_places(tensor, 0, column, R, C, matrix.shape[0], matrix.shape[1])
    tl.store(places, matrix.to(tensor.dtype.element_ty), mask=exists)


@triton.jit
def store_block(tensor, block, row, column, R: tl.constexpr, C: tl.constexpr):
    """Write a block of a contiguous matrix [R, C]."""
    r, c = row + tl.arange(0, block.shape[0]), column + tl.arange(0, block.shape[1])
    exists = (r < R)[:, None] & (c < C)[None, :]
    places = tensor + r[:, None] * C + c[None, :]
    tl.store(places, block.to(tensor.dtype.element_ty), mask=exists)


@triton.jit
def _stacked_places(
    tensor, number, R: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    r, c = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    places = tensor + tl.cast(number, tl.int64) * (R * C) + (r[:, None] * C + c[None, :])
    return places, (r < R)[:, None] & (c < C)[None, :]


@triton.jit
def load_stacked(
    tensor, number, R: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """One of the contiguous matrices [., R, C] in float32; zeros where there are none."""
    matrix = tl.zeros([ROWS, COLUMNS], tl.float32)
    if tensor is not None:
        places, exists = _stacked_places(tensor, number, R, C, ROWS, COLUMNS)
        matrix += tl.load(places, mask=exists, other=0.0)
    return matrix


@triton.jit
def store_stacked(tensor, number, matrix, R: tl.constexpr, C: tl.constexpr):
    """Write one of the contiguous matrices [., R, C]."""
    places, exists = _stacked_places(tensor, number, R, C, matrix.shape[0], matrix.shape[1])
    tl.store(places, matrix.to(tensor.dtype.element_ty), mask=exists)
