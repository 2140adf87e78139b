"""The fused passes of A = W C, forward and backward, a tile of the rows of W at a time.

Letters: C head dim, P feature dim, S directions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from primal_attention.ops.triton_kernel import launched
from primal_attention.ops.triton_maps import load_matrix, load_operand, product


@launched
@triton.jit
def collapse_blocks(
    w_e, w_r, c_e, c_r, given_e, given_r, a_e, a_r, c_e_strides, c_r_strides,
    P: tl.constexpr, S: tl.constexpr, C: tl.constexpr,
    TILE: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows of A_e = W_e C_e or of A_r, and of the weights in float32 where they are wanted."""
    matrix, row = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE
    if tl.program_id(2) == 0:
        weights = load_matrix(w_e + matrix * (P * S), row, 0, P, S, TILE, BLOCK_S)
        store_side(
            weights, c_e, given_e, a_e, c_e_strides, matrix, row,
            P, S, C, BLOCK_S, BLOCK_C, PRECISION,
        )  # fmt: skip
    else:
        weights = load_matrix(w_r + matrix * (P * S), row, 0, P, S, TILE, BLOCK_S)
        store_side(
            weights, c_r, given_r, a_r, c_r_strides, matrix, row,
            P, S, C, BLOCK_S, BLOCK_C, PRECISION,
        )  # fmt: skip


@triton.jit
def store_side(
    weights, c, given, a, c_strides, matrix, row,
    P: tl.constexpr, S: tl.constexpr, C: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write rows of the weights of one side, and of their product with the output map."""
    if given is not None:
        store_block(given + matrix * (P * S), weights, row, 0, P, S)
    if c is not None:
        for column in range(0, C, BLOCK_C):
            part = load_map(c, c_strides, column, S, C, BLOCK_S, BLOCK_C)
            nothing = tl.zeros([weights.shape[0], BLOCK_C], tl.float32)
            projected = product(weights, part, nothing, PRECISION)
            store_block(a + matrix * (P * C), projected, row, column, P, C)


@launched
@triton.jit
def total_blocks(
    c_e, c_r, w_e, w_r, d_e, d_r, da_e, da_r, total_e, total_r, dc_e, dc_r,
    c_e_strides, c_r_strides, scale,
    P: tl.constexpr, S: tl.constexpr, C: tl.constexpr,
    TILE: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of W_e by both of its uses, times the scale, and a part of that of C_e.

    Or those of the other side.
    """
    if tl.program_id(2) == 0:
        _side_total(
            c_e, w_e, d_e, da_e, total_e, dc_e, c_e_strides, scale,
            P, S, C, TILE, BLOCK_S, BLOCK_C, PRECISION,
        )  # fmt: skip
    else:
        _side_total(
            c_r, w_r, d_r, da_r, total_r, dc_r, c_r_strides, scale,
            P, S, C, TILE, BLOCK_S, BLOCK_C, PRECISION,
        )  # fmt: skip


@triton.jit
def _side_total(
    c, w, d_w, da, total, dc, c_strides, scale,
    P: tl.constexpr, S: tl.constexpr, C: tl.constexpr,
    TILE: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows of scale (dW + dA C^T), and the part dA^T W of the transpose of dC of these rows."""
    matrix, row = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE
    side = tl.zeros([TILE, BLOCK_S], tl.float32)
    if d_w is not None:
        side += load_matrix(d_w + matrix * (P * S), row, 0, P, S, TILE, BLOCK_S)
    if da is not None:
        part = dc + (matrix * tl.num_programs(1) + tl.program_id(1)) * (S * C)
        weights = load_operand(w + matrix * (P * S), row, 0, P, S, TILE, BLOCK_S)
        for column in range(0, C, BLOCK_C):
            d_block = load_operand(da + matrix * (P * C), row, column, P, C, TILE, BLOCK_C)
            of_c = load_map(c, c_strides, column, S, C, BLOCK_S, BLOCK_C)
            side = product(d_block, tl.trans(of_c), side, PRECISION)
            nothing = tl.zeros([BLOCK_C, BLOCK_S], tl.float32)
            d_map = product(tl.trans(d_block), weights, nothing, PRECISION)
            store_block(part, d_map, column, 0, C, S)
    store_block(total + matrix * (P * S), side * scale, row, 0, P, S)


@triton.jit
def load_map(
    c, strides, column,
    S: tl.constexpr, C: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Columns of the output map [S, C], in its own dtype."""
    s, i = tl.arange(0, BLOCK_S), column + tl.arange(0, BLOCK_C)
    exists = (s < S)[:, None] & (i < C)[None, :]
    places = c + s[:, None] * strides[0] + i[None, :] * strides[1]
    return tl.load(places, mask=exists, other=0.0)


@triton.jit
def store_block(tensor, block, row, column, R: tl.constexpr, C: tl.constexpr):
    """Write a block of a contiguous matrix [R, C]."""
    r, c = row + tl.arange(0, block.shape[0]), column + tl.arange(0, block.shape[1])
    exists = (r < R)[:, None] & (c < C)[None, :]
    places = tensor + r[:, None] * C + c[None, :]
    tl.store(places, block.to(tensor.dtype.element_ty), mask=exists)
