"""The walk backward over the blocks of one segment, for each side.

Both sides are one formula with queries and keys, e and r exchanged: what is said of a near side and
a far one holds both ways. Programs that share their tokens have neighbouring numbers, so that what
one reads the others find in the cache.

Letters: B batch, N tokens, H heads, P features, S directions, V outputs of a head, n tokens of a
block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from primal_attention.ops.dual_causal.triton_blocks import (
    both_ways,
    features_of,
    inverse_of,
    later,
    map_of,
    past,
    rows_of,
    segment_of,
    state_of,
    store_rows,
    times,
)
from primal_attention.ops.triton_kernel import launched
from primal_attention.ops.triton_maps import by_eight, existing, pull_back, real_tokens, scaled
from primal_attention.ops.triton_sums import (
    columns_of,
    load_matrix,
    lowered,
    product,
    share_of_tokens,
    shares,
    store_matrix,
    store_row,
    walk,
)


@launched
@triton.jit
def backward_walk(
    q, k, h_e, h_r, c_e, c_r, counts, mask, inverse_n, states, d_out, dq_after, dk_after,
    d_gram_q, d_gram_k, dq, dk, dh_e, dh_r, columns, dc_e, dc_r, d_bias, dq_before, dk_before,
    q_strides, k_strides, h_strides, c_e_strides, c_r_strides, count_strides,
    d_out_strides, dq_strides, dk_strides, dh_strides, N, H, number, tokens,
    P: tl.constexpr, S: tl.constexpr, V: tl.constexpr,
    WIDTH_P: tl.constexpr, WIDTH_S: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    SCORE_STAGES: tl.constexpr, MAP_Q: tl.constexpr, MAP_K: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """All gradients: of every four programs two take the features of a side, two its scores.

    What comes from behind a segment counts inverse_n times, where that is given. The sums over the
    tokens of a segment, of dq, dk, dh_e and dh_r side by side, go to a row of columns, where there
    are any.
    """
    program, kind = tl.program_id(0) // 4, tl.program_id(0) % 4
    column = (program // H).to(tl.int64) * (2 * H * (P + S))  # where the row begins
    of_q, of_h = column + program % H * P, column + 2 * H * P + program % H * S
    if kind == 0:
        _backward_features(
            program, q, k, h_e, h_r, c_e, c_r, counts, mask, inverse_n, states, d_out, dq_after,
            d_gram_q, dq, dq_before, columns, of_q,
            q_strides, k_strides, h_strides, c_e_strides, c_r_strides, count_strides,
            d_out_strides, dq_strides, N, H, number, tokens,
            P, S, V, WIDTH_P, WIDTH_S, WIDTH_V, BLOCK, PRECISION, STAGES,
            MAP_Q, MAP_K, 1, WHOLE,
        )  # fmt: skip
    elif kind == 1:
        _backward_features(
            program, k, q, h_r, h_e, c_r, c_e, counts, mask, inverse_n, states, d_out, dk_after,
            d_gram_k, dk, dk_before, columns, of_q + H * P,
            k_strides, q_strides, h_strides, c_r_strides, c_e_strides, count_strides,
            d_out_strides, dk_strides, N, H, number, tokens,
            P, S, V, WIDTH_P, WIDTH_S, WIDTH_V, BLOCK, PRECISION, STAGES,
            MAP_K, MAP_Q, 0, WHOLE,
        )  # fmt: skip
    elif kind == 2:
        _backward_scores(
            program, q, k, h_r, c_e, c_r, counts, mask, inverse_n, states, d_out, dq_after,
            dh_e, dc_e, d_bias, columns, of_h,
            q_strides, k_strides, h_strides, c_r_strides, count_strides,
            d_out_strides, dh_strides, N, H, number, tokens,
            P, S, V, WIDTH_P, WIDTH_S, WIDTH_V, BLOCK, PRECISION, SCORE_STAGES,
            MAP_Q, MAP_K, 1, WHOLE,
        )  # fmt: skip
    else:
        _backward_scores(
            program, k, q, h_e, c_r, c_e, counts, mask, inverse_n, states, d_out, dk_after,
            dh_r, dc_r, None, columns, of_h + H * S,
            k_strides, q_strides, h_strides, c_e_strides, count_strides,
            d_out_strides, dh_strides, N, H, number, tokens,
            P, S, V, WIDTH_P, WIDTH_S, WIDTH_V, BLOCK, PRECISION, SCORE_STAGES,
            MAP_K, MAP_Q, 0, WHOLE,
        )  # fmt: skip


@triton.jit
def _backward_features(
    program, z, far_z, h, far_h, c, far_c, counts, mask, inverse_n, states, d_out, d_after, d_gram,
    dz, d_before, columns, column,
    z_strides, far_strides, h_strides, c_strides, far_c_strides, count_strides,
    d_out_strides, dz_strides, N, H, number, tokens,
    P: tl.constexpr, S: tl.constexpr, V: tl.constexpr,
    WIDTH_P: tl.constexpr, WIDTH_S: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    FEATURE_MAP: tl.constexpr, FAR_MAP: tl.constexpr, FAR_SIDE: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Gradients of the rows behind the near side's features, and of its sum of phi h^T."""
    b, head, first, last = share_of_tokens(program, N, H, number, tokens)
    end = None if WHOLE else last
    z = segment_of(z, z_strides, b, head, first)
    far_z = segment_of(far_z, far_strides, b, head, first)
    h, far_h = (
        segment_of(h, h_strides, b, head, first),
        segment_of(far_h, h_strides, b, head, first),
    )
    dz = segment_of(dz, dz_strides, b, head, first)
    d_out = segment_of(d_out, d_out_strides, b, head, first)
    near_map = map_of(c, c_strides, S, V, WIDTH_S, WIDTH_V, PRECISION)
    far_map = map_of(far_c, far_c_strides, S, V, WIDTH_S, WIDTH_V, PRECISION)
    both = both_ways(d_gram, b * H + head, P, WIDTH_P, PRECISION)
    d_side = load_matrix(d_after, program, P, S, WIDTH_P, WIDTH_S) * inverse_of(inverse_n, b)
    sums = tl.zeros([BLOCK // 2, WIDTH_P], tl.float32)
    for step in tl.range(0, tl.cdiv(last - first, BLOCK), num_stages=STAGES):
        row = walk(0, last - first, step, BLOCK, True)
        start = first + row
        real = real_tokens(mask, b, N, start, end, BLOCK)
        share = shares(counts, count_strides, b, start, end, BLOCK)
        dy = rows_of(d_out, row, d_out_strides[1], real, V, WIDTH_V, BLOCK, PRECISION)
        rows = rows_of(h, row, h_strides[1], real, S, WIDTH_S, BLOCK, PRECISION)
        base, factor, inverse = features_of(
            z, row, z_strides[1], real, P, WIDTH_P, BLOCK, PRECISION, FEATURE_MAP
        )  # fmt: skip
        far, far_factor, _ = features_of(
            far_z, row, far_strides[1], real, P, WIDTH_P, BLOCK, PRECISION, FAR_MAP
        )  # fmt: skip
        d_phi = tl.zeros([BLOCK, WIDTH_P], tl.float32)
        if d_gram is not None:
            d_phi = scaled(times(base, both, PRECISION), factor)
        d_phi = product(rows, tl.trans(d_side), d_phi, PRECISION)
        d_kernel = tl.zeros([BLOCK, BLOCK], tl.float32)
        if c is not None:
            place = ((b * tl.cdiv(N, BLOCK) + start // BLOCK) * H + head) * 2 + FAR_SIDE
            far_side = state_of(states, place, P, S, WIDTH_P, WIDTH_S)
            far_rows = rows_of(far_h, row, h_strides[1], real, S, WIDTH_S, BLOCK, PRECISION)
            d_read = scaled(times(dy, tl.trans(near_map), PRECISION), share)
            d_phi = product(d_read, tl.trans(far_side), d_phi, PRECISION)
            d_kernel = times(d_read, tl.trans(far_rows), PRECISION) * far_factor[None, :]
            d_kernel = past(d_kernel)
        if far_c is not None:
            d_far = scaled(times(dy, tl.trans(far_map), PRECISION), far_factor * share)
            d_far = lowered(d_far, PRECISION)
            d_kernel += later(times(rows, tl.trans(d_far), PRECISION))
            d_side = product(tl.trans(far), d_far, d_side, PRECISION)
        d_phi = product(d_kernel, far, d_phi, PRECISION)
        d_rows = pull_back(base, factor, inverse, d_phi, FEATURE_MAP)
        exists = columns_of(existing(start, end, BLOCK), P, WIDTH_P)
        store_rows(dz, d_rows, row, dz_strides[1], exists)
        if columns is not None:
            sums += by_eight(d_rows)
    if columns is not None:
        store_row(columns + column, 0, tl.sum(sums, 0), P, WIDTH_P)
    if first == 0 and d_before is not None:
        store_matrix(d_before, b * H + head, d_side, P, S)


@triton.jit
def _backward_scores(
    program, z, far_z, far_h, c, far_c, counts, mask, inverse_n, states, d_out, d_after,
    dh, dc, d_bias, columns, column,
    z_strides, far_strides, h_strides, far_c_strides, count_strides,
    d_out_strides, dh_strides, N, H, number, tokens,
    P: tl.constexpr, S: tl.constexpr, V: tl.constexpr,
    WIDTH_P: tl.constexpr, WIDTH_S: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    FEATURE_MAP: tl.constexpr, FAR_MAP: tl.constexpr, FAR_SIDE: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Gradients of the near side's dual variables, of the map of its scores, and of the bias."""
    b, head, first, last = share_of_tokens(program, N, H, number, tokens)
    end = None if WHOLE else last
    z = segment_of(z, z_strides, b, head, first)
    far_z = segment_of(far_z, far_strides, b, head, first)
    far_h = segment_of(far_h, h_strides, b, head, first)
    dh = segment_of(dh, dh_strides, b, head, first)
    d_out = segment_of(d_out, d_out_strides, b, head, first)
    far_map = map_of(far_c, far_c_strides, S, V, WIDTH_S, WIDTH_V, PRECISION)
    d_side = load_matrix(d_after, program, P, S, WIDTH_P, WIDTH_S) * inverse_of(inverse_n, b)
    sum_c = tl.zeros([WIDTH_V, WIDTH_S], tl.float32)
    sum_bias = tl.zeros([16, WIDTH_V], tl.float32)
    sums = tl.zeros([BLOCK // 2, WIDTH_S], tl.float32)
    for step in tl.range(0, tl.cdiv(last - first, BLOCK), num_stages=STAGES):
        row = walk(0, last - first, step, BLOCK, True)
        start = first + row
        real = real_tokens(mask, b, N, start, end, BLOCK)
        share = shares(counts, count_strides, b, start, end, BLOCK)
        dy = rows_of(d_out, row, d_out_strides[1], real, V, WIDTH_V, BLOCK, PRECISION)
        base, factor, _ = features_of(
            z, row, z_strides[1], real, P, WIDTH_P, BLOCK, PRECISION, FEATURE_MAP
        )  # fmt: skip
        far, far_factor, _ = features_of(
            far_z, row, far_strides[1], real, P, WIDTH_P, BLOCK, PRECISION, FAR_MAP
        )  # fmt: skip
        dh_rows = times(base, d_side, PRECISION)
        kernel_matrix = times(base, tl.trans(far), PRECISION)
        if far_c is not None:
            d_far = scaled(times(dy, tl.trans(far_map), PRECISION), far_factor * share)
            d_far = lowered(d_far, PRECISION)
            dh_rows = product(later(kernel_matrix), d_far, dh_rows, PRECISION)
            d_side = product(tl.trans(far), d_far, d_side, PRECISION)
        exists = columns_of(existing(start, end, BLOCK), S, WIDTH_S)
        dh_rows = scaled(dh_rows, factor)
        store_rows(dh, dh_rows, row, dh_strides[1], exists)
        if columns is not None:
            sums += by_eight(dh_rows)
        if c is not None:
            place = ((b * tl.cdiv(N, BLOCK) + start // BLOCK) * H + head) * 2 + FAR_SIDE
            far_side = state_of(states, place, P, S, WIDTH_P, WIDTH_S)
            far_rows = rows_of(far_h, row, h_strides[1], real, S, WIDTH_S, BLOCK, PRECISION)
            read = times(base, far_side, PRECISION)
            kernel_matrix = past(kernel_matrix * far_factor[None, :])
            read = product(kernel_matrix, far_rows, read, PRECISION)
            sum_c = product(tl.trans(dy), scaled(read, factor * share), sum_c, PRECISION)
        if d_bias is not None:
            groups = tl.reshape(dy.to(tl.float32), [BLOCK // 16, 16, WIDTH_V])
            sum_bias += tl.sum(groups, 0)
    if columns is not None:
        store_row(columns + column, 0, tl.sum(sums, 0), S, WIDTH_S)
    if c is not None:
        store_matrix(dc, program, tl.trans(sum_c), S, V)
    if d_bias is not None:
        store_row(d_bias, program, tl.sum(sum_bias, 0), V, WIDTH_V)
