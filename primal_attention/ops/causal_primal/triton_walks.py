"""The walks of fused causal Primal-Attention over the blocks of one segment, either way.

Letters: B batch, N tokens, H heads, P head dim and feature dim, C outputs of a head, n tokens of a
block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from primal_attention.ops.triton_sums import (
    carried,
    columns_of,
    existing,
    features,
    load_matrix,
    load_rows,
    lowered,
    product,
    pull_back,
    real_tokens,
    row_of,
    sequence_of,
    share_of_tokens,
    shares,
    store_matrix,
    store_row,
    store_rows,
    sums_along,
    walk,
)


@triton.jit
def forward_walk(
    q, k, a_e, a_r, bias, q_before, k_before, counts, mask, q_segments, k_segments,
    out, gram_q, gram_k, q_total, k_total, q_sums, k_sums,
    q_strides, k_strides, count_strides, out_strides, N, H, number, tokens,
    P: tl.constexpr, C: tl.constexpr, WIDTH_P: tl.constexpr, WIDTH_C: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
    MAP_Q: tl.constexpr, MAP_K: tl.constexpr,
):  # fmt: skip
    """Out = phi(mean of q) A_e + phi(mean of k) A_r + bias, and the sums of phi phi^T."""
    program = tl.program_id(0)
    b, h, first, last = share_of_tokens(program, N, H, number, tokens)
    q, k = sequence_of(q, q_strides, b, h), sequence_of(k, k_strides, b, h)
    out = sequence_of(out, out_strides, b, h)
    e = lowered(load_matrix(a_e, h, P, C, WIDTH_P, WIDTH_C), PRECISION)
    r = lowered(load_matrix(a_r, h, P, C, WIDTH_P, WIDTH_C), PRECISION)
    shift = row_of(bias, 0, C, WIDTH_C)
    sum_q = row_of(q_before, b * H + h, P, WIDTH_P)
    sum_q += carried(q_segments, program, b, h, H, number, P, WIDTH_P, False)
    sum_k = row_of(k_before, b * H + h, P, WIDTH_P)
    sum_k += carried(k_segments, program, b, h, H, number, P, WIDTH_P, False)
    moment_q = tl.zeros([WIDTH_P, WIDTH_P], tl.float32)
    moment_k = tl.zeros([WIDTH_P, WIDTH_P], tl.float32)
    for step in tl.range(0, tl.cdiv(last - first, BLOCK), num_stages=STAGES):
        start = walk(first, last, step, BLOCK, False)
        real = real_tokens(mask, b, N, start, last, BLOCK)
        keep = columns_of(real, P, WIDTH_P)
        share = shares(counts, count_strides, b, start, last, BLOCK)
        row = (b * tl.cdiv(N, BLOCK) + start // BLOCK) * H + h
        store_row(q_sums, row, sum_q, P, WIDTH_P)
        store_row(k_sums, row, sum_k, P, WIDTH_P)
        rows = load_rows(q, start, q_strides[1], keep, BLOCK, WIDTH_P)
        phi = _features_of_means(rows, sum_q, share, keep, PARTS, PRECISION, MAP_Q)
        sum_q += tl.sum(rows.to(tl.float32), 0)
        total = product(phi, e, tl.zeros([BLOCK, WIDTH_C], tl.float32), PRECISION)
        if gram_q is not None:
            moment_q = product(tl.trans(phi), phi, moment_q, PRECISION)
        rows = load_rows(k, start, k_strides[1], keep, BLOCK, WIDTH_P)
        phi = _features_of_means(rows, sum_k, share, keep, PARTS, PRECISION, MAP_K)
        sum_k += tl.sum(rows.to(tl.float32), 0)
        total = product(phi, r, total, PRECISION)
        if gram_k is not None:
            moment_k = product(tl.trans(phi), phi, moment_k, PRECISION)
        total = tl.where(real[:, None], total + shift[None, :], 0.0)
        exists = columns_of(existing(start, last, BLOCK), C, WIDTH_C)
        store_rows(out, total, start, out_strides[1], exists)
    if gram_q is not None:
        store_matrix(gram_q, program, moment_q, P, P)
        store_matrix(gram_k, program, moment_k, P, P)
    if last == N:
        store_row(q_total, b * H + h, sum_q, P, WIDTH_P)
        store_row(k_total, b * H + h, sum_k, P, WIDTH_P)


@triton.jit
def _features_of_means(
    rows, before, share, keep,
    PARTS: tl.constexpr, PRECISION: tl.constexpr, FEATURE_MAP: tl.constexpr,
):  # fmt: skip
    means = (before[None, :] + sums_along(rows, False, PARTS)) * share
    phi, _ = features(means, keep, FEATURE_MAP)
    return lowered(phi, PRECISION)


@triton.jit
def backward_walk(
    q, k, a_e, a_r, counts, mask, q_sums, k_sums, d_out, d_gram_q, d_gram_k,
    q_strides, k_strides, count_strides, d_out_strides, N, H, number, tokens, q_after, k_after,
    d_q_total, d_k_total, dq, dk, da_e, da_r, d_bias, d_q_before, d_k_before,
    dq_strides, dk_strides,
    P: tl.constexpr, C: tl.constexpr, WIDTH_P: tl.constexpr, WIDTH_C: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
    PARTS_OF_GRADIENT: tl.constexpr, MAP_Q: tl.constexpr, MAP_K: tl.constexpr,
    ONLY_SUMS: tl.constexpr,
):  # fmt: skip
    """Gradients of the tokens of one segment, or what its means pass to every earlier segment.

    The two sides are two programs, neighbours in time, so that the second reads d_out from the
    cache.
    """
    if tl.program_id(0) % 2 == 0:
        _walk_back(
            q, a_e, counts, mask, q_sums, d_out, d_gram_q, q_strides, count_strides, d_out_strides,
            N, H, number, tokens, q_after, d_q_total, dq, da_e, d_bias, d_q_before, dq_strides,
            P, C, WIDTH_P, WIDTH_C, BLOCK, PRECISION, PARTS, STAGES, PARTS_OF_GRADIENT,
            MAP_Q, ONLY_SUMS,
        )  # fmt: skip
    else:
        _walk_back(
            k, a_r, counts, mask, k_sums, d_out, d_gram_k, k_strides, count_strides, d_out_strides,
            N, H, number, tokens, k_after, d_k_total, dk, da_r, None, d_k_before, dk_strides,
            P, C, WIDTH_P, WIDTH_C, BLOCK, PRECISION, PARTS, STAGES, PARTS_OF_GRADIENT,
            MAP_K, ONLY_SUMS,
        )  # fmt: skip


@triton.jit
def _walk_back(
    z, a, counts, mask, sums, d_out, d_gram, strides, count_strides, d_out_strides,
    N, H, number, tokens, after, d_total, dz, da, d_bias, d_before, dz_strides,
    P: tl.constexpr, C: tl.constexpr, WIDTH_P: tl.constexpr, WIDTH_C: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
    PARTS_OF_GRADIENT: tl.constexpr, FEATURE_MAP: tl.constexpr, ONLY_SUMS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0) // 2
    b, h, first, last = share_of_tokens(program, N, H, number, tokens)
    z, d_out = sequence_of(z, strides, b, h), sequence_of(d_out, d_out_strides, b, h)
    a = lowered(load_matrix(a, h, P, C, WIDTH_P, WIDTH_C), PRECISION)
    both = load_matrix(d_gram, b * H + h, P, P, WIDTH_P, WIDTH_P)
    both = lowered(both + tl.trans(both), PRECISION)
    passed = tl.zeros([WIDTH_P], tl.float32)
    if not ONLY_SUMS:
        dz = sequence_of(dz, dz_strides, b, h)
        passed = row_of(d_total, b * H + h, P, WIDTH_P)
        passed += carried(after, program, b, h, H, number, P, WIDTH_P, True)
    sum_a = tl.zeros([WIDTH_P, WIDTH_C], tl.float32)
    sum_bias = tl.zeros([WIDTH_C], tl.float32)
    for step in tl.range(0, tl.cdiv(last - first, BLOCK), num_stages=STAGES):
        start = walk(first, last, step, BLOCK, True)
        real = real_tokens(mask, b, N, start, last, BLOCK)
        keep, keep_c = columns_of(real, P, WIDTH_P), columns_of(real, C, WIDTH_C)
        share = shares(counts, count_strides, b, start, last, BLOCK)
        rows = load_rows(z, start, strides[1], keep, BLOCK, WIDTH_P)
        d_rows = load_rows(d_out, start, d_out_strides[1], keep_c, BLOCK, WIDTH_C)
        before = row_of(sums, (b * tl.cdiv(N, BLOCK) + start // BLOCK) * H + h, P, WIDTH_P)
        means = (before[None, :] + sums_along(rows, False, PARTS)) * share
        phi, inverse = features(means, keep, FEATURE_MAP)
        d_phi = product(d_rows, tl.trans(a), tl.zeros([BLOCK, WIDTH_P], tl.float32), PRECISION)
        if d_gram is not None:
            d_phi = product(phi, both, d_phi, PRECISION)
        if not ONLY_SUMS:
            sum_a = product(tl.trans(phi), d_rows, sum_a, PRECISION)
        if d_bias is not None:
            sum_bias += tl.sum(d_rows.to(tl.float32), 0)
        d_means = pull_back(phi, inverse, d_phi, share, FEATURE_MAP)
        if not ONLY_SUMS:
            gradients = passed[None, :] + sums_along(d_means, True, PARTS_OF_GRADIENT)
            exists = columns_of(existing(start, last, BLOCK), P, WIDTH_P)
            store_rows(dz, tl.where(keep, gradients, 0.0), start, dz_strides[1], exists)
        passed += tl.sum(d_means, 0)
    if ONLY_SUMS:
        store_row(after, program, passed, P, WIDTH_P)
    else:
        store_matrix(da, program, sum_a, P, C)
        if d_bias is not None:
            store_row(d_bias, program, sum_bias, C, WIDTH_C)
        if first == 0:
            store_row(d_before, b * H + h, passed, P, WIDTH_P)
