"""The fused passes of Primal-Attention over the blocks of one sequence and head, or of several.

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
    store_matrix,
    store_rows,
)
from primal_attention.ops.triton_sums import counted, share_of_tokens, spread_tokens


@launched
@triton.jit(do_not_specialize=LENGTHS)
def forward_blocks(
    q, k, a_e, a_r, bias, mask, out, gram_q, gram_k,
    q_strides, k_strides, out_strides, a_e_stride, a_r_stride,
    N, H, splits, tokens,
    P: tl.constexpr, C: tl.constexpr, MAP_Q: tl.constexpr, MAP_K: tl.constexpr, DOT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Out = phi_q A_e + phi_k A_r + bias and the sums of phi phi^T, one tile of their columns."""
    b, h, first, last = spread_tokens(tl.program_id(0), N, H, splits, tokens, BLOCK_N)
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
        a_e is not None, a_r is not None, P, C, MAP_Q, MAP_K, DOT, BLOCK_N, BLOCK_P, TILE, WHOLE,
    )  # fmt: skip


@triton.jit
def attend(
    q, k, bias, mask, out, gram_q, gram_k, proj_e, scale_e, proj_r, scale_r,
    program, b, q_stride, k_stride, out_stride, N, first, last, column,
    HAS_E: tl.constexpr, HAS_R: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
    MAP_Q: tl.constexpr, MAP_K: tl.constexpr, DOT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Out of the tokens from first to last, and the program's Gram matrices."""
    end = None if WHOLE else last
    shift = tl.zeros([TILE], tl.float32)
    if bias is not None:
        c = column + tl.arange(0, TILE)
        shift = tl.load(bias + c, mask=c < C, other=0.0).to(tl.float32)
    sum_q = tl.zeros([BLOCK_P, TILE], tl.float32)
    sum_k = tl.zeros([BLOCK_P, TILE], tl.float32)
    for start in range(first, last, BLOCK_N):
        real = real_tokens(mask, b, N, start, end, BLOCK_N)
        total = tl.zeros([BLOCK_N, TILE], tl.float32) + shift[None, :]
        total, base_q, tile_q = _side_forward(
            q, start, q_stride, real, column, proj_e, scale_e, total,
            HAS_E, P, BLOCK_P, TILE, MAP_Q, DOT,
        )  # fmt: skip
        if k is not None:
            total, base_k, tile_k = _side_forward(
                k, start, k_stride, real, column, proj_r, scale_r, total,
                HAS_R, P, BLOCK_P, TILE, MAP_K, DOT,
            )  # fmt: skip
        if out is not None:
            if mask is not None:
                total = tl.where(real[:, None], total, 0.0)
            store_rows(out, total, start, out_stride, end, column, C, TILE)
        if gram_q is not None:
            sum_q = product(tl.trans(base_q), tile_q, sum_q)
        if gram_k is not None:
            sum_k = product(tl.trans(base_k), tile_k, sum_k)
    if gram_q is not None:
        store_matrix(gram_q + program * (P * P), sum_q, column, P, P)
    if gram_k is not None:
        store_matrix(gram_k + program * (P * P), sum_k, column, P, P)


@triton.jit
def _side_forward(
    z, start, stride, real, column, proj, scale, total,
    HAS_A: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr, TILE: tl.constexpr,
    FEATURE_MAP: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """The output with the part of one block of queries or keys; Z and f^2 Z of phi = f z.

    The product comes first: norms are found while it runs.
    """
    rows = load_rows(z, start, stride, real, 0, P, BLOCK_P)
    inverse = inverse_norms(rows, FEATURE_MAP, DOT)
    base, factor = features(rows, inverse, real, FEATURE_MAP, DOT)
    if HAS_A:
        part = product(base, proj, tl.zeros(total.shape, tl.float32))
        total += scaled(part, factor * scale)
    tile = base
    if TILE != BLOCK_P:
        rows = load_rows(z, start, stride, real, column, P, TILE)
        tile, _ = features(rows, inverse, real, FEATURE_MAP, DOT)
    return total, base, scaled(tile, factor * factor).to(DOT)


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
    N, H, splits, tokens, B, sequences,
    P: tl.constexpr, C: tl.constexpr, MAP_Q: tl.constexpr, MAP_K: tl.constexpr, DOT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, DIVIDED: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Dz of dphi = d_out A^T + phi (dG + dG^T), and the sums of phi d_out^T and of d_out.

    Of the queries or the keys: neighbouring programs have the two sides of the same tokens, so that
    the second finds d_out in the cache. Where that is said, dz is divided by the number of real
    tokens up to each. The sum of dz over the share goes to a row of sums, where there are any.
    Where A is shared by the sequences, a program may take several whole ones, and sums over all.
    """
    sides: tl.constexpr = 1 if k is None else 2
    program = tl.program_id(0) // sides
    if tl.program_id(0) % sides == 0:
        _side_backward(
            q, a_e, mask, counts, d_out, d_gram_q, dq, da_e, d_bias, sums,
            q_strides, d_out_strides, dq_strides, count_strides, a_e_stride,
            program, 0, N, H, splits, tokens, B, sequences,
            P, C, MAP_Q, DOT, BLOCK_N, BLOCK_P, BLOCK_C, DIVIDED, WHOLE,
        )  # fmt: skip
    elif k is not None:
        _side_backward(
            k, a_r, mask, counts, d_out, d_gram_k, dk, da_r, None, sums,
            k_strides, d_out_strides, dk_strides, count_strides, a_r_stride,
            program, H, N, H, splits, tokens, B, sequences,
            P, C, MAP_K, DOT, BLOCK_N, BLOCK_P, BLOCK_C, DIVIDED, WHOLE,
        )  # fmt: skip


@triton.jit
def _side_backward(
    z, a, mask, counts, d_out, d_gram, dz, da, d_bias, sums,
    z_strides, d_out_strides, dz_strides, count_strides, a_stride,
    program, row, N, H, splits, tokens, B, sequences,
    P: tl.constexpr, C: tl.constexpr, FEATURE_MAP: tl.constexpr, DOT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
    DIVIDED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The heads of one side stand in the rows of sums from the given one on."""
    b, h, first, last = share_of_tokens(program, N, H, splits, tokens)
    proj, scale = _projection(a, b * a_stride + h * (P * C), 0, P, C, BLOCK_P, BLOCK_C, DOT)
    sum_a = tl.zeros([BLOCK_C, BLOCK_P], tl.float32)
    sum_bias = tl.zeros([16, BLOCK_C], tl.float32)
    sum_z = tl.zeros([BLOCK_N // 2, BLOCK_P], tl.float32)
    number = 1  # of which the loop vanishes
    if sequences is not None:
        b, first, last = b * sequences, 0, N
        number = tl.minimum(sequences, B - program // H * sequences)
    # What a sequence begins with is found anew for each: there are no registers to keep it in.
    for each in tl.range(number, disable_licm=True):
        sum_a, sum_bias, sum_z = _share_backward(
            z, mask, counts, d_out, d_gram, dz, proj, scale, sum_a, sum_bias, sum_z,
            z_strides, d_out_strides, dz_strides, count_strides, b + each, h, first, last, N, H,
            da is not None, d_bias is not None, sums is not None,
            P, C, FEATURE_MAP, DOT, BLOCK_N, BLOCK_P, BLOCK_C, DIVIDED, WHOLE,
        )  # fmt: skip
    if da is not None:
        store_matrix(da + program.to(tl.int64) * (P * C), tl.trans(sum_a), 0, P, C)
    if d_bias is not None:
        store_matrix(d_bias + program.to(tl.int64) * C, tl.sum(sum_bias, 0)[None, :], 0, 1, C)
    if sums is not None:
        place = sums + (program // H * (2 * H) + row + h) * P
        store_matrix(place, tl.sum(sum_z, 0)[None, :], 0, 1, P)


@triton.jit
def _share_backward(
    z, mask, counts, d_out, d_gram, dz, proj, scale, sum_a, sum_bias, sum_z,
    z_strides, d_out_strides, dz_strides, count_strides, b, h, first, last, N, H,
    HAS_A: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SUMS: tl.constexpr,
    P: tl.constexpr, C: tl.constexpr, FEATURE_MAP: tl.constexpr, DOT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
    DIVIDED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Dz of the tokens from first to last of one sequence, and the sums grown by them."""
    end = None if WHOLE else last
    z, dz = sequence_of(z, z_strides, b, h), sequence_of(dz, dz_strides, b, h)
    d_out = sequence_of(d_out, d_out_strides, b, h) if d_out is not None else None
    both, scale_both = _both_ways(d_gram, (b * H + h) * (P * P), P, BLOCK_P, DOT)
    for start in range(first, last, BLOCK_N):
        real = real_tokens(mask, b, N, start, end, BLOCK_N)
        d_rows = tl.zeros([BLOCK_N, BLOCK_C], DOT)
        if d_out is not None:
            d_rows = load_rows(d_out, start, d_out_strides[1], real, 0, C, BLOCK_C).to(DOT)
        if HAS_BIAS:
            groups = tl.reshape(d_rows.to(tl.float32), [BLOCK_N // 16, 16, BLOCK_C])
            sum_bias += tl.sum(groups, 0)
        share = tl.full([BLOCK_N], 1.0, tl.float32)
        if DIVIDED:
            share /= tl.maximum(counted(counts, count_strides, b, start, end, BLOCK_N), 1.0)
        rows = load_rows(z, start, z_strides[1], real, 0, P, BLOCK_P)
        d_rows, sum_a = _block_backward(
            rows, real, share, d_rows, proj, scale, both, scale_both, sum_a,
            HAS_A, d_gram is not None, FEATURE_MAP, DOT,
        )  # fmt: skip
        store_rows(dz, d_rows, start, dz_strides[1], end, 0, P, BLOCK_P)
        if HAS_SUMS:
            sum_z += by_eight(d_rows)
    return sum_a, sum_bias, sum_z


@triton.jit
def _block_backward(
    rows, real, share, d_rows, proj, scale, both, scale_both, sum_a,
    HAS_A: tl.constexpr, HAS_GRAM: tl.constexpr, FEATURE_MAP: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Gradient of one block of queries or keys, and the sum of d_out phi^T grown by this block."""
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


@triton.jit
def _both_ways(d_gram, offset, P: tl.constexpr, BLOCK_P: tl.constexpr, DOT: tl.constexpr):
    """DG + dG^T of this head, fitted, and its scale; zero where there is none."""
    matrix = tl.zeros([BLOCK_P, BLOCK_P], tl.float32)
    if d_gram is not None:
        matrix = load_matrix(d_gram + offset, 0, 0, P, P, BLOCK_P, BLOCK_P)
        matrix += tl.trans(matrix)
    return fitted(matrix, DOT)
