"""The walks of the fused causal scan over the blocks of one segment, with the state in registers.

Letters: B batch, N tokens, H heads, P features, S dual variables, V value dim, n tokens of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from primal_attention.ops.triton_kernel import launched
from primal_attention.ops.triton_maps import load_rows, real_tokens, sequence_of, store_rows
from primal_attention.ops.triton_sums import (
    columns_of,
    features,
    load_matrix,
    lowered,
    product,
    pull_back,
    share_of_tokens,
    store_matrix,
    walk,
)


@triton.jit
def _phi(
    z, stride, start, real,
    P: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, FEATURE_MAP: tl.constexpr,
):  # fmt: skip
    """Features of a block, [n, P], and 1 / |z|."""
    rows = load_rows(z, start, stride, real, 0, P, WIDTH)
    return features(rows, columns_of(real, P, WIDTH), FEATURE_MAP)


@triton.jit
def _values(rows, matrix, MAPPED: tl.constexpr, PRECISION: tl.constexpr):
    """The values of a block, [n, V]: mapped by the matrix where there is a value map."""
    if MAPPED:
        zeros = tl.zeros([rows.shape[0], matrix.shape[1]], tl.float32)
        return lowered(product(rows, matrix, zeros, PRECISION), PRECISION)
    else:
        return lowered(rows, PRECISION)


@triton.jit
def _up_to_itself(matrix, TRANSPOSED: tl.constexpr):
    """Zeros where a query [row] meets a later key [column]; TRANSPOSED: keys are the rows."""
    n = tl.arange(0, matrix.shape[0])
    if TRANSPOSED:
        return tl.where(n[:, None] <= n[None, :], matrix, 0.0)
    else:
        return tl.where(n[:, None] >= n[None, :], matrix, 0.0)


@launched
@triton.jit
def segment_moments(
    z, values, value_map, mask, moments, strides, value_strides, N, H, number, tokens,
    P: tl.constexpr, S: tl.constexpr, V: tl.constexpr,
    WIDTH_P: tl.constexpr, WIDTH_S: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, FEATURE_MAP: tl.constexpr,
):  # fmt: skip
    """The sum of phi v^T over the tokens of each segment."""
    program = tl.program_id(0)
    b, h, first, last = share_of_tokens(program, N, H, number, tokens)
    z, values = sequence_of(z, strides, b, h), sequence_of(values, value_strides, b, h)
    matrix = lowered(load_matrix(value_map, 0, S, V, WIDTH_S, WIDTH_V), PRECISION)
    total = tl.zeros([WIDTH_P, WIDTH_V], tl.float32)
    for step in tl.range(0, tl.cdiv(last - first, BLOCK), num_stages=STAGES):
        start = walk(first, last, step, BLOCK, False)
        real = real_tokens(mask, b, N, start, last, BLOCK)
        phi, _ = _phi(z, strides[1], start, real, P, WIDTH_P, BLOCK, FEATURE_MAP)
        rows = load_rows(values, start, value_strides[1], real, 0, S, WIDTH_S)
        v = _values(rows, matrix, value_map is not None, PRECISION)
        total = product(tl.trans(phi), v, total, PRECISION)
    store_matrix(moments, program, total, P, V)


@launched
@triton.jit
def forward_walk(
    q, k, values, value_map, mask, before, out, final,
    q_strides, k_strides, value_strides, out_strides, N, H, number, tokens,
    P: tl.constexpr, S: tl.constexpr, V: tl.constexpr,
    WIDTH_P: tl.constexpr, WIDTH_S: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    MAP_Q: tl.constexpr, MAP_K: tl.constexpr,
):  # fmt: skip
    """Y = tril(Phi_q Phi_k^T) V + Phi_q state, then state + Phi_k^T V."""
    program = tl.program_id(0)
    b, h, first, last = share_of_tokens(program, N, H, number, tokens)
    q, k = sequence_of(q, q_strides, b, h), sequence_of(k, k_strides, b, h)
    values, out = sequence_of(values, value_strides, b, h), sequence_of(out, out_strides, b, h)
    matrix = lowered(load_matrix(value_map, 0, S, V, WIDTH_S, WIDTH_V), PRECISION)
    state = load_matrix(before, program, P, V, WIDTH_P, WIDTH_V)
    for step in tl.range(0, tl.cdiv(last - first, BLOCK), num_stages=STAGES):
        start = walk(first, last, step, BLOCK, False)
        real = real_tokens(mask, b, N, start, last, BLOCK)
        phi_q, _ = _phi(q, q_strides[1], start, real, P, WIDTH_P, BLOCK, MAP_Q)
        phi_k, _ = _phi(k, k_strides[1], start, real, P, WIDTH_P, BLOCK, MAP_K)
        phi_q, phi_k = lowered(phi_q, PRECISION), lowered(phi_k, PRECISION)
        rows = load_rows(values, start, value_strides[1], real, 0, S, WIDTH_S)
        v = _values(rows, matrix, value_map is not None, PRECISION)
        y = product(phi_q, state, tl.zeros([BLOCK, WIDTH_V], tl.float32), PRECISION)
        scores = product(phi_q, tl.trans(phi_k), tl.zeros([BLOCK, BLOCK], tl.float32), PRECISION)
        y = product(_up_to_itself(scores, False), v, y, PRECISION)
        state = product(tl.trans(phi_k), v, state, PRECISION)
        store_rows(out, y, start, out_strides[1], last, 0, V, WIDTH_V)
    if last == N:
        store_matrix(final, b * H + h, state, P, V)


@launched
@triton.jit
def queries_walk(
    q, k, values, value_map, mask, d_out, before, dq, dq_strides,
    q_strides, k_strides, value_strides, d_out_strides, N, H, number, tokens,
    P: tl.constexpr, S: tl.constexpr, V: tl.constexpr,
    WIDTH_P: tl.constexpr, WIDTH_S: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    MAP_Q: tl.constexpr, MAP_K: tl.constexpr,
):  # fmt: skip
    """dPhi_q = tril(dY V^T) Phi_k + dY state^T, walking forward with the state."""
    program = tl.program_id(0)
    b, h, first, last = share_of_tokens(program, N, H, number, tokens)
    q, k = sequence_of(q, q_strides, b, h), sequence_of(k, k_strides, b, h)
    values, dq = sequence_of(values, value_strides, b, h), sequence_of(dq, dq_strides, b, h)
    d_out = sequence_of(d_out, d_out_strides, b, h)
    matrix = lowered(load_matrix(value_map, 0, S, V, WIDTH_S, WIDTH_V), PRECISION)
    state = load_matrix(before, program, P, V, WIDTH_P, WIDTH_V)
    for step in tl.range(0, tl.cdiv(last - first, BLOCK), num_stages=STAGES):
        start = walk(first, last, step, BLOCK, False)
        real = real_tokens(mask, b, N, start, last, BLOCK)
        dy = load_rows(d_out, start, d_out_strides[1], real, 0, V, WIDTH_V)
        dy = lowered(dy, PRECISION)
        rows = load_rows(values, start, value_strides[1], real, 0, S, WIDTH_S)
        v = _values(rows, matrix, value_map is not None, PRECISION)
        phi_k, _ = _phi(k, k_strides[1], start, real, P, WIDTH_P, BLOCK, MAP_K)
        phi_k = lowered(phi_k, PRECISION)
        d_scores = product(dy, tl.trans(v), tl.zeros([BLOCK, BLOCK], tl.float32), PRECISION)
        d_phi = product(dy, tl.trans(state), tl.zeros([BLOCK, WIDTH_P], tl.float32), PRECISION)
        d_phi = product(_up_to_itself(d_scores, False), phi_k, d_phi, PRECISION)
        state = product(tl.trans(phi_k), v, state, PRECISION)
        phi_q, inverse = _phi(q, q_strides[1], start, real, P, WIDTH_P, BLOCK, MAP_Q)
        dz = tl.where(real[:, None], pull_back(phi_q, inverse, d_phi, 1.0, MAP_Q), 0.0)
        store_rows(dq, dz, start, dq_strides[1], last, 0, P, WIDTH_P)


@launched
@triton.jit
def keys_walk(
    q, k, values, value_map, mask, d_out, after, dk, d_values, d_map, d_before,
    dk_strides, d_value_strides,
    q_strides, k_strides, value_strides, d_out_strides, N, H, number, tokens,
    P: tl.constexpr, S: tl.constexpr, V: tl.constexpr,
    WIDTH_P: tl.constexpr, WIDTH_S: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    MAP_Q: tl.constexpr, MAP_K: tl.constexpr,
):  # fmt: skip
    """dPhi_k and dV from tril^T and the suffix R, walking backward; then R + Phi_q^T dY."""
    program = tl.program_id(0)
    b, h, first, last = share_of_tokens(program, N, H, number, tokens)
    q, k = sequence_of(q, q_strides, b, h), sequence_of(k, k_strides, b, h)
    values, dk = sequence_of(values, value_strides, b, h), sequence_of(dk, dk_strides, b, h)
    d_values = sequence_of(d_values, d_value_strides, b, h)
    d_out = sequence_of(d_out, d_out_strides, b, h)
    matrix = lowered(load_matrix(value_map, 0, S, V, WIDTH_S, WIDTH_V), PRECISION)
    suffix = load_matrix(after, program, P, V, WIDTH_P, WIDTH_V)
    sum_map = tl.zeros([WIDTH_S, WIDTH_V], tl.float32)
    for step in tl.range(0, tl.cdiv(last - first, BLOCK), num_stages=STAGES):
        start = walk(first, last, step, BLOCK, True)
        real = real_tokens(mask, b, N, start, last, BLOCK)
        dy = load_rows(d_out, start, d_out_strides[1], real, 0, V, WIDTH_V)
        dy = lowered(dy, PRECISION)
        rows = load_rows(values, start, value_strides[1], real, 0, S, WIDTH_S)
        v = _values(rows, matrix, value_map is not None, PRECISION)
        phi_q, _ = _phi(q, q_strides[1], start, real, P, WIDTH_P, BLOCK, MAP_Q)
        phi_q = lowered(phi_q, PRECISION)
        d_scores = product(v, tl.trans(dy), tl.zeros([BLOCK, BLOCK], tl.float32), PRECISION)
        d_phi = product(v, tl.trans(suffix), tl.zeros([BLOCK, WIDTH_P], tl.float32), PRECISION)
        d_phi = product(_up_to_itself(d_scores, True), phi_q, d_phi, PRECISION)
        phi_k, inverse = _phi(k, k_strides[1], start, real, P, WIDTH_P, BLOCK, MAP_K)
        dz = tl.where(real[:, None], pull_back(phi_k, inverse, d_phi, 1.0, MAP_K), 0.0)
        store_rows(dk, dz, start, dk_strides[1], last, 0, P, WIDTH_P)
        scores = product(phi_k, tl.trans(phi_q), tl.zeros([BLOCK, BLOCK], tl.float32), PRECISION)
        dv = product(phi_k, suffix, tl.zeros([BLOCK, WIDTH_V], tl.float32), PRECISION)
        dv = product(_up_to_itself(scores, True), dy, dv, PRECISION)
        suffix = product(tl.trans(phi_q), dy, suffix, PRECISION)
        if value_map is not None:
            sum_map = product(tl.trans(rows), dv, sum_map, PRECISION)
            dv = product(dv, tl.trans(matrix), tl.zeros([BLOCK, WIDTH_S], tl.float32), PRECISION)
        store_rows(d_values, dv, start, d_value_strides[1], last, 0, S, WIDTH_S)
    if value_map is not None:
        store_matrix(d_map, program, sum_map, S, V)
    if first == 0:
        store_matrix(d_before, b * H + h, suffix, P, V)
