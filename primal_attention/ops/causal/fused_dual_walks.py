"""Device code of the causal form of dual weights: walks over the blocks of one segment.

Both sides are one formula with queries and keys, e and r exchanged: what is said of a near side and
a far one holds both ways. Programs that share their tokens have neighbouring numbers, so that what
one reads the others find in the cache.

Features are factor * base: for the cosine map the base is the rows as they lie in memory, which
thus go into the products without passing through registers.

Letters: B batch, N tokens, H heads, P features, S directions, V outputs of a head, n tokens of a
block.
"""

import triton
import triton.language as tl

from primal_attention.ops.triton.launcher import launched
from primal_attention.ops.triton.tiles import (
    by_eight,
    columns_of,
    existing,
    features,
    inverse_norms,
    load_stacked,
    lowered,
    lowered_product,
    pull_back,
    real_tokens,
    row_of,
    scaled,
    sequence_of,
    share_of_tokens,
    shares,
    store_row,
    store_stacked,
    unit_elu,
    walk,
)


@triton.jit
def segment_of(rows, b, h, first):
    """Pointer to the first token of a segment of a tensor [B, N, H, C], and how far tokens are."""
    tensor, strides = rows
    return sequence_of(tensor, strides, b, h) + first.to(tl.int64) * strides[1], strides[1]


@triton.jit
def _places(row, stride, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Offsets in a segment, short ones: they cost half the registers of pointers."""
    n, c = row + tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    return n[:, None] * stride + c[None, :]


@triton.jit
def load_segment_rows(segment, row, keep, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Load tokens of a segment from a row on in the tensor's dtype, zero where keep is False."""
    tensor, stride = segment
    return tl.load(tensor + _places(row, stride, BLOCK, WIDTH), mask=keep, other=0.0)


@triton.jit
def store_segment_rows(segment, rows, row, keep):
    """Write rows as the tokens of a segment from a row on, where keep is True."""
    tensor, stride = segment
    places = tensor + _places(row, stride, rows.shape[0], rows.shape[1])
    tl.store(places, rows.to(tensor.dtype.element_ty), mask=keep)


@triton.jit
def rows_of(
    segment, row, real,
    C: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Load the tokens of a block as operands of a product, zero where they are not real."""
    keep = columns_of(real, C, WIDTH)
    return lowered(load_segment_rows(segment, row, keep, BLOCK, WIDTH), PRECISION)


@triton.jit
def features_of(
    z, row, real,
    P: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
    FEATURE_MAP: tl.constexpr,
):  # fmt: skip
    """Features of a block [n, P] as factor * base, the base an operand; and 1 / |z|."""
    dot: tl.constexpr = tl.bfloat16 if PRECISION == "bf16" else tl.float32
    keep = columns_of(real, P, WIDTH)
    rows = load_segment_rows(z, row, keep, BLOCK, WIDTH)
    if FEATURE_MAP == "unit_elu":
        base, inverse = unit_elu(rows, keep)
        base, factor = base.to(dot), inverse
    else:
        inverse = inverse_norms(rows, FEATURE_MAP, tl.float32)
        base, factor = features(rows, inverse, real, FEATURE_MAP, dot)
        if P != WIDTH:  # the map of a zero beside the features need not be zero
            base = tl.where((tl.arange(0, WIDTH) < P)[None, :], base, 0.0).to(dot)
    return base, factor, inverse


@triton.jit
def map_of(
    side_map,
    S: tl.constexpr, V: tl.constexpr, WIDTH_S: tl.constexpr, WIDTH_V: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Load the map [S, V] of a side as an operand; zeros where the side is not output."""
    c, strides = side_map
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
    """Load one of the contiguous matrices [., P, S] as it was kept."""
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
    return lowered_product(x, y, tl.zeros([x.shape[0], y.shape[1]], tl.float32), PRECISION)


@triton.jit
def both_ways(d_gram, number, P: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr):
    """DG + dG^T of one head; zeros where there is none."""
    matrix = load_stacked(d_gram, number, P, P, WIDTH, WIDTH)
    return lowered(matrix + tl.trans(matrix), PRECISION)


@triton.jit
def read_from(base, far, far_factor, far_rows, far_side, PRECISION: tl.constexpr):
    """Read the far side for the near one, [n, S], without the factors of the near features."""
    kernel_matrix = times(base, tl.trans(far), PRECISION) * far_factor[None, :]
    read = times(base, far_side, PRECISION)
    return lowered_product(past(kernel_matrix), far_rows, read, PRECISION)


@launched()
def segment_sums(
    z, h, mask, moments, gram, strides, h_strides, N, H, number, tokens,
    P: tl.constexpr, S: tl.constexpr, WIDTH_P: tl.constexpr, WIDTH_S: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, FEATURE_MAP: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Sum phi h^T and the Gram matrix over each segment, where they are wanted.

    It ends where the walk forward begins, which finds in the cache what was read last.
    """
    program = tl.program_id(0)
    b, head, first, last = share_of_tokens(program, N, H, number, tokens)
    end = None if WHOLE else last
    z, h = segment_of((z, strides), b, head, first), segment_of((h, h_strides), b, head, first)
    sum_h = tl.zeros([WIDTH_P, WIDTH_S], tl.float32)
    sum_phi = tl.zeros([WIDTH_P, WIDTH_P], tl.float32)
    for step in tl.range(0, tl.cdiv(last - first, BLOCK), num_stages=STAGES):
        row = walk(0, last - first, step, BLOCK, True)
        real = real_tokens(mask, b, N, first + row, end, BLOCK)
        base, factor, _ = features_of(
            z, row, real, P, WIDTH_P, BLOCK, PRECISION, FEATURE_MAP
        )  # fmt: skip
        # Gram matrices come last: in the other order the assembler of Triton 3.6 has the second
        # product read where a register points that nothing was written to.
        if moments is not None:
            rows = rows_of(h, row, real, S, WIDTH_S, BLOCK, PRECISION)
            sum_h = lowered_product(tl.trans(base), scaled(rows, factor), sum_h, PRECISION)
        if gram is not None:
            sum_phi = lowered_product(
                tl.trans(base), scaled(base, factor * factor), sum_phi, PRECISION
            )
    if moments is not None:
        store_stacked(moments, program, sum_h, P, S)
    if gram is not None:
        store_stacked(gram, program, sum_phi, P, P)


@launched()
def segment_gradients(
    q, k, c_e, c_r, counts, mask, d_out, dq_moments, dk_moments,
    q_strides, k_strides, c_e_strides, c_r_strides, count_strides, d_out_strides,
    N, H, number, tokens,
    P: tl.constexpr, S: tl.constexpr, V: tl.constexpr,
    WIDTH_P: tl.constexpr, WIDTH_S: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    MAP_Q: tl.constexpr, MAP_K: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Sum over each segment but the first its gradients of the sums before it.

    With u = 1 / n the maps are applied last: phi^T (u d_out C^T) = (phi^T u d_out) C^T. It ends
    where the walk backward begins.
    """
    program = tl.program_id(0)
    b, h, first, last = share_of_tokens(program, N, H, number, tokens)
    last = tl.where(first == 0, 0, last)
    end = None if WHOLE else last
    q, k = segment_of((q, q_strides), b, h, first), segment_of((k, k_strides), b, h, first)
    d_out = segment_of((d_out, d_out_strides), b, h, first)
    sum_q = tl.zeros([WIDTH_P, WIDTH_V], tl.float32)
    sum_k = tl.zeros([WIDTH_P, WIDTH_V], tl.float32)
    for step in tl.range(0, tl.cdiv(last - first, BLOCK), num_stages=STAGES):
        row = walk(0, last - first, step, BLOCK, False)
        start = first + row
        real = real_tokens(mask, b, N, start, end, BLOCK)
        share = shares(counts, count_strides, b, start, end, BLOCK)
        dy = rows_of(d_out, row, real, V, WIDTH_V, BLOCK, PRECISION)
        if c_e is not None:
            z_q, f_q, _ = features_of(
                q, row, real, P, WIDTH_P, BLOCK, PRECISION, MAP_Q
            )  # fmt: skip
            sum_q = lowered_product(tl.trans(z_q), scaled(dy, f_q * share), sum_q, PRECISION)
        if c_r is not None:
            z_k, f_k, _ = features_of(
                k, row, real, P, WIDTH_P, BLOCK, PRECISION, MAP_K
            )  # fmt: skip
            sum_k = lowered_product(tl.trans(z_k), scaled(dy, f_k * share), sum_k, PRECISION)
    if c_e is not None:
        map_e = map_of((c_e, c_e_strides), S, V, WIDTH_S, WIDTH_V, PRECISION)
        store_stacked(dk_moments, program, times(sum_q, tl.trans(map_e), PRECISION), P, S)
    if c_r is not None:
        map_r = map_of((c_r, c_r_strides), S, V, WIDTH_S, WIDTH_V, PRECISION)
        store_stacked(dq_moments, program, times(sum_k, tl.trans(map_r), PRECISION), P, S)


@launched("number", "size", "gram_size")
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


@launched()
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
    q, k = segment_of((q, q_strides), b, h, first), segment_of((k, k_strides), b, h, first)
    h_e, h_r = segment_of((h_e, h_strides), b, h, first), segment_of((h_r, h_strides), b, h, first)
    out = segment_of((out, out_strides), b, h, first)
    map_e = map_of((c_e, c_e_strides), S, V, WIDTH_S, WIDTH_V, PRECISION)
    map_r = map_of((c_r, c_r_strides), S, V, WIDTH_S, WIDTH_V, PRECISION)
    shift = row_of(bias, 0, V, WIDTH_V)
    q_side = load_stacked(q_before, program, P, S, WIDTH_P, WIDTH_S)
    k_side = load_stacked(k_before, program, P, S, WIDTH_P, WIDTH_S)
    for step in tl.range(0, tl.cdiv(last - first, BLOCK), num_stages=STAGES):
        row = walk(0, last - first, step, BLOCK, False)
        start = first + row
        real = real_tokens(mask, b, N, start, end, BLOCK)
        share = shares(counts, count_strides, b, start, end, BLOCK)
        z_q, f_q, _ = features_of(
            q, row, real, P, WIDTH_P, BLOCK, PRECISION, MAP_Q
        )  # fmt: skip
        z_k, f_k, _ = features_of(
            k, row, real, P, WIDTH_P, BLOCK, PRECISION, MAP_K
        )  # fmt: skip
        rows_e = rows_of(h_e, row, real, S, WIDTH_S, BLOCK, PRECISION)
        rows_r = rows_of(h_r, row, real, S, WIDTH_S, BLOCK, PRECISION)
        if states is not None:
            place = ((b * tl.cdiv(N, BLOCK) + start // BLOCK) * H + h) * 2
            store_stacked(states, place, q_side, P, S)
            store_stacked(states, place + 1, k_side, P, S)
        y = tl.zeros([BLOCK, WIDTH_V], tl.float32) + shift[None, :]
        if c_e is not None:
            e = read_from(z_q, z_k, f_k, rows_r, k_side, PRECISION)
            y = lowered_product(scaled(e, f_q * share), map_e, y, PRECISION)
        if c_r is not None:
            r = read_from(z_k, z_q, f_q, rows_e, q_side, PRECISION)
            y = lowered_product(scaled(r, f_k * share), map_r, y, PRECISION)
        if mask is not None:
            y = tl.where(real[:, None], y, 0.0)
        exists = columns_of(existing(start, end, BLOCK), V, WIDTH_V)
        store_segment_rows(out, y, row, exists)
        q_side = lowered_product(tl.trans(z_q), scaled(rows_e, f_q), q_side, PRECISION)
        k_side = lowered_product(tl.trans(z_k), scaled(rows_r, f_k), k_side, PRECISION)
    if last == N:
        share_of_one = inverse_of(inverse_n, b)
        store_stacked(q_after, b * H + h, q_side * share_of_one, P, S)
        store_stacked(k_after, b * H + h, k_side * share_of_one, P, S)


@launched()
def backward_walk(
    q, k, h_e, h_r, c_e, c_r, counts, mask, inverse_n, states, d_out, dq_after, dk_after,
    d_gram_q, d_gram_k, dq, dk, dh_e, dh_r, columns, dc_e, dc_r, d_bias,
    q_strides, k_strides, h_strides, c_e_strides, c_r_strides, count_strides,
    d_out_strides, dq_strides, dk_strides, dh_strides, N, H, number, tokens,
    P: tl.constexpr, S: tl.constexpr, V: tl.constexpr,
    WIDTH_P: tl.constexpr, WIDTH_S: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    SCORE_STAGES: tl.constexpr, MAP_Q: tl.constexpr, MAP_K: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Compute all gradients: of every four programs two take features of a side, two its scores.

    What comes from behind a segment counts inverse_n times, where that is given. The sums over the
    tokens of a segment, of dq, dk, dh_e and dh_r side by side, go to a row of columns, where there
    are any.
    """
    program, kind = tl.program_id(0) // 4, tl.program_id(0) % 4
    column = (program // H).to(tl.int64) * (2 * H * (P + S))  # where the row begins
    of_q, of_h = column + program % H * P, column + 2 * H * P + program % H * S
    q, k, d_out = (q, q_strides), (k, k_strides), (d_out, d_out_strides)
    h_e, h_r, c_e, c_r = (h_e, h_strides), (h_r, h_strides), (c_e, c_e_strides), (c_r, c_r_strides)
    known = counts, count_strides, mask, inverse_n, states
    if kind == 0:
        _backward_features(
            program, q, k, h_e, h_r, c_e, c_r, known, d_out, dq_after, d_gram_q,
            (dq, dq_strides), columns, of_q, N, H, number, tokens,
            P, S, V, WIDTH_P, WIDTH_S, WIDTH_V, BLOCK, PRECISION, STAGES, MAP_Q, MAP_K, 1, WHOLE,
        )  # fmt: skip
    elif kind == 1:
        _backward_features(
            program, k, q, h_r, h_e, c_r, c_e, known, d_out, dk_after, d_gram_k,
            (dk, dk_strides), columns, of_q + H * P, N, H, number, tokens,
            P, S, V, WIDTH_P, WIDTH_S, WIDTH_V, BLOCK, PRECISION, STAGES, MAP_K, MAP_Q, 0, WHOLE,
        )  # fmt: skip
    elif kind == 2:
        _backward_scores(
            program, q, k, h_r, c_e, c_r, known, d_out, dq_after,
            (dh_e, dh_strides), dc_e, d_bias, columns, of_h, N, H, number, tokens,
            P, S, V, WIDTH_P, WIDTH_S, WIDTH_V, BLOCK, PRECISION, SCORE_STAGES,
            MAP_Q, MAP_K, 1, WHOLE,
        )  # fmt: skip
    else:
        _backward_scores(
            program, k, q, h_e, c_r, c_e, known, d_out, dk_after,
            (dh_r, dh_strides), dc_r, None, columns, of_h + H * S, N, H, number, tokens,
            P, S, V, WIDTH_P, WIDTH_S, WIDTH_V, BLOCK, PRECISION, SCORE_STAGES,
            MAP_K, MAP_Q, 0, WHOLE,
        )  # fmt: skip


@triton.jit
def _backward_features(
    program, z, far_z, h, far_h, c, far_c, known, d_out, d_after, d_gram, dz, columns, column,
    N, H, number, tokens,
    P: tl.constexpr, S: tl.constexpr, V: tl.constexpr,
    WIDTH_P: tl.constexpr, WIDTH_S: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    FEATURE_MAP: tl.constexpr, FAR_MAP: tl.constexpr, FAR_SIDE: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Gradients of the rows behind the near side's features."""
    counts, count_strides, mask, inverse_n, states = known
    b, head, first, last = share_of_tokens(program, N, H, number, tokens)
    end = None if WHOLE else last
    z = segment_of(z, b, head, first)
    far_z = segment_of(far_z, b, head, first)
    h, far_h = segment_of(h, b, head, first), segment_of(far_h, b, head, first)
    dz = segment_of(dz, b, head, first)
    d_out = segment_of(d_out, b, head, first)
    near_map = map_of(c, S, V, WIDTH_S, WIDTH_V, PRECISION)
    far_map = map_of(far_c, S, V, WIDTH_S, WIDTH_V, PRECISION)
    both = both_ways(d_gram, b * H + head, P, WIDTH_P, PRECISION)
    d_side = load_stacked(d_after, program, P, S, WIDTH_P, WIDTH_S) * inverse_of(inverse_n, b)
    sums = tl.zeros([BLOCK // 2, WIDTH_P], tl.float32)
    for step in tl.range(0, tl.cdiv(last - first, BLOCK), num_stages=STAGES):
        row = walk(0, last - first, step, BLOCK, True)
        start = first + row
        real = real_tokens(mask, b, N, start, end, BLOCK)
        share = shares(counts, count_strides, b, start, end, BLOCK)
        dy = rows_of(d_out, row, real, V, WIDTH_V, BLOCK, PRECISION)
        rows = rows_of(h, row, real, S, WIDTH_S, BLOCK, PRECISION)
        base, factor, inverse = features_of(
            z, row, real, P, WIDTH_P, BLOCK, PRECISION, FEATURE_MAP
        )  # fmt: skip
        far, far_factor, _ = features_of(
            far_z, row, real, P, WIDTH_P, BLOCK, PRECISION, FAR_MAP
        )  # fmt: skip
        d_phi = tl.zeros([BLOCK, WIDTH_P], tl.float32)
        if d_gram is not None:
            d_phi = scaled(times(base, both, PRECISION), factor)
        d_phi = lowered_product(rows, tl.trans(d_side), d_phi, PRECISION)
        d_kernel = tl.zeros([BLOCK, BLOCK], tl.float32)
        if c[0] is not None:
            place = ((b * tl.cdiv(N, BLOCK) + start // BLOCK) * H + head) * 2 + FAR_SIDE
            far_side = state_of(states, place, P, S, WIDTH_P, WIDTH_S)
            far_rows = rows_of(far_h, row, real, S, WIDTH_S, BLOCK, PRECISION)
            d_read = scaled(times(dy, tl.trans(near_map), PRECISION), share)
            d_phi = lowered_product(d_read, tl.trans(far_side), d_phi, PRECISION)
            d_kernel = times(d_read, tl.trans(far_rows), PRECISION) * far_factor[None, :]
            d_kernel = past(d_kernel)
        if far_c[0] is not None:
            d_far = scaled(times(dy, tl.trans(far_map), PRECISION), far_factor * share)
            d_far = lowered(d_far, PRECISION)
            d_kernel += later(times(rows, tl.trans(d_far), PRECISION))
            d_side = lowered_product(tl.trans(far), d_far, d_side, PRECISION)
        d_phi = lowered_product(d_kernel, far, d_phi, PRECISION)
        d_rows = pull_back(base, factor, inverse, d_phi, FEATURE_MAP)
        exists = columns_of(existing(start, end, BLOCK), P, WIDTH_P)
        store_segment_rows(dz, d_rows, row, exists)
        if columns is not None:
            sums += by_eight(d_rows)
    if columns is not None:
        store_row(columns + column, 0, tl.sum(sums, 0), P, WIDTH_P)


@triton.jit
def _backward_scores(
    program, z, far_z, far_h, c, far_c, known, d_out, d_after, dh, dc, d_bias, columns, column,
    N, H, number, tokens,
    P: tl.constexpr, S: tl.constexpr, V: tl.constexpr,
    WIDTH_P: tl.constexpr, WIDTH_S: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    FEATURE_MAP: tl.constexpr, FAR_MAP: tl.constexpr, FAR_SIDE: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Gradients of the near side's dual variables, of the map of its scores, and of the bias."""
    counts, count_strides, mask, inverse_n, states = known
    b, head, first, last = share_of_tokens(program, N, H, number, tokens)
    dh = segment_of(dh, b, head, first)
    end = None if WHOLE else last
    z = segment_of(z, b, head, first)
    far_z = segment_of(far_z, b, head, first)
    far_h = segment_of(far_h, b, head, first)
    d_out = segment_of(d_out, b, head, first)
    far_map = map_of(far_c, S, V, WIDTH_S, WIDTH_V, PRECISION)
    d_side = load_stacked(d_after, program, P, S, WIDTH_P, WIDTH_S) * inverse_of(inverse_n, b)
    sum_c = tl.zeros([WIDTH_V, WIDTH_S], tl.float32)
    sum_bias = tl.zeros([16, WIDTH_V], tl.float32)
    sums = tl.zeros([BLOCK // 2, WIDTH_S], tl.float32)
    for step in tl.range(0, tl.cdiv(last - first, BLOCK), num_stages=STAGES):
        row = walk(0, last - first, step, BLOCK, True)
        start = first + row
        real = real_tokens(mask, b, N, start, end, BLOCK)
        share = shares(counts, count_strides, b, start, end, BLOCK)
        dy = rows_of(d_out, row, real, V, WIDTH_V, BLOCK, PRECISION)
        base, factor, _ = features_of(
            z, row, real, P, WIDTH_P, BLOCK, PRECISION, FEATURE_MAP
        )  # fmt: skip
        far, far_factor, _ = features_of(
            far_z, row, real, P, WIDTH_P, BLOCK, PRECISION, FAR_MAP
        )  # fmt: skip
        dh_rows = times(base, d_side, PRECISION)
        kernel_matrix = times(base, tl.trans(far), PRECISION)
        if far_c[0] is not None:
            d_far = scaled(times(dy, tl.trans(far_map), PRECISION), far_factor * share)
            d_far = lowered(d_far, PRECISION)
            dh_rows = lowered_product(later(kernel_matrix), d_far, dh_rows, PRECISION)
            d_side = lowered_product(tl.trans(far), d_far, d_side, PRECISION)
        exists = columns_of(existing(start, end, BLOCK), S, WIDTH_S)
        dh_rows = scaled(dh_rows, factor)
        store_segment_rows(dh, dh_rows, row, exists)
        if columns is not None:
            sums += by_eight(dh_rows)
        if c[0] is not None:
            place = ((b * tl.cdiv(N, BLOCK) + start // BLOCK) * H + head) * 2 + FAR_SIDE
            far_side = state_of(states, place, P, S, WIDTH_P, WIDTH_S)
            far_rows = rows_of(far_h, row, real, S, WIDTH_S, BLOCK, PRECISION)
            read = times(base, far_side, PRECISION)
            kernel_matrix = past(kernel_matrix * far_factor[None, :])
            read = lowered_product(kernel_matrix, far_rows, read, PRECISION)
            sum_c = lowered_product(tl.trans(dy), scaled(read, factor * share), sum_c, PRECISION)
        if d_bias is not None:
            groups = tl.reshape(dy.to(tl.float32), [BLOCK // 16, 16, WIDTH_V])
            sum_bias += tl.sum(groups, 0)
    if columns is not None:
        store_row(columns + column, 0, tl.sum(sums, 0), S, WIDTH_S)
    if c[0] is not None:
        store_stacked(dc, program, tl.trans(sum_c), S, V)
    if d_bias is not None:
        store_row(d_bias, program, tl.sum(sum_bias, 0), V, WIDTH_V)
