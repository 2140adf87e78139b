"""The fused passes of short sequences: a program has all tokens of one sequence and head.

Forward it sums up the weights and goes on to A and the outputs at once; backward it sums up the
gradients of A and goes on to those of the weights and of the rows. The tokens are read a second
time for that, from the cache.

Letters: B batch, N tokens, H heads, C head dim, P feature dim, S directions, n tokens of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from primal_attention.ops.collapse.triton_blocks import load_map, store_block
from primal_attention.ops.moment.triton_blocks import summed_moment
from primal_attention.ops.primal.triton_blocks import attend
from primal_attention.ops.projected_dual.triton_blocks import summed_side, write_side
from primal_attention.ops.triton_kernel import launched
from primal_attention.ops.triton_maps import (
    fitted,
    load_matrix,
    product,
    sequence_of,
    store_matrix,
)


@launched
@triton.jit(do_not_specialize=["N", "H"])
def whole_blocks(
    q, k, h_e, h_r, c_e, c_r, bias, mask, inverse_n, out, gram_q, gram_k, w_e, w_r, a_e, a_r,
    z_strides, h_strides, out_strides, c_e_strides, c_r_strides, N, H,
    P: tl.constexpr, S: tl.constexpr, C: tl.constexpr,
    MAP_Q: tl.constexpr, MAP_K: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """W_e, W_r, A_e, A_r, outputs and Gram matrices of one sequence and head.

    The last come first: the projection was just before, so that the cache has their tokens still.
    """
    head = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    b, h = head // H, head % H
    q, k = sequence_of(q, z_strides, b, h), sequence_of(k, z_strides, b, h)
    h_e, h_r = sequence_of(h_e, h_strides, b, h), sequence_of(h_r, h_strides, b, h)
    share = tl.load(inverse_n + b)
    of_k = summed_moment(
        k, h_r, mask, b, z_strides[1], h_strides[1], N, 0, N, 0,
        P, S, MAP_K, DOT, BLOCK_N, BLOCK_P, BLOCK_S,
    )  # fmt: skip
    proj_e, scale_e = _collapsed(
        of_k * share, c_e, w_e, a_e, c_e_strides, head, P, S, C, BLOCK_P, BLOCK_S, TILE, DOT,
        PRECISION,
    )  # fmt: skip
    of_q = summed_moment(
        q, h_e, mask, b, z_strides[1], h_strides[1], N, 0, N, 0,
        P, S, MAP_Q, DOT, BLOCK_N, BLOCK_P, BLOCK_S,
    )  # fmt: skip
    proj_r, scale_r = _collapsed(
        of_q * share, c_r, w_r, a_r, c_r_strides, head, P, S, C, BLOCK_P, BLOCK_S, TILE, DOT,
        PRECISION,
    )  # fmt: skip
    attend(
        q, k, bias, mask, sequence_of(out, out_strides, b, h), gram_q, gram_k,
        proj_e, scale_e, proj_r, scale_r, head, b, z_strides[1], z_strides[1], out_strides[1],
        N, 0, N, 0,
        True, True, P, C, MAP_Q, MAP_K, DOT, BLOCK_N, BLOCK_P, TILE, False,
    )  # fmt: skip


@triton.jit
def _collapsed(
    weights, c, w, a, c_strides, head,
    P: tl.constexpr, S: tl.constexpr, C: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr, TILE: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A = W C, fitted, and its scale; both W and A are written."""
    of_c = load_map(c, c_strides, 0, S, C, BLOCK_S, TILE)
    matrix = product(weights, of_c, tl.zeros([BLOCK_P, TILE], tl.float32), PRECISION)
    store_block(w + head * (P * S), weights, 0, 0, P, S)
    store_block(a + head * (P * C), matrix, 0, 0, P, C)
    return fitted(matrix, DOT)


@launched
@triton.jit(do_not_specialize=["N", "H"])
def whole_gradient_blocks(
    q, k, h_e, h_r, d_out, a_e, a_r, d_gram_q, d_gram_k, w_e, w_r, d_e, d_r, c_e, c_r,
    mask, inverse_n, dq, dk, dh_e, dh_r, dc_e, dc_r, d_bias,
    z_strides, h_strides, d_out_strides, dz_strides, dh_strides, c_e_strides, c_r_strides, N, H,
    P: tl.constexpr, S: tl.constexpr, C: tl.constexpr,
    MAP_Q: tl.constexpr, MAP_K: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of the rows of one sequence and head, and its parts of those of C and the bias."""
    head = tl.program_id(0).to(tl.int64)
    b, h = head // H, head % H
    d_rows = sequence_of(d_out, d_out_strides, b, h)
    da, of_bias = summed_side(
        sequence_of(q, z_strides, b, h), d_rows, mask, b, z_strides[1], d_out_strides[1], N, 0, N,
        True, d_bias is not None, P, C, MAP_Q, DOT, BLOCK_N, BLOCK_P, BLOCK_C, STAGES,
    )  # fmt: skip
    if d_bias is not None:
        store_matrix(d_bias + head * C, of_bias[None, :], 0, 1, C)
    moment_e = _weight_gradient(
        da.to(a_e.dtype.element_ty), w_e, d_e, c_e, dc_e, c_e_strides, head,
        P, S, C, BLOCK_P, BLOCK_S, BLOCK_C, PRECISION,
    )  # fmt: skip
    da, _ = summed_side(
        sequence_of(k, z_strides, b, h), d_rows, mask, b, z_strides[1], d_out_strides[1], N, 0, N,
        True, False, P, C, MAP_K, DOT, BLOCK_N, BLOCK_P, BLOCK_C, STAGES,
    )  # fmt: skip
    moment_r = _weight_gradient(
        da.to(a_r.dtype.element_ty), w_r, d_r, c_r, dc_r, c_r_strides, head,
        P, S, C, BLOCK_P, BLOCK_S, BLOCK_C, PRECISION,
    )  # fmt: skip
    write_side(
        q, h_e, d_out, a_e, d_gram_q, moment_r, mask, inverse_n, dq, dh_e,
        z_strides, h_strides, d_out_strides, dz_strides, dh_strides, N, H, b, h, 0, N,
        P, S, C, MAP_Q, DOT, BLOCK_N, BLOCK_P, BLOCK_S, BLOCK_C,
    )  # fmt: skip
    write_side(
        k, h_r, d_out, a_r, d_gram_k, moment_e, mask, inverse_n, dk, dh_r,
        z_strides, h_strides, d_out_strides, dz_strides, dh_strides, N, H, b, h, 0, N,
        P, S, C, MAP_K, DOT, BLOCK_N, BLOCK_P, BLOCK_S, BLOCK_C,
    )  # fmt: skip


@triton.jit
def _weight_gradient(
    da, w, d_w, c, dc, c_strides, head,
    P: tl.constexpr, S: tl.constexpr, C: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """D = dA C^T + dW; the part dA^T W of the transpose of dC is written."""
    weights = load_matrix(w + head * (P * S), 0, 0, P, S, BLOCK_P, BLOCK_S)
    d_map = product(tl.trans(da), weights, tl.zeros([BLOCK_C, BLOCK_S], tl.float32), PRECISION)
    store_block(dc + head * (S * C), d_map, 0, 0, C, S)
    total = tl.zeros([BLOCK_P, BLOCK_S], tl.float32)
    if d_w is not None:
        total += load_matrix(d_w + head * (P * S), 0, 0, P, S, BLOCK_P, BLOCK_S)
    of_c = load_map(c, c_strides, 0, S, C, BLOCK_S, BLOCK_C)
    return product(da, tl.trans(of_c), total, PRECISION)
