"""The walk forward over the blocks of one segment, for both sides at once.

Letters: B batch, N tokens, H heads, P features, S directions, V outputs of a head, n tokens of a
block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from primal_attention.ops.dual_causal.triton_blocks import (
    features_of,
    inverse_of,
    map_of,
    read_from,
    rows_of,
    segment_of,
    store_rows,
)
from primal_attention.ops.triton_kernel import launched
from primal_attention.ops.triton_maps import existing, real_tokens, scaled
from primal_attention.ops.triton_sums import (
    columns_of,
    load_matrix,
    product,
    row_of,
    share_of_tokens,
    shares,
    store_matrix,
    walk,
)


@launched
@triton.jit
def forward_walk(
    q, k, h_e, h_r, c_e, c_r, bias, q_before, k_before, counts, mask, inverse_n,
    out, q_after, k_after, states,
    q_strides, k_strides, h_strides, c_e_strides, c_r_strides, count_strides, out_strides,
    N, H, number, tokens,
    P: tl.constexpr, S: tl.constexpr, V: tl.constexpr,
    WIDTH_P: tl.constexpr, WIDTH_S: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    MAP_Q: tl.constexpr, MAP_K: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Out = e C_e + r C_r + bias, and the sums of both sides, the last times inverse_n."""
    program = tl.program_id(0)
    b, h, first, last = share_of_tokens(program, N, H, number, tokens)
    end = None if WHOLE else last
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
        real = real_tokens(mask, b, N, start, end, BLOCK)
        share = shares(counts, count_strides, b, start, end, BLOCK)
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
        if mask is not None:
            y = tl.where(real[:, None], y, 0.0)
        exists = columns_of(existing(start, end, BLOCK), V, WIDTH_V)
        store_rows(out, y, row, out_strides[1], exists)
        q_side = product(tl.trans(z_q), scaled(rows_e, f_q), q_side, PRECISION)
        k_side = product(tl.trans(z_k), scaled(rows_r, f_k), k_side, PRECISION)
    if last == N:
        share_of_one = inverse_of(inverse_n, b)
        store_matrix(q_after, b * H + h, q_side * share_of_one, P, S)
        store_matrix(k_after, b * H + h, k_side * share_of_one, P, S)
