"""The fused passes of the backward pass, over the blocks of one sequence, head and side.

Two passes over the tokens: the first sums the gradients of A, from which those of the weights
follow; the second writes the gradients of the rows, each by both of its uses at once. Neighbouring
programs have the two sides of the same tokens, so that the second finds d_out in the cache.

Letters: B batch, N tokens, H heads, C head dim, P feature dim, S directions, n tokens of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from primal_attention.ops.triton_kernel import launched
from primal_attention.ops.triton_maps import (
    LENGTHS,
    features,
    fitted,
    inverse_norms,
    load_matrix,
    load_rows,
    product,
    pull_back,
    real_tokens,
    scaled,
    scaled_product,
    sequence_of,
    store_matrix,
    store_rows,
)
from primal_attention.ops.triton_sums import share_of_tokens


@launched
@triton.jit(do_not_specialize=LENGTHS)
def sum_blocks(
    q, k, d_out, mask, da_e, da_r, d_bias, z_strides, d_out_strides, N, H, splits, tokens,
    P: tl.constexpr, C: tl.constexpr, MAP_Q: tl.constexpr, MAP_K: tl.constexpr, DOT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The sums of phi_q d_out^T and of d_out, or of phi_k d_out^T."""
    if tl.program_id(0) % 2 == 0:
        _side_sums(
            q, d_out, mask, da_e, d_bias, z_strides, d_out_strides, N, H, splits, tokens,
            P, C, MAP_Q, DOT, BLOCK_N, BLOCK_P, BLOCK_C, STAGES,
        )  # fmt: skip
    else:
        _side_sums(
            k, d_out, mask, da_r, None, z_strides, d_out_strides, N, H, splits, tokens,
            P, C, MAP_K, DOT, BLOCK_N, BLOCK_P, BLOCK_C, STAGES,
        )  # fmt: skip


@triton.jit
def _side_sums(
    z, d_out, mask, da, d_bias, z_strides, d_out_strides, N, H, splits, tokens,
    P: tl.constexpr, C: tl.constexpr, FEATURE_MAP: tl.constexpr, DOT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0) // 2
    b, h, first, last = share_of_tokens(program, N, H, splits, tokens)
    z, d_out = sequence_of(z, z_strides, b, h), sequence_of(d_out, d_out_strides, b, h)
    total, of_bias = summed_side(
        z, d_out, mask, b, z_strides[1], d_out_strides[1], N, first, last,
        da is not None, d_bias is not None, P, C, FEATURE_MAP, DOT,
        BLOCK_N, BLOCK_P, BLOCK_C, STAGES,
    )  # fmt: skip
    if da is not None:
        store_matrix(da + program.to(tl.int64) * (P * C), total, 0, P, C)
    if d_bias is not None:
        store_matrix(d_bias + program.to(tl.int64) * C, of_bias[None, :], 0, 1, C)


@triton.jit
def summed_side(
    z, d_out, mask, b, z_stride, d_out_stride, N, first, last,
    OF_A: tl.constexpr, OF_BIAS: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
    FEATURE_MAP: tl.constexpr, DOT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The sum of phi d_out^T over the tokens from first to last, and that of d_out."""
    total = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    sum_bias = tl.zeros([16, BLOCK_C], tl.float32)
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        real = real_tokens(mask, b, N, start, last, BLOCK_N)
        d_rows = load_rows(d_out, start, d_out_stride, real, 0, C, BLOCK_C).to(DOT)
        if OF_BIAS:
            groups = tl.reshape(d_rows.to(tl.float32), [BLOCK_N // 16, 16, BLOCK_C])
            sum_bias += tl.sum(groups, 0)
        if OF_A:
            rows = load_rows(z, start, z_stride, real, 0, P, BLOCK_P)
            inverse = inverse_norms(rows, FEATURE_MAP, DOT)
            base, factor = features(rows, inverse, real, FEATURE_MAP, DOT)
            total = product(tl.trans(base), scaled(d_rows, factor).to(DOT), total)
    return total, tl.sum(sum_bias, 0)


@launched
@triton.jit(do_not_specialize=LENGTHS)
def row_gradient_blocks(
    q, k, h_e, h_r, d_out, a_e, a_r, d_gram_q, d_gram_k, d_e, d_r, mask, inverse_n,
    dq, dk, dh_e, dh_r,
    z_strides, h_strides, d_out_strides, dz_strides, dh_strides, N, H, splits, tokens,
    P: tl.constexpr, S: tl.constexpr, C: tl.constexpr,
    MAP_Q: tl.constexpr, MAP_K: tl.constexpr, DOT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries and of H_e, or of the keys and of H_r."""
    if tl.program_id(0) % 2 == 0:
        _side_gradients(
            q, h_e, d_out, a_e, d_gram_q, d_r, mask, inverse_n, dq, dh_e,
            z_strides, h_strides, d_out_strides, dz_strides, dh_strides, N, H, splits, tokens,
            P, S, C, MAP_Q, DOT, BLOCK_N, BLOCK_P, BLOCK_S, BLOCK_C,
        )  # fmt: skip
    else:
        _side_gradients(
            k, h_r, d_out, a_r, d_gram_k, d_e, mask, inverse_n, dk, dh_r,
            z_strides, h_strides, d_out_strides, dz_strides, dh_strides, N, H, splits, tokens,
            P, S, C, MAP_K, DOT, BLOCK_N, BLOCK_P, BLOCK_S, BLOCK_C,
        )  # fmt: skip


@triton.jit
def _side_gradients(
    z, values, d_out, a, d_gram, d_moment, mask, inverse_n, dz, d_values,
    z_strides, value_strides, d_out_strides, dz_strides, d_value_strides, N, H, splits, tokens,
    P: tl.constexpr, S: tl.constexpr, C: tl.constexpr,
    FEATURE_MAP: tl.constexpr, DOT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    b, h, first, last = share_of_tokens(tl.program_id(0) // 2, N, H, splits, tokens)
    moment = load_matrix(d_moment + (b * H + h) * (P * S), 0, 0, P, S, BLOCK_P, BLOCK_S)
    write_side(
        z, values, d_out, a, d_gram, moment, mask, inverse_n, dz, d_values,
        z_strides, value_strides, d_out_strides, dz_strides, d_value_strides,
        N, H, b, h, first, last,
        P, S, C, FEATURE_MAP, DOT, BLOCK_N, BLOCK_P, BLOCK_S, BLOCK_C,
    )  # fmt: skip


@triton.jit
def write_side(
    z, values, d_out, a, d_gram, d_moment, mask, inverse_n, dz, d_values,
    z_strides, value_strides, d_out_strides, dz_strides, d_value_strides,
    N, H, b, h, first, last,
    P: tl.constexpr, S: tl.constexpr, C: tl.constexpr,
    FEATURE_MAP: tl.constexpr, DOT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Dz of dphi = d_out A^T + phi (dG + dG^T) + h M^T, and dh = phi M, with M = D / n.

    Of the tokens from first to last of one sequence and head.
    """
    z, dz = sequence_of(z, z_strides, b, h), sequence_of(dz, dz_strides, b, h)
    values = sequence_of(values, value_strides, b, h)
    d_values = sequence_of(d_values, d_value_strides, b, h)
    head = b * H + h
    moment, scale = fitted(d_moment * tl.load(inverse_n + b), DOT)
    if a is not None:
        d_out = sequence_of(d_out, d_out_strides, b, h)
        matrix = load_matrix(a + head * (P * C), 0, 0, P, C, BLOCK_P, BLOCK_C)
        proj, scale_a = fitted(matrix, DOT)
    if d_gram is not None:
        matrix = load_matrix(d_gram + head * (P * P), 0, 0, P, P, BLOCK_P, BLOCK_P)
        both, scale_both = fitted(matrix + tl.trans(matrix), DOT)
    for start in range(first, last, BLOCK_N):
        real = real_tokens(mask, b, N, start, last, BLOCK_N)
        rows = load_rows(z, start, z_strides[1], real, 0, P, BLOCK_P)
        inverse = inverse_norms(rows, FEATURE_MAP, DOT)
        base, factor = features(rows, inverse, real, FEATURE_MAP, DOT)
        d_phi = tl.zeros([BLOCK_N, BLOCK_P], tl.float32)
        if d_gram is not None:
            d_phi = scaled(product(base, both, d_phi), factor * scale_both)
        if a is not None:
            d_rows = load_rows(d_out, start, d_out_strides[1], real, 0, C, BLOCK_C).to(DOT)
            d_phi = scaled_product(d_rows, tl.trans(proj), scale_a, d_phi)
        row_values = load_rows(values, start, value_strides[1], real, 0, S, BLOCK_S).to(DOT)
        d_phi = scaled_product(row_values, tl.trans(moment), scale, d_phi)
        dh = product(base, moment, tl.zeros([BLOCK_N, BLOCK_S], tl.float32))
        dh = scaled(dh, factor * scale)
        store_rows(d_values, dh, start, d_value_strides[1], last, 0, S, BLOCK_S)
        d_z = pull_back(base, factor, inverse, d_phi, FEATURE_MAP)
        store_rows(dz, d_z, start, dz_strides[1], last, 0, P, BLOCK_P)
