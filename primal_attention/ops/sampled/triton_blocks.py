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
from primal_attention.ops.triton_maps import load_matrix, product, sequence_of


@triton.jit(do_not_specialize=["H"])
def weight_blocks(
    x, index, w_e, w_r, c_e, c_r, given_e, given_r, a_e, a_r,
    x_strides, c_e_strides, c_r_strides, H, scale,
    M: tl.constexpr, P: tl.constexpr, S: tl.constexpr, C: tl.constexpr, DOT: tl.constexpr,
    BLOCK_M: tl.constexpr, TILE: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Rows of W_e = scale X'^T w_e and of A_e = W_e C_e, and those of the other side."""
    matrix = tl.program_id(0).to(tl.int64)
    b, h = matrix // H, matrix % H
    row = tl.program_id(1) * TILE
    x = sequence_of(x, x_strides, b, h)
    total_e = tl.zeros([TILE, BLOCK_S], tl.float32)
    total_r = tl.zeros([TILE, BLOCK_S], tl.float32)
    for m in range(0, M, BLOCK_M):
        tokens = _landmarks(index + b * M, m, M, BLOCK_M)
        rows = tl.trans(_load_tokens(x, tokens, x_strides[1], row, P, TILE).to(DOT))
        of_e = load_matrix(w_e + h * (M * S), m, 0, M, S, BLOCK_M, BLOCK_S)
        of_r = load_matrix(w_r + h * (M * S), m, 0, M, S, BLOCK_M, BLOCK_S)
        total_e = _exact_product(rows, of_e, total_e)
        total_r = _exact_product(rows, of_r, total_r)
    store_side(
        total_e * scale, c_e, given_e, a_e, c_e_strides, matrix, row, P, S, C, BLOCK_S, BLOCK_C
    )
    store_side(
        total_r * scale, c_r, given_r, a_r, c_r_strides, matrix, row, P, S, C, BLOCK_S, BLOCK_C
    )


@triton.jit(do_not_specialize=["H"])
def row_blocks(
    index, w_e, w_r, total_e, total_r, dx, dx_strides, H,
    M: tl.constexpr, P: tl.constexpr, S: tl.constexpr, DOT: tl.constexpr,
    BLOCK_M: tl.constexpr, ALL_M: tl.constexpr, TILE: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Add w_e dW_e^T + w_r dW_r^T of a block of landmarks to the gradients of their tokens.

    Where landmarks stand at one token, the first of them adds what all of them give.
    """
    matrix, number = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_M
    b, h = matrix // H, matrix % H
    row = tl.program_id(2) * TILE
    index += b * M
    tokens = _landmarks(index, number, M, BLOCK_M)
    begin, end = _range_of(index, tokens, M, ALL_M)
    sum_e = tl.zeros([BLOCK_M, BLOCK_S], tl.float32)
    sum_r = tl.zeros([BLOCK_M, BLOCK_S], tl.float32)
    first = tl.full([BLOCK_M], M, tl.int32)
    for m in range(begin, end, BLOCK_M):
        others = _landmarks(index, m, M, BLOCK_M)
        here = (tokens[:, None] == others[None, :]) & (tokens >= 0)[:, None]
        places = tl.where(here, (m + tl.arange(0, BLOCK_M))[None, :], M)
        first = tl.minimum(first, tl.min(places, 1))
        taken = tl.where(here, 1.0, 0.0).to(DOT)
        of_e = load_matrix(w_e + h * (M * S), m, 0, M, S, BLOCK_M, BLOCK_S)
        of_r = load_matrix(w_r + h * (M * S), m, 0, M, S, BLOCK_M, BLOCK_S)
        sum_e = _exact_product(taken, of_e, sum_e)
        sum_r = _exact_product(taken, of_r, sum_r)
    given = matrix * (P * S)
    side_e = load_matrix(total_e + given, row, 0, P, S, TILE, BLOCK_S)
    side_r = load_matrix(total_r + given, row, 0, P, S, TILE, BLOCK_S)
    d_rows = tl.zeros([BLOCK_M, TILE], tl.float32)
    d_rows = _exact_product(sum_e.to(DOT), tl.trans(side_e), d_rows)
    d_rows = _exact_product(sum_r.to(DOT), tl.trans(side_r), d_rows)
    adds = first == number + tl.arange(0, BLOCK_M)
    tokens = tl.where(adds, tokens, -1)
    _add_to_tokens(sequence_of(dx, dx_strides, b, h), d_rows, tokens, dx_strides[1], row, P)


@triton.jit
def _range_of(index, tokens, M: tl.constexpr, ALL_M: tl.constexpr):
    """First landmark between the least and the greatest of these tokens, and one after the last."""
    least = tl.min(tl.where(tokens >= 0, tokens, 1 << 62))
    m = tl.arange(0, ALL_M)
    others = tl.load(index + m, mask=m < M, other=-1)
    here = (others >= least) & (others <= tl.max(tokens))
    return tl.min(tl.where(here, m, M)), tl.max(tl.where(here, m + 1, 0))


@triton.jit
def _add_to_tokens(x, rows, tokens, stride, column, P: tl.constexpr):
    """Add rows to columns of these tokens of one sequence and head; none where it is -1."""
    p = column + tl.arange(0, rows.shape[1])
    exists = (tokens >= 0)[:, None] & (p < P)[None, :]
    places = x + tokens[:, None] * stride + p[None, :]
    total = tl.load(places, mask=exists, other=0.0).to(tl.float32) + rows
    tl.store(places, total.to(x.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["B", "H", "group"])
def parameter_blocks(
    x, index, total_e, total_r, dw_e, dw_r, x_strides, B, H, group,
    M: tl.constexpr, P: tl.constexpr, S: tl.constexpr, DOT: tl.constexpr,
    BLOCK_M: tl.constexpr, TILE: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Rows of dw_e = X' dW_e and dw_r, summed over a group of sequences."""
    h, m = (tl.program_id(0) % H).to(tl.int64), tl.program_id(0) // H * BLOCK_M
    first = tl.program_id(1) * group
    sum_e = tl.zeros([BLOCK_M, BLOCK_S], tl.float32)
    sum_r = tl.zeros([BLOCK_M, BLOCK_S], tl.float32)
    for number in range(first, tl.minimum(first + group, B)):
        b = tl.full([], 0, tl.int64) + number
        tokens = _landmarks(index + b * M, m, M, BLOCK_M)
        sequence, matrix = sequence_of(x, x_strides, b, h), (b * H + h) * (P * S)
        for row in range(0, P, TILE):
            rows = _load_tokens(sequence, tokens, x_strides[1], row, P, TILE).to(DOT)
            of_e = load_matrix(total_e + matrix, row, 0, P, S, TILE, BLOCK_S)
            of_r = load_matrix(total_r + matrix, row, 0, P, S, TILE, BLOCK_S)
            sum_e = _exact_product(rows, of_e, sum_e)
            sum_r = _exact_product(rows, of_r, sum_r)
    part = (tl.program_id(1).to(tl.int64) * H + h) * (M * S)
    store_block(dw_e + part, sum_e, m, 0, M, S)
    store_block(dw_r + part, sum_r, m, 0, M, S)


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
def _exact_product(x, y, total):
    """The sum total + x y of a float32 matrix y, which bfloat16 x meets in two bfloat16 parts."""
    if x.dtype == tl.bfloat16:
        high = y.to(tl.bfloat16)
        low = (y - high.to(tl.float32)).to(tl.bfloat16)
        total = product(x, low, product(x, high, total))
    else:
        total = product(x, y, total)
    return total
