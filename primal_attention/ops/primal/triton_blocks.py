"""The fused passes of Primal-Attention over the blocks of one sequence and head.

The sums that grow along the tokens are written for each program apart and added up afterwards, in
the same order every time.

Letters: B batch, N tokens, H heads, C head dim, P feature dim, n tokens of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from primal_attention.ops.triton_kernel import launched
from primal_attention.ops.triton_maps import (
    LENGTHS,
    by_eight,
    features,
    fitted,
    inverse_norms,
    load_matrix,
    load_rows,
    product,
    pull_back,
    real_tokens,
    scaled,
    sequence_of,
    share_of_tokens,
    store_matrix,
    store_rows,
)
from primal_attention.ops.triton_sums import counted


@launched
@triton.jit(do_not_specialize=LENGTHS)
def forward_blocks(
    q, k, a_e, a_r, bias, mask, out, gram_q, gram_k,
    q_strides, k_strides, out_strides, a_e_stride, a_r_stride,
    N, H, splits, tokens,
    P: tl.constexpr, C: tl.constexpr, MAP_Q: tl.constexpr, MAP_K: tl.constexpr, DOT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Out = phi_q A_e + phi_k A_r + bias and the sums of phi phi^T, one tile of their columns."""
    b, h, first, last = share_of_tokens(N, H, splits, tokens)
    column = tl.program_id(1) * TILE
    q = sequence_of(q, q_strides, b, h)
    k = sequence_of(k, k_strides, b, h) if k is not None else None
    out = sequence_of(out, out_strides, b, h) if out is not None else None
    head = h * (P * C)
    proj_e, scale_e = _projection(a_e, b * a_e_stride + head, column, P, C, BLOCK_P, TILE, DOT)
    proj_r, scale_r = _projection(a_r, b * a_r_stride + head, column, P, C, BLOCK_P, TILE, DOT)
    attend(
        q, k, bias, mask, out, gram_q, gram_k, proj_e, scale_e, proj_r, scale_r,
        tl.program_id(0).to(tl.int64), b, q_strides[1], k_strides[1], out_strides[1],
        N, first, last, column,
        a_e is not None, a_r is not None, P, C, MAP_Q, MAP_K, DOT, BLOCK_N, BLOCK_P, TILE,
    )  # fmt: skip


@triton.jit
def attend(
    q, k, bias, mask, out, gram_q, gram_k, proj_e, scale_e, proj_r, scale_r,
    program, b, q_stride, k_stride, out_stride, N, first, last, column,
    HAS_E: tl.constexpr, HAS_R: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
    MAP_Q: tl.constexpr, MAP_K: tl.constexpr, DOT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Out of the tokens from first to last, and the program's Gram matrices."""
    shift = tl.zeros([TILE], tl.float32)
    if bias is not None:
        c = column + tl.arange(0, TILE)
        shift = tl.load(bias + c, mask=c < C, other=0.0).to(tl.float32)
    sum_q = tl.zeros([BLOCK_P, TILE], tl.float32)
    sum_k = tl.zeros([BLOCK_P, TILE], tl.float32)
    for start in range(first, last, BLOCK_N):
        real = real_tokens(mask, b, N, start, last, BLOCK_N)
        total = tl.zeros([BLOCK_N, TILE], tl.float32) + shift[None, :]
        total, sum_q = _side_forward(
            q, start, q_stride, real, column, proj_e, scale_e, total, sum_q,
            HAS_E, gram_q is not None, P, BLOCK_P, TILE, MAP_Q, DOT,
        )  # fmt: skip
        if k is not None:
            total, sum_k = _side_forward(
                k, start, k_stride, real, column, proj_r, scale_r, total, sum_k,
                HAS_R, gram_k is not None, P, BLOCK_P, TILE, MAP_K, DOT,
            )  # fmt: skip
        if out is not None:
            if mask is not None:
                total = tl.where(real[:, None], total, 0.0)
            store_rows(out, total, start, out_stride, last, column, C, TILE)
    if gram_q is not None:
        store_matrix(gram_q + program * (P * P), sum_q, column, P, P)
    if gram_k is not None:
        store_matrix(gram_k + program * (P * P), sum_k, column, P, P)


@triton.jit
def _side_forward(
    z, start, stride, real, column, proj, scale, total, sum_gram,
    HAS_A: tl.constexpr, HAS_GRAM: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr,
    TILE: tl.constexpr, FEATURE_MAP: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """The output and the sum of phi phi^T, with the part of one block of queries or keys added."""
    if HAS_A or HAS_GRAM:
        rows = load_rows(z, start, stride, real, 0, P, BLOCK_P)
        inverse = inverse_norms(rows, FEATURE_MAP, DOT)
        base, factor = features(rows, inverse, real, FEATURE_MAP, DOT)
        if HAS_GRAM:
            tile = base
            if TILE != BLOCK_P:
                rows = load_rows(z, start, stride, real, column, P, TILE)
                tile, _ = features(rows, inverse, real, FEATURE_MAP, DOT)
            tile = scaled(tile, factor * factor).to(DOT)
            sum_gram = product(tl.trans(base), tile, sum_gram)
        if HAS_A:
            part = product(base, proj, tl.zeros(total.shape, tl.float32))
            total += scaled(part, factor * scale)
    return total, sum_gram


@triton.jit
def _projection(
    a, offset, column,
    P: tl.constexpr, C: tl.constexpr, BLOCK_P: tl.constexpr, TILE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """A tile of A of this head, fitted, and its scale; zero where there is none."""
    matrix = tl.zeros([BLOCK_P, TILE], tl.float32)
    if a is not None:
        matrix = load_matrix(a + offset, 0, column, P, C, BLOCK_P, TILE)
    return fitted(matrix, DOT)


@launched
@triton.jit(do_not_specialize=LENGTHS)
def backward_blocks(
    q, k, a_e, a_r, mask, counts, d_out, d_gram_q, d_gram_k, dq, dk, da_e, da_r, d_bias, sums,
    q_strides, k_strides, d_out_strides, dq_strides, dk_strides, count_strides,
    a_e_stride, a_r_stride,
    N, H, splits, tokens,
    P: tl.constexpr, C: tl.constexpr, MAP_Q: tl.constexpr, MAP_K: tl.constexpr, DOT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, DIVIDED: tl.constexpr,
):  # fmt: skip
    """Dz of dphi = d_out A^T + phi (dG + dG^T), and the sums of phi d_out^T and of d_out.

    Where that is said, dz is divided by the number of real tokens up to each. The sums of dq and dk
    over the share go to two rows of sums, where there are any.
    """
    b, h, first, last = share_of_tokens(N, H, splits, tokens)
    q, dq = sequence_of(q, q_strides, b, h), sequence_of(dq, dq_strides, b, h)
    k = sequence_of(k, k_strides, b, h) if k is not None else None
    dk = sequence_of(dk, dk_strides, b, h) if k is not None else None
    d_out = sequence_of(d_out, d_out_strides, b, h) if d_out is not None else None
    head = h * (P * C)
    proj_e, scale_e = _projection(a_e, b * a_e_stride + head, 0, P, C, BLOCK_P, BLOCK_C, DOT)
    proj_r, scale_r = _projection(a_r, b * a_r_stride + head, 0, P, C, BLOCK_P, BLOCK_C, DOT)
    gram = (b * H + h) * (P * P)
    both_q, scale_q = _both_ways(d_gram_q, gram, P, BLOCK_P, DOT)
    both_k, scale_k = _both_ways(d_gram_k, gram, P, BLOCK_P, DOT)
    sum_e = tl.zeros([BLOCK_C, BLOCK_P], tl.float32)
    sum_r = tl.zeros([BLOCK_C, BLOCK_P], tl.float32)
    sum_bias = tl.zeros([16, BLOCK_C], tl.float32)
    sum_q = tl.zeros([BLOCK_N // 2, BLOCK_P], tl.float32)
    sum_k = tl.zeros([BLOCK_N // 2, BLOCK_P], tl.float32)
    for start in range(first, last, BLOCK_N):
        real = real_tokens(mask, b, N, start, last, BLOCK_N)
        share = tl.full([BLOCK_N], 1.0, tl.float32)
        if DIVIDED:
            t = counted(counts, count_strides, b, start, last, BLOCK_N)
            share /= tl.maximum(t, 1.0)
        d_rows = tl.zeros([BLOCK_N, BLOCK_C], DOT)
        if d_out is not None:
            d_rows = load_rows(d_out, start, d_out_strides[1], real, 0, C, BLOCK_C).to(DOT)
            if d_bias is not None:
                groups = tl.reshape(d_rows.to(tl.float32), [BLOCK_N // 16, 16, BLOCK_C])
                sum_bias += tl.sum(groups, 0)
        dz, sum_e = _side_backward(
            q, start, q_strides[1], real, share, d_rows, proj_e, scale_e, both_q, scale_q,
            sum_e, da_e is not None, d_gram_q is not None, P, BLOCK_P, MAP_Q, DOT,
        )  # fmt: skip
        store_rows(dq, dz, start, dq_strides[1], last, 0, P, BLOCK_P)
        sum_q = _grown(sum_q, dz, sums)
        if k is not None:
            dz, sum_r = _side_backward(
                k, start, k_strides[1], real, share, d_rows, proj_r, scale_r, both_k, scale_k,
                sum_r, da_r is not None, d_gram_k is not None, P, BLOCK_P, MAP_K, DOT,
            )  # fmt: skip
            store_rows(dk, dz, start, dk_strides[1], last, 0, P, BLOCK_P)
            sum_k = _grown(sum_k, dz, sums)
    program = tl.program_id(0).to(tl.int64)
    if da_e is not None:
        store_matrix(da_e + program * (P * C), tl.trans(sum_e), 0, P, C)
    if da_r is not None:
        store_matrix(da_r + program * (P * C), tl.trans(sum_r), 0, P, C)
    if d_bias is not None:
        c = tl.arange(0, BLOCK_C)
        tl.store(d_bias + program * C + c, tl.sum(sum_bias, 0), mask=c < C)
    row = program // H * (2 * H) + h  # the heads of the keys stand after those of the queries
    _store_sum(sums, sum_q, row, P)
    _store_sum(sums, sum_k, row + H, P)


@triton.jit
def _grown(total, rows, sums):
    """The total with the rows [n, P] added, where sums are wanted."""
    if sums is not None:
        total += by_eight(rows)
    return total


@triton.jit
def _store_sum(sums, total, row, P: tl.constexpr):
    if sums is not None:
        p = tl.arange(0, total.shape[1])
        tl.store(sums + row * P + p, tl.sum(total, 0), mask=p < P)


@triton.jit
def _both_ways(d_gram, offset, P: tl.constexpr, BLOCK_P: tl.constexpr, DOT: tl.constexpr):
    """DG + dG^T of this head, fitted, and its scale; zero where there is none."""
    matrix = tl.zeros([BLOCK_P, BLOCK_P], tl.float32)
    if d_gram is not None:
        matrix = load_matrix(d_gram + offset, 0, 0, P, P, BLOCK_P, BLOCK_P)
        matrix += tl.trans(matrix)
    return fitted(matrix, DOT)


@triton.jit
def _side_backward(
    z, start, stride, real, share, d_rows, proj, scale, both, scale_both, sum_a,
    HAS_A: tl.constexpr, HAS_GRAM: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr,
    FEATURE_MAP: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Gradient of one block of queries or keys, and the sum of d_out phi^T grown by this block."""
    rows = load_rows(z, start, stride, real, 0, P, BLOCK_P)
    inverse = inverse_norms(rows, FEATURE_MAP, DOT)
    base, factor = features(rows, inverse, real, FEATURE_MAP, DOT)
    d_phi = tl.zeros(rows.shape, tl.float32)
    if HAS_A:
        sum_a = product(tl.trans(d_rows), scaled(base, factor).to(DOT), sum_a)
    if HAS_GRAM:
        d_phi = scaled(product(base, both, d_phi), factor * (scale_both / scale))
    if HAS_A:
        d_phi = product(d_rows, tl.trans(proj), d_phi)
    share *= scale
    if FEATURE_MAP == "cosine":
        inverse *= share  # the derivative has it as a factor
    else:
        d_phi = scaled(d_phi, share)
    return pull_back(base, factor, inverse, d_phi, FEATURE_MAP), sum_a
