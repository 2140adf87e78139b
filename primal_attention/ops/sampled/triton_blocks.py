"""The fused passes of the sampled weights, forward and backward.

The rows of X' are read at the tokens where they stand, a block of landmarks at a time. Sums over
the sequences are written apart for each program and added up afterwards, in the same order every
time; no addition is atomic.

Letters: B batch, N tokens, H heads, C head dim, P feature dim, S directions, M landmarks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from primal_attention.ops.collapse.triton_blocks import store_block, store_side
from primal_attention.ops.triton_kernel import launched
from primal_attention.ops.triton_maps import load_matrix, load_operand, product, sequence_of


@launched
@triton.jit(do_not_specialize=["H"])
def weight_blocks(
    x, index, w_e, w_r, c_e, c_r, given_e, given_r, a_e, a_r,
    x_strides, c_e_strides, c_r_strides, H, scale,
    M: tl.constexpr, P: tl.constexpr, S: tl.constexpr, C: tl.constexpr,
    BLOCK_M: tl.constexpr, TILE: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
    SIDES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows of W_e = scale X'^T w_e and of A_e = W_e C_e, those of the other side, or both."""
    matrix, row = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE
    b, h = matrix // H, matrix % H
    x, index = sequence_of(x, x_strides, b, h), index + b * M
    w_e, w_r = w_e + h * (M * S), w_r + h * (M * S)
    if SIDES == 2:
        weights_e, weights_r = _weights(
            x, index, w_e, w_r, x_strides[1], row, M, P, S, BLOCK_M, TILE, BLOCK_S, PRECISION
        )
        store_side(
            weights_e * scale, c_e, given_e, a_e, c_e_strides, matrix, row,
            P, S, C, BLOCK_S, BLOCK_C, PRECISION,
        )  # fmt: skip
        store_side(
            weights_r * scale, c_r, given_r, a_r, c_r_strides, matrix, row,
            P, S, C, BLOCK_S, BLOCK_C, PRECISION,
        )  # fmt: skip
    elif tl.program_id(2) == 0:
        weights_e, _ = _weights(
            x, index, w_e, None, x_strides[1], row, M, P, S, BLOCK_M, TILE, BLOCK_S, PRECISION
        )
        store_side(
            weights_e * scale, c_e, given_e, a_e, c_e_strides, matrix, row,
            P, S, C, BLOCK_S, BLOCK_C, PRECISION,
        )  # fmt: skip
    else:
        weights_r, _ = _weights(
            x, index, w_r, None, x_strides[1], row, M, P, S, BLOCK_M, TILE, BLOCK_S, PRECISION
        )
        store_side(
            weights_r * scale, c_r, given_r, a_r, c_r_strides, matrix, row,
            P, S, C, BLOCK_S, BLOCK_C, PRECISION,
        )  # fmt: skip


@triton.jit
def _weights(
    x, index, w, other, stride, row,
    M: tl.constexpr, P: tl.constexpr, S: tl.constexpr,
    BLOCK_M: tl.constexpr, TILE: tl.constexpr, BLOCK_S: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows of X'^T w of one sequence and head, and with the parameters of the other side if given.

    The rows of X' are read once for both.
    """
    total = tl.zeros([TILE, BLOCK_S], tl.float32)
    of_other = tl.zeros([TILE, BLOCK_S], tl.float32)
    for m in range(0, M, BLOCK_M):
        tokens = _landmarks(index, m, M, BLOCK_M)
        columns = tl.trans(_load_tokens(x, tokens, stride, row, P, TILE))
        part = load_operand(w, m, 0, M, S, BLOCK_M, BLOCK_S)
        total = _product_of_tokens(columns, part, total, PRECISION)
        if other is not None:
            part = load_operand(other, m, 0, M, S, BLOCK_M, BLOCK_S)
            of_other = _product_of_tokens(columns, part, of_other, PRECISION)
    return total, of_other


@launched
@triton.jit(do_not_specialize=["H"])
def row_blocks(
    index, w_e, w_r, total_e, total_r, dx, dx_strides, H,
    M: tl.constexpr, P: tl.constexpr, S: tl.constexpr,
    BLOCK_M: tl.constexpr, ALL_M: tl.constexpr, TILE: tl.constexpr, BLOCK_S: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add w_e dW_e^T + w_r dW_r^T of a block of landmarks to the gradients of their tokens.

    Where landmarks stand at one token, the first of them adds what all of them give. The blocks of
    one sequence and head are neighbours, so that its dW come from memory once.
    """
    blocks: tl.constexpr = tl.cdiv(M, BLOCK_M)
    matrix, number = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * BLOCK_M
    b, h = matrix // H, matrix % H
    row, given = tl.program_id(1) * TILE, matrix * (P * S)
    index, w_e, w_r = index + b * M, w_e + h * (M * S), w_r + h * (M * S)
    side_e = load_matrix(total_e + given, row, 0, P, S, TILE, BLOCK_S)
    side_r = load_matrix(total_r + given, row, 0, P, S, TILE, BLOCK_S)
    tokens = _landmarks(index, number, M, BLOCK_M)
    p = row + tl.arange(0, TILE)
    exists = (p < P)[:, None] & (tokens >= 0)[None, :]
    places = sequence_of(dx, dx_strides, b, h) + p[:, None] + tokens[None, :] * dx_strides[1]
    # A landmark is a column here. The sum begins with what its token has: no registers for both.
    columns = tl.load(places, mask=exists, other=0.0).to(tl.float32)
    tokens = tokens.to(tl.int32)
    begin, end = _range_of(index, tokens, M, ALL_M)
    first = tl.full([BLOCK_M], M, tl.int32)
    for m in range(begin, end, BLOCK_M):
        others = _landmarks(index, m, M, BLOCK_M).to(tl.int32)
        here = (others[:, None] == tokens[None, :]) & (tokens >= 0)[None, :]
        numbers = tl.where(here, (m + tl.arange(0, BLOCK_M))[:, None], M)
        first = tl.minimum(first, tl.min(numbers, 0))
        of_e = tl.trans(load_operand(w_e, m, 0, M, S, BLOCK_M, BLOCK_S))
        of_r = tl.trans(load_operand(w_r, m, 0, M, S, BLOCK_M, BLOCK_S))
        part = product(side_e, of_e, tl.zeros([TILE, BLOCK_M], tl.float32), PRECISION)
        part = product(side_r, of_r, part, PRECISION)
        columns = product(part, tl.where(here, 1.0, 0.0), columns, PRECISION)
    adds = first == number + tl.arange(0, BLOCK_M)
    tl.store(places, columns.to(dx.dtype.element_ty), mask=exists & adds[None, :])


@triton.jit
def _range_of(index, tokens, M: tl.constexpr, ALL_M: tl.constexpr):
    """First landmark between the least and the greatest of these tokens, and one after the last."""
    least = tl.min(tl.where(tokens >= 0, tokens, 2147483647))
    m = tl.arange(0, ALL_M)
    others = tl.load(index + m, mask=m < M, other=-1).to(tl.int32)
    here = (others >= least) & (others <= tl.max(tokens))
    return tl.min(tl.where(here, m, M)), tl.max(tl.where(here, m + 1, 0))


@launched
@triton.jit(do_not_specialize=["B", "H", "group"])
def parameter_blocks(
    x, index, total_e, total_r, dw_e, dw_r, x_strides, B, H, group,
    M: tl.constexpr, P: tl.constexpr, S: tl.constexpr,
    BLOCK_M: tl.constexpr, TILE: tl.constexpr, BLOCK_S: tl.constexpr,
    SIDES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows of dw_e = X' dW_e, of dw_r, or of both, summed over a group of sequences."""
    h, m = (tl.program_id(0) % H).to(tl.int64), tl.program_id(0) // H * BLOCK_M
    part = (tl.program_id(1).to(tl.int64) * H + h) * (M * S)
    if SIDES == 2:
        side_e, side_r = _parameters(
            x, index, total_e, total_r, x_strides, B, H, group, h, m,
            M, P, S, BLOCK_M, TILE, BLOCK_S, PRECISION,
        )  # fmt: skip
        store_block(dw_e + part, side_e, m, 0, M, S)
        store_block(dw_r + part, side_r, m, 0, M, S)
    elif tl.program_id(2) == 0:
        side_e, _ = _parameters(
            x, index, total_e, None, x_strides, B, H, group, h, m,
            M, P, S, BLOCK_M, TILE, BLOCK_S, PRECISION,
        )  # fmt: skip
        store_block(dw_e + part, side_e, m, 0, M, S)
    else:
        side_r, _ = _parameters(
            x, index, total_r, None, x_strides, B, H, group, h, m,
            M, P, S, BLOCK_M, TILE, BLOCK_S, PRECISION,
        )  # fmt: skip
        store_block(dw_r + part, side_r, m, 0, M, S)


@triton.jit
def _parameters(
    x, index, d_weights, other, x_strides, B, H, group, h, m,
    M: tl.constexpr, P: tl.constexpr, S: tl.constexpr,
    BLOCK_M: tl.constexpr, TILE: tl.constexpr, BLOCK_S: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows of X' dW of one head from m on, and with the other side's dW if that is given."""
    first = tl.program_id(1) * group
    total = tl.zeros([BLOCK_M, BLOCK_S], tl.float32)
    of_other = tl.zeros([BLOCK_M, BLOCK_S], tl.float32)
    for number in range(first, tl.minimum(first + group, B)):
        b = tl.full([], 0, tl.int64) + number
        tokens = _landmarks(index + b * M, m, M, BLOCK_M)
        sequence, matrix = sequence_of(x, x_strides, b, h), (b * H + h) * (P * S)
        for row in range(0, P, TILE):
            rows = _load_tokens(sequence, tokens, x_strides[1], row, P, TILE)
            part = load_matrix(d_weights + matrix, row, 0, P, S, TILE, BLOCK_S)
            total = _product_of_tokens(rows, part, total, PRECISION)
            if other is not None:
                part = load_matrix(other + matrix, row, 0, P, S, TILE, BLOCK_S)
                of_other = _product_of_tokens(rows, part, of_other, PRECISION)
    return total, of_other


@triton.jit
def _landmarks(index, m, M: tl.constexpr, BLOCK_M: tl.constexpr):
    """The tokens that the landmarks from m on are; -1 where there is none."""
    i = m + tl.arange(0, BLOCK_M)
    return tl.load(index + i, mask=i < M, other=-1)


@triton.jit
def _load_tokens(x, tokens, stride, column, P: tl.constexpr, TILE: tl.constexpr):
    """Columns of these tokens of one sequence and head; zero, and not read, where there is none."""
    p = column + tl.arange(0, TILE)
    exists = (tokens >= 0)[:, None] & (p < P)[None, :]
    return tl.load(x + tokens[:, None] * stride + p[None, :], mask=exists, other=0.0)


@triton.jit
def _product_of_tokens(x, y, total, PRECISION: tl.constexpr):
    """The sum total + x y, where a float32 matrix y meets bfloat16 x in two bfloat16 parts."""
    if x.dtype == tl.bfloat16 and y.dtype == tl.float32:
        high = y.to(tl.bfloat16)
        low = (y - high.to(tl.float32)).to(tl.bfloat16)
        total = product(x, low, product(x, high, total))
    else:
        total = product(x, y, total, PRECISION)
    return total
