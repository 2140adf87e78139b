"""The fused passes of the sampled weights, forward and backward.

The rows of X' are read at the tokens where they stand, a block of landmarks at a time. Sums over
the sequences are written apart for each program and added up afterwards, in the same order every
time; no addition is atomic.

Letters: B batch, N tokens, H heads, C head dim, P feature dim, S directions, M landmarks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from primal_attention.ops.triton_maps import (
    LENGTHS,
    load_matrix,
    product,
    sequence_of,
    share_of_tokens,
    store_rows,
)

# Entries of the gradients that one program adds up.
BLOCK_OF_W, BLOCK_OF_C = tl.constexpr(256), tl.constexpr(32)


@triton.jit(do_not_specialize=LENGTHS)
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
    _store_side(
        total_e * scale, c_e, given_e, a_e, c_e_strides, matrix, row, P, S, C, BLOCK_S, BLOCK_C
    )
    _store_side(
        total_r * scale, c_r, given_r, a_r, c_r_strides, matrix, row, P, S, C, BLOCK_S, BLOCK_C
    )


@triton.jit
def _store_side(
    weights, c, given, a, c_strides, matrix, row,
    P: tl.constexpr, S: tl.constexpr, C: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write rows of the weights of one side, and of their product with the output map."""
    _store_block(given + matrix * (P * S), weights, row, 0, P, S)
    if c is not None:
        for column in range(0, C, BLOCK_C):
            part = _load_map(c, c_strides, column, S, C, BLOCK_S, BLOCK_C)
            projected = product(weights, part, tl.zeros([weights.shape[0], BLOCK_C], tl.float32))
            _store_block(a + matrix * (P * C), projected, row, column, P, C)


@triton.jit(do_not_specialize=LENGTHS)
def token_blocks(
    index, w_e, w_r, c_e, c_r, given_e, given_r, d_e, d_r, da_e, da_r,
    total_e, total_r, dc_e, dc_r, dx, c_e_strides, c_r_strides, dx_strides,
    N, H, splits, tokens, scale,
    M: tl.constexpr, P: tl.constexpr, S: tl.constexpr, C: tl.constexpr, DOT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, ALL_M: tl.constexpr,
    TILE: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The gradient of W_e by both of its uses, times the scale, and with it that of x.

    The parts of the gradient of C_e come along.
    """
    b, h, first, last = share_of_tokens(N, H, splits, tokens)
    row, matrix = tl.program_id(1) * TILE, b * H + h
    side_e = _side_total(
        c_e, given_e, d_e, da_e, total_e, dc_e, c_e_strides, matrix, row, first, scale,
        P, S, C, TILE, BLOCK_S, BLOCK_C,
    )  # fmt: skip
    side_r = _side_total(
        c_r, given_r, d_r, da_r, total_r, dc_r, c_r_strides, matrix, row, first, scale,
        P, S, C, TILE, BLOCK_S, BLOCK_C,
    )  # fmt: skip
    side_e, side_r = tl.trans(side_e), tl.trans(side_r)
    dx = sequence_of(dx, dx_strides, b, h)
    for start in range(first, last, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        begin, end = _range_of(index + b * M, start, BLOCK_N, M, ALL_M)
        sum_e = tl.zeros([BLOCK_N, BLOCK_S], tl.float32)
        sum_r = tl.zeros([BLOCK_N, BLOCK_S], tl.float32)
        for m in range(begin, end, BLOCK_M):
            here = n[:, None] == _landmarks(index + b * M, m, M, BLOCK_M)[None, :]
            taken = tl.where(here, 1.0, 0.0).to(DOT)
            of_e = load_matrix(w_e + h * (M * S), m, 0, M, S, BLOCK_M, BLOCK_S)
            of_r = load_matrix(w_r + h * (M * S), m, 0, M, S, BLOCK_M, BLOCK_S)
            sum_e = _exact_product(taken, of_e, sum_e)
            sum_r = _exact_product(taken, of_r, sum_r)
        d_rows = tl.zeros([BLOCK_N, TILE], tl.float32)
        if begin < end:
            d_rows = _exact_product(sum_e.to(DOT), side_e, d_rows)
            d_rows = _exact_product(sum_r.to(DOT), side_r, d_rows)
        store_rows(dx, d_rows, start, dx_strides[1], last, row, P, TILE)


@triton.jit
def _side_total(
    c, given, d_given, da, total, dc, c_strides, matrix, row, first, scale,
    P: tl.constexpr, S: tl.constexpr, C: tl.constexpr,
    TILE: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Rows of scale (dW + dA C^T), written once, and this program's part W^T dA of dC."""
    side = tl.zeros([TILE, BLOCK_S], tl.float32)
    if d_given is not None:
        side += load_matrix(d_given + matrix * (P * S), row, 0, P, S, TILE, BLOCK_S)
    if da is not None:
        part = dc + (matrix * tl.num_programs(1) + tl.program_id(1)) * (S * C)
        weights = load_matrix(given + matrix * (P * S), row, 0, P, S, TILE, BLOCK_S)
        for column in range(0, C, BLOCK_C):
            d_block = load_matrix(da + matrix * (P * C), row, column, P, C, TILE, BLOCK_C)
            of_c = _load_map(c, c_strides, column, S, C, BLOCK_S, BLOCK_C)
            side = product(d_block, tl.trans(of_c), side)
            if first == 0:
                zeros = tl.zeros([BLOCK_S, BLOCK_C], tl.float32)
                d_map = product(tl.trans(weights), d_block, zeros)
                _store_block(part, d_map, 0, column, S, C)
    side *= scale
    if first == 0:
        _store_block(total + matrix * (P * S), side, row, 0, P, S)
    return side


@triton.jit
def _range_of(index, start, BLOCK_N: tl.constexpr, M: tl.constexpr, ALL_M: tl.constexpr):
    """First landmark at one of the tokens from start on, and the one after the last of them."""
    m = tl.arange(0, ALL_M)
    token = tl.load(index + m, mask=m < M, other=-1)
    here = (token >= start) & (token < start + BLOCK_N)
    return tl.min(tl.where(here, m, M)), tl.max(tl.where(here, m + 1, 0))


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
    _store_block(dw_e + part, sum_e, m, 0, M, S)
    _store_block(dw_r + part, sum_r, m, 0, M, S)


@triton.jit(do_not_specialize=["groups", "matrices", "size"])
def add_up_blocks(
    w_parts_e, w_parts_r, c_parts_e, c_parts_r, dw_e, dw_r, dc_e, dc_r,
    dc_e_strides, dc_r_strides, groups, matrices, size, S: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The gradients of w_e and C_e from their parts, or those of w_r and C_r."""
    if tl.program_id(1) == 0:
        _add_up_side(
            w_parts_e, c_parts_e, dw_e, dc_e, dc_e_strides, groups, matrices, size, S, C
        )  # fmt: skip
    else:
        _add_up_side(
            w_parts_r, c_parts_r, dw_r, dc_r, dc_r_strides, groups, matrices, size, S, C
        )  # fmt: skip


@triton.jit
def _add_up_side(
    w_parts, c_parts, dw, dc, dc_strides, groups, matrices, size, S: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """A block of dw, whose parts are few and large, or after these of dC, whose are many."""
    block, number = tl.program_id(0), tl.cdiv(size, BLOCK_OF_W)
    if block < number:
        _add_up(w_parts, dw, (1, 0), block, groups, size, 1, 8, BLOCK_OF_W)
    elif c_parts is not None:
        _add_up(c_parts, dc, dc_strides, block - number, matrices, S * C, C, 64, BLOCK_OF_C)


@triton.jit
def _add_up(
    parts, total, strides, block, number, size, COLUMNS: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of the sum of so many contiguous parts of one size, a matrix with these strides."""
    place = block * BLOCK + tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, number, PARTS):
        part = start + tl.arange(0, PARTS)
        exists = (part < number)[:, None] & (place < size)[None, :]
        places = parts + part.to(tl.int64)[:, None] * size + place[None, :]
        sums += tl.sum(tl.load(places, mask=exists, other=0.0), 0)
    places = total + place // COLUMNS * strides[0] + place % COLUMNS * strides[1]
    tl.store(places, sums.to(total.dtype.element_ty), mask=place < size)


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
def _load_map(
    c, strides, column,
    S: tl.constexpr, C: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Columns of the output map [S, C], in float32."""
    s, i = tl.arange(0, BLOCK_S), column + tl.arange(0, BLOCK_C)
    exists = (s < S)[:, None] & (i < C)[None, :]
    places = c + s[:, None] * strides[0] + i[None, :] * strides[1]
    return tl.load(places, mask=exists, other=0.0).to(tl.float32)


@triton.jit
def _store_block(tensor, block, row, column, R: tl.constexpr, C: tl.constexpr):
    """Write a block of a contiguous matrix [R, C]."""
    r, c = row + tl.arange(0, block.shape[0]), column + tl.arange(0, block.shape[1])
    exists = (r < R)[:, None] & (c < C)[None, :]
    tl.store(tensor + r[:, None] * C + c[None, :], block, mask=exists)


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
