"""What the walks do with one block of tokens, and the sums of segments.

Features are factor * base: for the cosine map the base is the rows as they lie in memory, which
thus go into the products without passing through registers.

Letters: B batch, N tokens, H heads, P features, S directions, V outputs of a head, n tokens of a
block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from primal_attention.ops.triton_kernel import launched
from primal_attention.ops.triton_maps import (
    features,
    inverse_norms,
    real_tokens,
    scaled,
    sequence_of,
)
from primal_attention.ops.triton_sums import (
    columns_of,
    load_matrix,
    lowered,
    product,
    share_of_tokens,
    shares,
    store_matrix,
    walk,
)


@triton.jit
def segment_of(tensor, strides, b, h, first):
    """Pointer to the first token of a segment of a tensor [B, N, H, C]."""
    return sequence_of(tensor, strides, b, h) + first.to(tl.int64) * strides[1]


@triton.jit
def _places(row, stride, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Offsets in a segment, short ones: they cost half the registers of pointers."""
    n, c = row + tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    return n[:, None] * stride + c[None, :]


@triton.jit
def load_rows(tensor, row, stride, keep, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """The tokens of a segment from a row on in the tensor's dtype, zero where keep is False."""
    return tl.load(tensor + _places(row, stride, BLOCK, WIDTH), mask=keep, other=0.0)


@triton.jit
def store_rows(tensor, rows, row, stride, keep):
    """Write rows as the tokens of a segment from a row on, where keep is True."""
    places = tensor + _places(row, stride, rows.shape[0], rows.shape[1])
    tl.store(places, rows.to(tensor.dtype.element_ty), mask=keep)


@triton.jit
def rows_of(
    tensor, row, stride, real,
    C: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The tokens of a block as operands of a product, zero where they are not real."""
    keep = columns_of(real, C, WIDTH)
    return lowered(load_rows(tensor, row, stride, keep, BLOCK, WIDTH), PRECISION)


@triton.jit
def features_of(
    z, row, stride, real,
    P: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
    FEATURE_MAP: tl.constexpr,
):  # fmt: skip
    """Features of a block [n, P] as factor * base, the base an operand; and 1 / |z|."""
    dot: tl.constexpr = tl.bfloat16 if PRECISION == "bf16" else tl.float32
    rows = load_rows(z, row, stride, columns_of(real, P, WIDTH), BLOCK, WIDTH)
    inverse = inverse_norms(rows, FEATURE_MAP, tl.float32)
    base, factor = features(rows, inverse, real, FEATURE_MAP, dot)
    if P != WIDTH:  # the map of a zero beside the features need not be zero
        base = tl.where((tl.arange(0, WIDTH) < P)[None, :], base, 0.0).to(dot)
    return base, factor, inverse


@triton.jit
def map_of(
    c, strides,
    S: tl.constexpr, V: tl.constexpr, WIDTH_S: tl.constexpr, WIDTH_V: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The map [S, V] of a side as an operand; zeros where the side is not output."""
    matrix = tl.zeros([WIDTH_S, WIDTH_V], tl.float32)
    if c is not None:
        s, v = tl.arange(0, WIDTH_S), tl.arange(0, WIDTH_V)
        places = c + s[:, None] * strides[0] + v[None, :] * strides[1]
        matrix += tl.load(places, mask=(s < S)[:, None] & (v < V)[None, :], other=0.0)
    return lowered(matrix, PRECISION)


@triton.jit
def inverse_of(inverse_n, b):
    """1 / n of a sequence; 1 where none are given."""
    value = tl.full([], 1.0, tl.float32)
    if inverse_n is not None:
        value = tl.load(inverse_n + b)
    return value


@triton.jit
def state_of(
    states, number,
    P: tl.constexpr, S: tl.constexpr, WIDTH_P: tl.constexpr, WIDTH_S: tl.constexpr,
):  # fmt: skip
    """One of the contiguous matrices [., P, S] as it was kept."""
    p, s = tl.arange(0, WIDTH_P), tl.arange(0, WIDTH_S)
    places = states + tl.cast(number, tl.int64) * (P * S) + (p[:, None] * S + s[None, :])
    return tl.load(places, mask=(p < P)[:, None] & (s < S)[None, :], other=0.0)


@triton.jit
def past(matrix):
    """Zeros where a token [row] meets a later one [column]."""
    n = tl.arange(0, matrix.shape[0])
    return tl.where(n[:, None] >= n[None, :], matrix, 0.0)


@triton.jit
def later(matrix):
    """Zeros where a token [row] meets an earlier one [column]."""
    n = tl.arange(0, matrix.shape[0])
    return tl.where(n[:, None] <= n[None, :], matrix, 0.0)


@triton.jit
def times(x, y, PRECISION: tl.constexpr):
    """X y, for lack of a sum to add it to."""
    return product(x, y, tl.zeros([x.shape[0], y.shape[1]], tl.float32), PRECISION)


@triton.jit
def both_ways(d_gram, number, P: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr):
    """DG + dG^T of one head; zeros where there is none."""
    matrix = load_matrix(d_gram, number, P, P, WIDTH, WIDTH)
    return lowered(matrix + tl.trans(matrix), PRECISION)


@triton.jit
def read_from(base, far, far_factor, far_rows, far_side, PRECISION: tl.constexpr):
    """What the near side reads of the far one [n, S], but for the factors of its own features."""
    kernel_matrix = times(base, tl.trans(far), PRECISION) * far_factor[None, :]
    read = times(base, far_side, PRECISION)
    return product(past(kernel_matrix), far_rows, read, PRECISION)


@launched
@triton.jit
def segment_sums(
    z, h, mask, moments, gram, strides, h_strides, N, H, number, tokens,
    P: tl.constexpr, S: tl.constexpr, WIDTH_P: tl.constexpr, WIDTH_S: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, FEATURE_MAP: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """What each segment adds to the sum of phi h^T and to the Gram matrix, of those wanted.

    It ends where the walk forward begins, which finds in the cache what was read last.
    """
    program = tl.program_id(0)
    b, head, first, last = share_of_tokens(program, N, H, number, tokens)
    end = None if WHOLE else last
    z, h = segment_of(z, strides, b, head, first), segment_of(h, h_strides, b, head, first)
    sum_h = tl.zeros([WIDTH_P, WIDTH_S], tl.float32)
    sum_phi = tl.zeros([WIDTH_P, WIDTH_P], tl.float32)
    for step in tl.range(0, tl.cdiv(last - first, BLOCK), num_stages=STAGES):
        row = walk(0, last - first, step, BLOCK, True)
        real = real_tokens(mask, b, N, first + row, end, BLOCK)
        base, factor, _ = features_of(
            z, row, strides[1], real, P, WIDTH_P, BLOCK, PRECISION, FEATURE_MAP
        )  # fmt: skip
        # Gram matrices come last: in the other order the assembler of Triton 3.6 has the second
        # product read where a register points that nothing was written to.
        if moments is not None:
            rows = rows_of(h, row, h_strides[1], real, S, WIDTH_S, BLOCK, PRECISION)
            sum_h = product(tl.trans(base), scaled(rows, factor), sum_h, PRECISION)
        if gram is not None:
            sum_phi = product(tl.trans(base), scaled(base, factor * factor), sum_phi, PRECISION)
    if moments is not None:
        store_matrix(moments, program, sum_h, P, S)
    if gram is not None:
        store_matrix(gram, program, sum_phi, P, P)


@launched
@triton.jit
def segment_gradients(
    q, k, c_e, c_r, counts, mask, d_out, dq_moments, dk_moments,
    q_strides, k_strides, c_e_strides, c_r_strides, count_strides, d_out_strides,
    N, H, number, tokens,
    P: tl.constexpr, S: tl.constexpr, V: tl.constexpr,
    WIDTH_P: tl.constexpr, WIDTH_S: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    MAP_Q: tl.constexpr, MAP_K: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """What each segment but the first passes to the gradients of the sums before it.

    With u = 1 / n the maps are applied last: phi^T (u d_out C^T) = (phi^T u d_out) C^T. It ends
    where the walk backward begins.
    """
    program = tl.program_id(0)
    b, h, first, last = share_of_tokens(program, N, H, number, tokens)
    last = tl.where(first == 0, 0, last)
    end = None if WHOLE else last
    q, k = segment_of(q, q_strides, b, h, first), segment_of(k, k_strides, b, h, first)
    d_out = segment_of(d_out, d_out_strides, b, h, first)
    sum_q = tl.zeros([WIDTH_P, WIDTH_V], tl.float32)
    sum_k = tl.zeros([WIDTH_P, WIDTH_V], tl.float32)
    for step in tl.range(0, tl.cdiv(last - first, BLOCK), num_stages=STAGES):
        row = walk(0, last - first, step, BLOCK, False)
        start = first + row
        real = real_tokens(mask, b, N, start, end, BLOCK)
        share = shares(counts, count_strides, b, start, end, BLOCK)
        dy = rows_of(d_out, row, d_out_strides[1], real, V, WIDTH_V, BLOCK, PRECISION)
        if c_e is not None:
            z_q, f_q, _ = features_of(
                q, row, q_strides[1], real, P, WIDTH_P, BLOCK, PRECISION, MAP_Q
            )  # fmt: skip
            sum_q = product(tl.trans(z_q), scaled(dy, f_q * share), sum_q, PRECISION)
        if c_r is not None:
            z_k, f_k, _ = features_of(
                k, row, k_strides[1], real, P, WIDTH_P, BLOCK, PRECISION, MAP_K
            )  # fmt: skip
            sum_k = product(tl.trans(z_k), scaled(dy, f_k * share), sum_k, PRECISION)
    if c_e is not None:
        map_e = map_of(c_e, c_e_strides, S, V, WIDTH_S, WIDTH_V, PRECISION)
        store_matrix(dk_moments, program, times(sum_q, tl.trans(map_e), PRECISION), P, S)
    if c_r is not None:
        map_r = map_of(c_r, c_r_strides, S, V, WIDTH_S, WIDTH_V, PRECISION)
        store_matrix(dq_moments, program, times(sum_k, tl.trans(map_r), PRECISION), P, S)


@launched
@triton.jit(do_not_specialize=["number", "size", "gram_size"])
def running_sums(
    start_0, moments_0, result_0, parts_0, gram_0, start_1, moments_1, result_1, parts_1, gram_1,
    inverse_n, number, size, gram_size,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Some entries of all segments of one sequence: sums before each, the Gram matrix of all."""
    if tl.program_id(2) == 0:
        _running_side(
            start_0, moments_0, result_0, inverse_n, number, size, HEIGHT, WIDTH, BACKWARD
        )  # fmt: skip
        _added_side(parts_0, gram_0, number, gram_size, HEIGHT, WIDTH)
    else:
        _running_side(
            start_1, moments_1, result_1, inverse_n, number, size, HEIGHT, WIDTH, BACKWARD
        )  # fmt: skip
        _added_side(parts_1, gram_1, number, gram_size, HEIGHT, WIDTH)


@triton.jit
def _entries(number, size, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Sequence, segments and entries of a program; where they lie in [B, number, size], and if."""
    b = tl.program_id(0).to(tl.int64)
    place, segment = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH), tl.arange(0, HEIGHT)
    exists = (segment < number)[:, None] & (place < size)[None, :]
    return b, segment, place, (b * number + segment)[:, None] * size + place[None, :], exists


@triton.jit
def _running_side(
    start, moments, result, inverse_n, number, size,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    if result is not None:
        b, segment, place, offsets, exists = _entries(number, size, HEIGHT, WIDTH)
        sums = tl.zeros([HEIGHT, WIDTH], tl.float32)
        if moments is not None:  # those of the neighbour, which the sum has grown by
            ends = segment == number - 1 if BACKWARD else segment == 0
            shift = size if BACKWARD else -size
            sums += tl.load(moments + offsets + shift, mask=exists & ~ends[:, None], other=0.0)
            sums = tl.cumsum(sums, 0, reverse=BACKWARD)
        if start is not None:
            begin = tl.load(start + b * size + place, mask=place < size, other=0.0)
            sums += (begin * inverse_of(inverse_n, b))[None, :]
        tl.store(result + offsets, sums, mask=exists)


@triton.jit
def _added_side(parts, gram, number, size, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    if parts is not None:
        b, _, place, offsets, exists = _entries(number, size, HEIGHT, WIDTH)
        total = tl.sum(tl.load(parts + offsets, mask=exists, other=0.0), 0)
        tl.store(gram + b * size + place, total, mask=place < size)
