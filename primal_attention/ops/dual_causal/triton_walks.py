"""The walks over the blocks of one segment: forward for both sides at once, backward for each.

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
    later,
    map_of,
    past,
    read_from,
    rows_of,
    segment_of,
    share_of,
    state_of,
    store_rows,
    sum_grams,
    times,
)
from primal_attention.ops.triton_maps import pull_back, scaled
from primal_attention.ops.triton_sums import (
    columns_of,
    existing,
    load_matrix,
    lowered,
    product,
    real_tokens,
    row_of,
    share_of_tokens,
    store_matrix,
    store_row,
    walk,
)


@triton.jit
def forward_walk(
    q, k, h_e, h_r, c_e, c_r, bias, q_before, k_before, counts, mask,
    out, q_after, k_after, gram_q, gram_k, states,
    q_strides, k_strides, h_strides, c_e_strides, c_r_strides, count_strides, out_strides,
    N, H, number, tokens,
    P: tl.constexpr, S: tl.constexpr, V: tl.constexpr,
    WIDTH_P: tl.constexpr, WIDTH_S: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    MAP_Q: tl.constexpr, MAP_K: tl.constexpr,
):  # fmt: skip
    """Outputs and sums; programs with odd numbers take the Gram matrices, where wanted."""
    kinds: tl.constexpr = 1 if gram_q is None else 2
    program, kind = tl.program_id(0) // kinds, tl.program_id(0) % kinds
    if kind == 0:
        _outputs(
            program, q, k, h_e, h_r, c_e, c_r, bias, q_before, k_before, counts, mask,
            out, q_after, k_after, states,
            q_strides, k_strides, h_strides, c_e_strides, c_r_strides, count_strides, out_strides,
            N, H, number, tokens,
            P, S, V, WIDTH_P, WIDTH_S, WIDTH_V, BLOCK, PRECISION, STAGES, MAP_Q, MAP_K,
        )  # fmt: skip
    elif gram_q is not None:
        sum_grams(
            program, q, k, mask, gram_q, gram_k, q_strides, k_strides, N, H, number, tokens,
            P, WIDTH_P, BLOCK, PRECISION, STAGES, MAP_Q, MAP_K,
        )  # fmt: skip


@triton.jit
def _outputs(
    program, q, k, h_e, h_r, c_e, c_r, bias, q_before, k_before, counts, mask,
    out, q_after, k_after, states,
    q_strides, k_strides, h_strides, c_e_strides, c_r_strides, count_strides, out_strides,
    N, H, number, tokens,
    P: tl.constexpr, S: tl.constexpr, V: tl.constexpr,
    WIDTH_P: tl.constexpr, WIDTH_S: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    MAP_Q: tl.constexpr, MAP_K: tl.constexpr,
):  # fmt: skip
    """Out = e C_e + r C_r + bias, and the sums of both sides."""
    b, h, first, last = share_of_tokens(program, N, H, number, tokens)
    q, k = segment_of(q, q_strides, b, h, first), segment_of(k, k_strides, b, h, first)
    h_e, h_r = segment_of(h_e, h_strides, b, h, first), segment_of(h_r, h_strides, b, h, first)
    out = segment_of(out, out_strides, b, h, first)
    map_e = map_of(c_e, c_e_strides, S, V, WIDTH_S, WIDTH_V, PRECISION)
    map_r = map_of(c_r, c_r_strides, S, V, WIDTH_S, WIDTH_V, PRECISION)
    shift = row_of(bias, 0, V, WIDTH_V)
    q_side = load_matrix(q_before, program, P, S, WIDTH_P, WIDTH_S)
    k_side = load_matrix(k_before, program, P, S, WIDTH_P, WIDTH_S)
    for step in tl.range(0, tl.cdiv(last - first, BLOCK), num_stages=STAGES):
        row = walk(0, last - first, step, BLOCK, False)
        start = first + row
        real = real_tokens(mask, b, N, start, last, BLOCK)
        share = share_of(counts, count_strides, b, start, last, BLOCK)
        z_q, f_q, _ = features_of(
            q, row, q_strides[1], real, P, WIDTH_P, BLOCK, PRECISION, MAP_Q
        )  # fmt: skip
        z_k, f_k, _ = features_of(
            k, row, k_strides[1], real, P, WIDTH_P, BLOCK, PRECISION, MAP_K
        )  # fmt: skip
        rows_e = rows_of(h_e, row, h_strides[1], real, S, WIDTH_S, BLOCK, PRECISION)
        rows_r = rows_of(h_r, row, h_strides[1], real, S, WIDTH_S, BLOCK, PRECISION)
        if states is not None:
            place = ((b * tl.cdiv(N, BLOCK) + start // BLOCK) * H + h) * 2
            store_matrix(states, place, q_side, P, S)
            store_matrix(states, place + 1, k_side, P, S)
        y = tl.zeros([BLOCK, WIDTH_V], tl.float32) + shift[None, :]
        if c_e is not None:
            e = read_from(z_q, z_k, f_k, rows_r, k_side, PRECISION)
            y = product(scaled(e, f_q * share), map_e, y, PRECISION)
        if c_r is not None:
            r = read_from(z_k, z_q, f_q, rows_e, q_side, PRECISION)
            y = product(scaled(r, f_k * share), map_r, y, PRECISION)
        y = tl.where(real[:, None], y, 0.0)
        exists = columns_of(existing(start, last, BLOCK), V, WIDTH_V)
        store_rows(out, y, row, out_strides[1], exists)
        q_side = product(tl.trans(z_q), scaled(rows_e, f_q), q_side, PRECISION)
        k_side = product(tl.trans(z_k), scaled(rows_r, f_k), k_side, PRECISION)
    if last == N:
        store_matrix(q_after, b * H + h, q_side, P, S)
        store_matrix(k_after, b * H + h, k_side, P, S)


@triton.jit
def backward_walk(
    q, k, h_e, h_r, c_e, c_r, counts, mask, states, d_out, dq_after, dk_after, d_gram_q, d_gram_k,
    dq, dk, dh_e, dh_r, dc_e, dc_r, d_bias, dq_before, dk_before,
    q_strides, k_strides, h_strides, c_e_strides, c_r_strides, count_strides,
    d_out_strides, dq_strides, dk_strides, dh_strides, N, H, number, tokens,
    P: tl.constexpr, S: tl.constexpr, V: tl.constexpr,
    WIDTH_P: tl.constexpr, WIDTH_S: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    MAP_Q: tl.constexpr, MAP_K: tl.constexpr,
):  # fmt: skip
    """All gradients: of every four programs two take the features of a side, two its scores."""
    program, kind = tl.program_id(0) // 4, tl.program_id(0) % 4
    if kind == 0:
        _backward_features(
            program, q, k, h_e, h_r, c_e, c_r, counts, mask, states, d_out, dq_after, d_gram_q,
            dq, dq_before,
            q_strides, k_strides, h_strides, c_e_strides, c_r_strides, count_strides,
            d_out_strides, dq_strides, N, H, number, tokens,
            P, S, V, WIDTH_P, WIDTH_S, WIDTH_V, BLOCK, PRECISION, STAGES, MAP_Q, MAP_K, 1,
        )  # fmt: skip
    elif kind == 1:
        _backward_features(
            program, k, q, h_r, h_e, c_r, c_e, counts, mask, states, d_out, dk_after, d_gram_k,
            dk, dk_before,
            k_strides, q_strides, h_strides, c_r_strides, c_e_strides, count_strides,
            d_out_strides, dk_strides, N, H, number, tokens,
            P, S, V, WIDTH_P, WIDTH_S, WIDTH_V, BLOCK, PRECISION, STAGES, MAP_K, MAP_Q, 0,
        )  # fmt: skip
    elif kind == 2:
        _backward_scores(
            program, q, k, h_r, c_e, c_r, counts, mask, states, d_out, dq_after,
            dh_e, dc_e, d_bias,
            q_strides, k_strides, h_strides, c_r_strides, count_strides,
            d_out_strides, dh_strides, N, H, number, tokens,
            P, S, V, WIDTH_P, WIDTH_S, WIDTH_V, BLOCK, PRECISION, STAGES, MAP_Q, MAP_K, 1,
        )  # fmt: skip
    else:
        _backward_scores(
            program, k, q, h_e, c_r, c_e, counts, mask, states, d_out, dk_after,
            dh_r, dc_r, None,
            k_strides, q_strides, h_strides, c_e_strides, count_strides,
            d_out_strides, dh_strides, N, H, number, tokens,
            P, S, V, WIDTH_P, WIDTH_S, WIDTH_V, BLOCK, PRECISION, STAGES, MAP_K, MAP_Q, 0,
        )  # fmt: skip


@triton.jit
def _backward_features(
    program, z, far_z, h, far_h, c, far_c, counts, mask, states, d_out, d_after, d_gram,
    dz, d_before,
    z_strides, far_strides, h_strides, c_strides, far_c_strides, count_strides,
    d_out_strides, dz_strides, N, H, number, tokens,
    P: tl.constexpr, S: tl.constexpr, V: tl.constexpr,
    WIDTH_P: tl.constexpr, WIDTH_S: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    FEATURE_MAP: tl.constexpr, FAR_MAP: tl.constexpr, FAR_SIDE: tl.constexpr,
):  # fmt: skip
    """Gradients of the rows behind the near side's features, and of its sum of phi h^T."""
    b, head, first, last = share_of_tokens(program, N, H, number, tokens)
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
    d_side = load_matrix(d_after, program, P, S, WIDTH_P, WIDTH_S)
    for step in tl.range(0, tl.cdiv(last - first, BLOCK), num_stages=STAGES):
        row = walk(0, last - first, step, BLOCK, True)
        start = first + row
        real = real_tokens(mask, b, N, start, last, BLOCK)
        share = share_of(counts, count_strides, b, start, last, BLOCK)
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
        exists = columns_of(existing(start, last, BLOCK), P, WIDTH_P)
        store_rows(dz, d_rows, row, dz_strides[1], exists)
    if first == 0:
        store_matrix(d_before, b * H + head, d_side, P, S)


@triton.jit
def _backward_scores(
    program, z, far_z, far_h, c, far_c, counts, mask, states, d_out, d_after,
    dh, dc, d_bias,
    z_strides, far_strides, h_strides, far_c_strides, count_strides,
    d_out_strides, dh_strides, N, H, number, tokens,
    P: tl.constexpr, S: tl.constexpr, V: tl.constexpr,
    WIDTH_P: tl.constexpr, WIDTH_S: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    FEATURE_MAP: tl.constexpr, FAR_MAP: tl.constexpr, FAR_SIDE: tl.constexpr,
):  # fmt: skip
    """Gradients of the near side's dual variables, of the map of its scores, and of the bias."""
    b, head, first, last = share_of_tokens(program, N, H, number, tokens)
    z = segment_of(z, z_strides, b, head, first)
    far_z = segment_of(far_z, far_strides, b, head, first)
    far_h = segment_of(far_h, h_strides, b, head, first)
    dh = segment_of(dh, dh_strides, b, head, first)
    d_out = segment_of(d_out, d_out_strides, b, head, first)
    far_map = map_of(far_c, far_c_strides, S, V, WIDTH_S, WIDTH_V, PRECISION)
    d_side = load_matrix(d_after, program, P, S, WIDTH_P, WIDTH_S)
    sum_c = tl.zeros([WIDTH_V, WIDTH_S], tl.float32)
    sum_bias = tl.zeros([16, WIDTH_V], tl.float32)
    for step in tl.range(0, tl.cdiv(last - first, BLOCK), num_stages=STAGES):
        row = walk(0, last - first, step, BLOCK, True)
        start = first + row
        real = real_tokens(mask, b, N, start, last, BLOCK)
        share = share_of(counts, count_strides, b, start, last, BLOCK)
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
        exists = columns_of(existing(start, last, BLOCK), S, WIDTH_S)
        store_rows(dh, scaled(dh_rows, factor), row, dh_strides[1], exists)
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
    if c is not None:
        store_matrix(dc, program, tl.trans(sum_c), S, V)
    if d_bias is not None:
        store_row(d_bias, program, tl.sum(sum_bias, 0), V, WIDTH_V)
