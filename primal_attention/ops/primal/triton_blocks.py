"""The fused passes of Primal-Attention over the blocks of one sequence and head, for narrow heads.

All matrices of a head fit one program: A_e and A_r, and the sums that grow along the tokens. These
are written for each program apart and added up afterwards, in the same order every time.

Letters: B batch, N tokens, H heads, C head dim, P feature dim, n tokens of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from primal_attention.ops.triton_maps import (
    features,
    fitted,
    load_matrix,
    load_rows,
    masked_rows,
    product,
    pull_back,
    real_tokens,
    scaled,
    sequence_of,
    share_of_tokens,
    store_matrix,
    store_rows,
)


@triton.jit
def forward_blocks(
    q, k, a_e, a_r, bias, mask, out, gram_q, gram_k,
    q_strides, k_strides, out_strides, a_stride, mask_stride, N, H, splits, tokens,
    P: tl.constexpr, C: tl.constexpr, MAP_Q: tl.constexpr, MAP_K: tl.constexpr, DOT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """out = phi_q A_e + phi_k A_r + bias, and the sums of phi_q phi_q^T and phi_k phi_k^T."""
    b, h, first, last = share_of_tokens(N, H, splits, tokens)
    q = sequence_of(q, q_strides, b, h)
    k = sequence_of(k, k_strides, b, h) if k is not None else None
    out = sequence_of(out, out_strides, b, h) if out is not None else None
    matrix = b * a_stride + h * (P * C)
    proj_e, scale_e = _projection(a_e, matrix, P, C, BLOCK_P, BLOCK_C, DOT)
    proj_r, scale_r = _projection(a_r, matrix, P, C, BLOCK_P, BLOCK_C, DOT)
    shift = tl.zeros([BLOCK_C], tl.float32)
    if bias is not None:
        c = tl.arange(0, BLOCK_C)
        shift = tl.load(bias + c, mask=c < C, other=0.0).to(tl.float32)
    zero = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    sum_q = tl.zeros([BLOCK_P, BLOCK_P], tl.float32)
    sum_k = tl.zeros([BLOCK_P, BLOCK_P], tl.float32)
    real = real_tokens(mask, b, mask_stride, first, last, BLOCK_N)
    for start in range(first, last, BLOCK_N):
        next_real = real_tokens(mask, b, mask_stride, start + BLOCK_N, last, BLOCK_N)
        total = zero
        rows = masked_rows(load_rows(q, start, q_strides[1], last, P, BLOCK_N, BLOCK_P), real, mask)
        base, factor, _ = features(rows, real, MAP_Q, DOT)
        if gram_q is not None:
            sum_q = product(tl.trans(base), scaled(base, factor * factor).to(DOT), sum_q)
        if a_e is not None:
            total += scaled(product(base, proj_e, zero), factor * scale_e)
        if k is not None:
            rows = load_rows(k, start, k_strides[1], last, P, BLOCK_N, BLOCK_P)
            base, factor, _ = features(masked_rows(rows, real, mask), real, MAP_K, DOT)
            if gram_k is not None:
                sum_k = product(tl.trans(base), scaled(base, factor * factor).to(DOT), sum_k)
            if a_r is not None:
                total += scaled(product(base, proj_r, zero), factor * scale_r)
        if out is not None:
            total = tl.where(real[:, None], total + shift[None, :], 0.0)
            store_rows(out, total, start, out_strides[1], last, C)
        real = next_real
    program = tl.program_id(0).to(tl.int64)
    if gram_q is not None:
        store_matrix(gram_q + program * (P * P), sum_q, P, P)
    if gram_k is not None:
        store_matrix(gram_k + program * (P * P), sum_k, P, P)


@triton.jit
def _projection(
    a, offset,
    P: tl.constexpr, C: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """A of this head, fitted, and its scale; zero where there is none."""
    matrix = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    if a is not None:
        matrix = load_matrix(a + offset, P, C, BLOCK_P, BLOCK_C)
    return fitted(matrix, DOT)


@triton.jit
def backward_blocks(
    q, k, a_e, a_r, mask, d_out, d_gram_q, d_gram_k, dq, dk, da_e, da_r, d_bias,
    q_strides, k_strides, d_out_strides, dq_strides, dk_strides, a_stride, mask_stride,
    N, H, splits, tokens,
    P: tl.constexpr, C: tl.constexpr, MAP_Q: tl.constexpr, MAP_K: tl.constexpr, DOT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """dz of dphi = d_out A^T + phi (dG + dG^T), and the sums of phi d_out^T and of d_out."""
    b, h, first, last = share_of_tokens(N, H, splits, tokens)
    q, dq = sequence_of(q, q_strides, b, h), sequence_of(dq, dq_strides, b, h)
    k = sequence_of(k, k_strides, b, h) if k is not None else None
    dk = sequence_of(dk, dk_strides, b, h) if k is not None else None
    d_out = sequence_of(d_out, d_out_strides, b, h) if d_out is not None else None
    matrix = b * a_stride + h * (P * C)
    proj_e, scale_e = _projection(a_e, matrix, P, C, BLOCK_P, BLOCK_C, DOT)
    proj_r, scale_r = _projection(a_r, matrix, P, C, BLOCK_P, BLOCK_C, DOT)
    gram = (b * H + h) * (P * P)
    both_q, scale_q = _both_ways(d_gram_q, gram, P, BLOCK_P, DOT)
    both_k, scale_k = _both_ways(d_gram_k, gram, P, BLOCK_P, DOT)
    sum_e = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    sum_r = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    sum_bias = tl.zeros([16, BLOCK_C], tl.float32)
    real = real_tokens(mask, b, mask_stride, first, last, BLOCK_N)
    for start in range(first, last, BLOCK_N):
        next_real = real_tokens(mask, b, mask_stride, start + BLOCK_N, last, BLOCK_N)
        d_rows = tl.zeros([BLOCK_N, BLOCK_C], DOT)
        if d_out is not None:
            d_rows = load_rows(d_out, start, d_out_strides[1], last, C, BLOCK_N, BLOCK_C)
            d_rows = masked_rows(d_rows, real, mask).to(DOT)
            if d_bias is not None:
                sums = tl.reshape(d_rows.to(tl.float32), [BLOCK_N // 16, 16, BLOCK_C])
                sum_bias += tl.sum(sums, 0)
        rows = masked_rows(load_rows(q, start, q_strides[1], last, P, BLOCK_N, BLOCK_P), real, mask)
        dz, sum_e = _side(
            rows, real, d_rows, proj_e, scale_e, both_q, scale_q, sum_e,
            da_e is not None, d_gram_q is not None, MAP_Q, DOT,
        )  # fmt: skip
        store_rows(dq, dz, start, dq_strides[1], last, P)
        if k is not None:
            rows = load_rows(k, start, k_strides[1], last, P, BLOCK_N, BLOCK_P)
            dz, sum_r = _side(
                masked_rows(rows, real, mask), real, d_rows, proj_r, scale_r, both_k, scale_k, sum_r,
                da_r is not None, d_gram_k is not None, MAP_K, DOT,
            )  # fmt: skip
            store_rows(dk, dz, start, dk_strides[1], last, P)
        real = next_real
    program = tl.program_id(0).to(tl.int64)
    if da_e is not None:
        store_matrix(da_e + program * (P * C), sum_e, P, C)
    if da_r is not None:
        store_matrix(da_r + program * (P * C), sum_r, P, C)
    if d_bias is not None:
        c = tl.arange(0, BLOCK_C)
        tl.store(d_bias + program * C + c, tl.sum(sum_bias, 0), mask=c < C)


@triton.jit
def _both_ways(d_gram, offset, P: tl.constexpr, BLOCK_P: tl.constexpr, DOT: tl.constexpr):
    """dG + dG^T of this head, fitted, and its scale; zero where there is none."""
    matrix = tl.zeros([BLOCK_P, BLOCK_P], tl.float32)
    if d_gram is not None:
        matrix = load_matrix(d_gram + offset, P, P, BLOCK_P, BLOCK_P)
        matrix += tl.trans(matrix)
    return fitted(matrix, DOT)


@triton.jit
def _side(
    rows, real, d_rows, proj, scale, both, scale_both, sum_a,
    HAS_A: tl.constexpr, HAS_GRAM: tl.constexpr, FEATURE_MAP: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Gradient of one block of queries or keys, and the sum of phi d_out^T grown by this block."""
    base, factor, inverse = features(rows, real, FEATURE_MAP, DOT)
    d_phi = tl.zeros(rows.shape, tl.float32)
    if HAS_A:
        sum_a = product(tl.trans(base), scaled(d_rows, factor).to(DOT), sum_a)
        d_phi = product(d_rows, tl.trans(proj), d_phi) * scale
    if HAS_GRAM:
        d_phi += scaled(product(base, both, tl.zeros(rows.shape, tl.float32)), factor * scale_both)
    return pull_back(scaled(base, factor), inverse, d_phi, FEATURE_MAP), sum_a
