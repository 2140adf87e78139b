"""The fused passes of the KSVD objective and of the trace, forward and backward.

A program takes one sequence, one head and one side: queries with W_e or keys with W_r. Matrices are
read in square blocks, so that heads of any width fit.

Letters: B batch, H heads, P feature dim, S directions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from primal_attention.ops.triton_kernel import launched
from primal_attention.ops.triton_maps import load_matrix, product

# Arguments whose values make no difference to the code.
SIZES = ["B", "H"]


@launched
@triton.jit(do_not_specialize=SIZES)
def energy_blocks(
    gram_q, gram_k, w_e, w_r, lambda_diag, num_queries, num_keys, energies, parts,
    e_strides, r_strides, B, H, P: tl.constexpr, S: tl.constexpr,
    AVERAGED: tl.constexpr, LAMBDA_SQUARED: tl.constexpr, OWN_TRACE: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The energies diag(W^T G W) of a tile of directions, and what they add to J."""
    program, side, column = tl.program_id(0) // 2, tl.program_id(0) % 2, tl.program_id(1) * TILE
    b, h = (program // H).to(tl.int64), (program % H).to(tl.int64)
    gram, w, other, num_tokens = _side_of(
        gram_q, gram_k, w_e, w_r, num_queries, num_keys, e_strides, r_strides, side, b, h
    )
    gram += (b * H + h) * (P * P)
    energy = tl.zeros([TILE], tl.float32)
    own = tl.zeros([TILE], tl.float32)
    for row in range(0, P, BLOCK):
        total = tl.zeros([BLOCK, TILE], tl.float32)
        for inner in range(0, P, BLOCK):
            total = product(
                load_matrix(gram, row, inner, P, P, BLOCK, BLOCK),
                load_matrix(w, inner, column, P, S, BLOCK, TILE),
                total,
                PRECISION,
            )
        rows = load_matrix(w, row, column, P, S, BLOCK, TILE)
        energy += tl.sum(rows * total, 0)
        if OWN_TRACE:
            own += tl.sum(rows * load_matrix(other, row, column, P, S, BLOCK, TILE), 0)
    if AVERAGED:
        energy = energy / _at_least_one(num_tokens, b)
    s = column + tl.arange(0, TILE)
    place = ((side * B + b) * H + h) * S
    tl.store(energies + place + s, energy, mask=s < S)
    diagonal = _diagonal(lambda_diag, h, s, S, LAMBDA_SQUARED)
    part = tl.sum(diagonal * energy - own, 0) / (2 * H)  # either side has one half of the trace
    tl.store(parts + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), part)


@triton.jit
def _side_of(
    gram_q, gram_k, w_e, w_r, num_queries, num_keys, e_strides, r_strides, side, b, h
):  # fmt: skip
    """Gram matrices, weights, weights of the other side and numbers of tokens of one side."""
    w_e += b * e_strides[0] + h * e_strides[1]
    w_r += b * r_strides[0] + h * r_strides[1]
    if side == 0:
        gram, w, other, num_tokens = gram_q, w_e, w_r, num_queries
    else:
        gram, w, other, num_tokens = gram_k, w_r, w_e, num_keys
    return gram, w, other, num_tokens


@triton.jit
def _at_least_one(num_tokens, b):
    return tl.maximum(tl.load(num_tokens + b).to(tl.float32), 1.0)


@triton.jit
def _diagonal(lambda_diag, h, s, S: tl.constexpr, LAMBDA_SQUARED: tl.constexpr):
    diagonal = tl.load(lambda_diag + h * S + s, mask=s < S, other=0.0)
    return diagonal * diagonal if LAMBDA_SQUARED else diagonal


@launched
@triton.jit(do_not_specialize=[*SIZES, "number"])
def mean_block(
    parts, trace, num_queries, num_keys, mean, slopes, B, H, number,
    SQUARED: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The mean over the sequences from the parts [B, number] of J, and its slopes, in one program.

    Sequences without a token on either side are left out.
    """
    count = tl.zeros([BLOCK], tl.float32)
    for start in range(0, B, BLOCK):
        count += tl.where(_is_real(num_queries, num_keys, start, B, BLOCK), 1.0, 0.0)
    share = 1.0 / tl.maximum(tl.sum(count, 0), 1.0)
    total = tl.zeros([BLOCK], tl.float32)
    shift = _mean_of(trace, H, PARTS)
    c = tl.arange(0, PARTS)
    for start in range(0, B, BLOCK):
        b = start + tl.arange(0, BLOCK)
        j = tl.zeros([BLOCK], tl.float32) - shift
        for column in range(0, number, PARTS):
            places = parts + b[:, None].to(tl.int64) * number + (column + c)[None, :]
            exists = (b < B)[:, None] & (column + c < number)[None, :]
            j += tl.sum(tl.load(places, mask=exists, other=0.0), 1)
        real = _is_real(num_queries, num_keys, start, B, BLOCK)
        slope = 2.0 * j if SQUARED else tl.full([BLOCK], 1.0, tl.float32)
        tl.store(slopes + b, tl.where(real, slope * share, 0.0), mask=b < B)
        total += tl.where(real, j * j if SQUARED else j, 0.0)
    tl.store(mean, tl.sum(total, 0) * share)


@triton.jit
def _is_real(num_queries, num_keys, start, B, BLOCK: tl.constexpr):
    """Which of the sequences from start on exist and have a token on either side."""
    b = start + tl.arange(0, BLOCK)
    queries = tl.load(num_queries + b, mask=b < B, other=0)
    return (queries > 0) & (tl.load(num_keys + b, mask=b < B, other=0) > 0)


@triton.jit
def _mean_of(trace, H, BLOCK: tl.constexpr):
    """The mean of trace [H]; zero where there is none."""
    total = tl.zeros([BLOCK], tl.float32)
    if trace is not None:
        for head in range(0, H, BLOCK):
            h = head + tl.arange(0, BLOCK)
            total += tl.load(trace + h, mask=h < H, other=0.0)
    return tl.sum(total, 0) / H


@launched
@triton.jit(do_not_specialize=SIZES)
def gradient_blocks(
    gram_q, gram_k, w_e, w_r, lambda_diag, num_queries, num_keys, slopes, energies, d_mean,
    d_grams, d_weights, d_lambda, d_trace,
    e_strides, r_strides, B, H, P: tl.constexpr, S: tl.constexpr,
    AVERAGED: tl.constexpr, LAMBDA_SQUARED: tl.constexpr, OWN_TRACE: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of rows of dW = (G + G^T) W diag(c), or of dG = W diag(c) W^T.

    The first program of each head takes the sums over all sequences. Neighbours read the same
    weights, which the second to read finds in the cache. The last sequences come first: where the
    forward pass was just before, the cache has them still.
    """
    program, side, kind = tl.program_id(0) // 4 - H, tl.program_id(0) // 2 % 2, tl.program_id(0) % 2
    row = tl.program_id(1) * BLOCK
    if program < 0:
        if (side == 0) & (kind == 0) & (row == 0):
            _sums_over_sequences(
                slopes, energies, d_mean, lambda_diag, d_lambda, d_trace, B, H,
                (program + H).to(tl.int64), S, LAMBDA_SQUARED, TILE,
            )  # fmt: skip
        return
    b, h = (B - 1 - program // H).to(tl.int64), (program % H).to(tl.int64)
    gram, w, other, num_tokens = _side_of(
        gram_q, gram_k, w_e, w_r, num_queries, num_keys, e_strides, r_strides, side, b, h
    )
    matrix = (side * B + b) * H + h
    d_j = tl.load(d_mean) * tl.load(slopes + b) / H
    factor = 0.5 * d_j
    if AVERAGED:
        factor = factor / _at_least_one(num_tokens, b)
    if kind == 0:
        _weight_rows(
            gram + (b * H + h) * (P * P), w, other, lambda_diag, d_weights + matrix * (P * S),
            d_j, factor, h, row, P, S, LAMBDA_SQUARED, OWN_TRACE, BLOCK, TILE, PRECISION,
        )  # fmt: skip
    else:
        _gram_rows(
            w, lambda_diag, d_grams + matrix * (P * P), factor, h, row,
            P, S, LAMBDA_SQUARED, BLOCK, TILE, PRECISION,
        )  # fmt: skip


@triton.jit
def _weight_rows(
    gram, w, other, lambda_diag, d_w, d_j, factor, h, row,
    P: tl.constexpr, S: tl.constexpr, LAMBDA_SQUARED: tl.constexpr, OWN_TRACE: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for column in range(0, S, TILE):
        total = tl.zeros([BLOCK, TILE], tl.float32)
        for inner in range(0, P, BLOCK):
            both = load_matrix(gram, row, inner, P, P, BLOCK, BLOCK)
            down = both
            if P > BLOCK:
                down = load_matrix(gram, inner, row, P, P, BLOCK, BLOCK)
            part = load_matrix(w, inner, column, P, S, BLOCK, TILE)
            total = product(both + tl.trans(down), part, total, PRECISION)
        s = column + tl.arange(0, TILE)
        total *= (factor * _diagonal(lambda_diag, h, s, S, LAMBDA_SQUARED))[None, :]
        if OWN_TRACE:
            total -= d_j * load_matrix(other, row, column, P, S, BLOCK, TILE)
        _store_block(d_w, total, row, column, P, S)


@triton.jit
def _gram_rows(
    w, lambda_diag, d_gram, factor, h, row,
    P: tl.constexpr, S: tl.constexpr, LAMBDA_SQUARED: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for inner in range(0, P, BLOCK):
        total = tl.zeros([BLOCK, BLOCK], tl.float32)
        for column in range(0, S, TILE):
            s = column + tl.arange(0, TILE)
            c = factor * _diagonal(lambda_diag, h, s, S, LAMBDA_SQUARED)
            rows = load_matrix(w, row, column, P, S, BLOCK, TILE) * c[None, :]
            part = load_matrix(w, inner, column, P, S, BLOCK, TILE)
            total = product(rows, tl.trans(part), total, PRECISION)
        _store_block(d_gram, total, row, inner, P, P)


@triton.jit
def _store_block(
    tensor, block, row, column, R: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Write a block of a contiguous matrix [R, C]."""
    r, c = row + tl.arange(0, block.shape[0]), column + tl.arange(0, block.shape[1])
    places = tensor + (r[:, None] * C + c[None, :])
    tl.store(places, block, mask=(r < R)[:, None] & (c < C)[None, :])


@triton.jit
def _sums_over_sequences(
    slopes, energies, d_mean, lambda_diag, d_lambda, d_trace, B, H, h,
    S: tl.constexpr, LAMBDA_SQUARED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Gradients of Lambda and of the trace of one head."""
    scale = tl.load(d_mean) / H
    total = tl.zeros([TILE], tl.float32)
    for column in range(0, S, TILE):
        s = column + tl.arange(0, TILE)
        d_diagonal = tl.zeros([TILE], tl.float32)
        total = tl.zeros([TILE], tl.float32)
        for start in range(0, B, TILE):
            b = start + tl.arange(0, TILE)
            slope = tl.load(slopes + b, mask=b < B, other=0.0)
            total += slope
            places = energies + ((b[:, None].to(tl.int64) * H + h) * S + s[None, :])
            exists = (b < B)[:, None] & (s < S)[None, :]
            energy = tl.load(places, mask=exists, other=0.0)
            energy += tl.load(places + B.to(tl.int64) * H * S, mask=exists, other=0.0)
            d_diagonal += tl.sum(slope[:, None] * energy, 0)
        d_diagonal *= 0.5 * scale
        if LAMBDA_SQUARED:
            d_diagonal *= 2.0 * tl.load(lambda_diag + h * S + s, mask=s < S, other=0.0)
        tl.store(d_lambda + h * S + s, d_diagonal, mask=s < S)
    if d_trace is not None:
        tl.store(d_trace + h, -scale * tl.sum(total, 0))


@launched
@triton.jit(do_not_specialize=["number"])
def trace_blocks(w_e, w_r, trace, number, BLOCK: tl.constexpr):
    """The sum of the products of one head's numbers."""
    h = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, number, BLOCK):
        n = start + tl.arange(0, BLOCK)
        e = tl.load(w_e + h * number + n, mask=n < number, other=0.0).to(tl.float32)
        total += e * tl.load(w_r + h * number + n, mask=n < number, other=0.0).to(tl.float32)
    tl.store(trace + h, tl.sum(total, 0))


@launched
@triton.jit(do_not_specialize=["number"])
def trace_gradient_blocks(w_e, w_r, d_trace, dw_e, dw_r, number, BLOCK: tl.constexpr):
    """One head's trace gradient times the weights of the other side."""
    h = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists, places = n < number, h * number + n
    d = tl.load(d_trace + h)
    e = tl.load(w_e + places, mask=exists, other=0.0).to(tl.float32)
    r = tl.load(w_r + places, mask=exists, other=0.0).to(tl.float32)
    tl.store(dw_e + places, (d * r).to(dw_e.dtype.element_ty), mask=exists)
    tl.store(dw_r + places, (d * e).to(dw_r.dtype.element_ty), mask=exists)
