"""What the fused causal ops have in common: they walk over the tokens with a carry.

A program walks over the blocks of one segment of one sequence and head, forward or backward. All of
these functions are called from Triton code; rows are [n, C] blocks of one head, padded to powers of
two, zero outside the tensor.

Letters: B batch, N tokens, H heads, C head dim, P feature dim, n tokens of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from primal_attention.ops.triton_maps import existing

# The interpreter has no products of bfloat16: it takes the rounded operands in float32.
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


_TINY = tl.constexpr(1.1754943508222875e-38)  # the smallest normal number of float32


@triton.jit
def share_of_tokens(program, N, H, number, tokens):
    """Sequence, head, first and last token of a program; neighbours read neighbouring heads."""
    first = (program // H % number) * tokens
    last = tl.minimum(first + tokens, N)
    return (program // H // number).to(tl.int64), (program % H).to(tl.int64), first, last


@triton.jit
def spread_tokens(program, N, H, number, tokens, BLOCK: tl.constexpr):
    """The same where the last shares have a block less, as many of them as there have to be."""
    part, shorter = program // H % number, number * (tokens // BLOCK) - tl.cdiv(N, BLOCK)
    first = part * tokens - tl.maximum(part + shorter - number, 0) * BLOCK
    last = tl.minimum(first + tokens - (part + shorter >= number) * BLOCK, N)
    return (program // H // number).to(tl.int64), (program % H).to(tl.int64), first, last


@triton.jit
def columns_of(real, C: tl.constexpr, WIDTH: tl.constexpr):
    """Which entries of a block [n, WIDTH] are of real tokens and not padding of the columns."""
    keep = real[:, None]
    if C != WIDTH:
        keep = keep & (tl.arange(0, WIDTH) < C)[None, :]
    return keep


@triton.jit
def _matrix_places(
    tensor, number, R: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    r, c = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    places = tensor + tl.cast(number, tl.int64) * (R * C) + (r[:, None] * C + c[None, :])
    return places, (r < R)[:, None] & (c < C)[None, :]


@triton.jit
def load_matrix(
    tensor, number, R: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """One of the contiguous matrices [., R, C] in float32; zeros where there are none."""
    matrix = tl.zeros([ROWS, COLUMNS], tl.float32)
    if tensor is not None:
        places, exists = _matrix_places(tensor, number, R, C, ROWS, COLUMNS)
        matrix += tl.load(places, mask=exists, other=0.0)
    return matrix


@triton.jit
def store_matrix(tensor, number, matrix, R: tl.constexpr, C: tl.constexpr):
    """Write one of the contiguous matrices [., R, C]."""
    places, exists = _matrix_places(tensor, number, R, C, matrix.shape[0], matrix.shape[1])
    tl.store(places, matrix.to(tensor.dtype.element_ty), mask=exists)


@triton.jit
def walk(first, last, step, BLOCK: tl.constexpr, BACKWARD: tl.constexpr):
    """The first token of the block that comes at this step."""
    if BACKWARD:
        step = tl.cdiv(last - first, BLOCK) - 1 - step
    return first + step * BLOCK


@triton.jit
def counted(counts, strides, b, start, end, BLOCK: tl.constexpr):
    """The number t of real tokens up to each before the end, float32 [n]; counts is [B, N].

    Without counts, all tokens are real and no others come before them.
    """
    n = start + tl.arange(0, BLOCK)
    if counts is None:
        return (n + 1).to(tl.float32)
    else:
        places = counts + b * strides[0] + n * strides[1]
        return tl.load(places, mask=existing(start, end, BLOCK), other=1).to(tl.float32)


@triton.jit
def shares(counts, strides, b, start, end, BLOCK: tl.constexpr):
    """1 / t for the number t of real tokens up to each, float32 [n]."""
    return 1.0 / tl.maximum(counted(counts, strides, b, start, end, BLOCK), 1.0)


@triton.jit
def row_of(tensor, row, C: tl.constexpr, WIDTH: tl.constexpr):
    """A row of a contiguous matrix [., C] in float32, padded with zeros; zeros without a matrix."""
    columns = tl.arange(0, WIDTH)
    values = tl.zeros([WIDTH], tl.float32)
    if tensor is not None:
        values += tl.load(tensor + row * C + columns, mask=columns < C, other=0.0)
    return values


@triton.jit
def store_row(tensor, row, values, C: tl.constexpr, WIDTH: tl.constexpr):
    """Write a row of a contiguous matrix [., C]."""
    columns = tl.arange(0, WIDTH)
    tl.store(tensor + row * C + columns, values, mask=columns < C)


@triton.jit
def carried(
    sums, program, b, h, H, number,
    C: tl.constexpr, WIDTH: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """What the segments before this one add to the carry, or those after it, [WIDTH].

    sums is [B, number, H, C], or None where there is one segment.
    """
    total = tl.zeros([WIDTH], tl.float32)
    if sums is not None:
        columns = tl.arange(0, WIDTH)
        segment = program // H % number
        first = segment + 1 if BACKWARD else 0
        last = number if BACKWARD else segment
        for start in range(first, last, 16):
            segments = start + tl.arange(0, 16)
            places = sums + (((b * number + segments) * H + h) * C)[:, None] + columns[None, :]
            keep = (segments < last)[:, None] & (columns < C)[None, :]
            total += tl.sum(tl.load(places, mask=keep, other=0.0), 0)
    return total


@triton.jit
def as_carry(row, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """A sum [C] as `sums_along` carries it on: the same in all rows that it has."""
    return tl.broadcast_to(row[None, :], [BLOCK if PARTS == 1 else 1, row.shape[0]])


@triton.jit
def sums_along(x, before, BACKWARD: tl.constexpr, PARTS: tl.constexpr):
    """Before + the sums of the rows of x [n, C] up to each, or from each on; before + that of all.

    In float32. For the half precisions the first is a product with a triangle of ones, in bfloat16
    parts of x that together hold its digits. Where x is bfloat16, the second is a product too: each
    thread then has the sum for its own rows, and none waits for another. Tensor cores cut float32
    sums off: what they add up is a block, and float32 (no parts) is added up without them.
    """
    if PARTS == 1:
        evenly = tl.full([x.shape[0], x.shape[0]], 1.0 / x.shape[0], tl.float32)
        mean = _in_parts(evenly, x, tl.zeros(x.shape, tl.float32), PARTS)
        after = before + mean * x.shape[0]
    else:
        after = before + tl.sum(x.to(tl.float32), 0)[None, :]
    if PARTS == 0:
        along = before + tl.cumsum(x.to(tl.float32), 0, reverse=BACKWARD)
    else:
        n = tl.arange(0, x.shape[0])
        taken = n[:, None] <= n[None, :] if BACKWARD else n[:, None] >= n[None, :]
        triangle = tl.where(taken, 1.0, 0.0)
        along = _in_parts(triangle, x, tl.broadcast_to(before, x.shape), PARTS)
    return along, after


@triton.jit
def _in_parts(matrix, x, total, PARTS: tl.constexpr):
    """Total + matrix x, in bfloat16 parts of x that hold its digits; the matrix has few digits."""
    for _ in tl.static_range(PARTS):
        part = x.to(tl.bfloat16)
        total = product(matrix, part, total, "bf16")
        x = x.to(tl.float32) - part.to(tl.float32)
    return total


@triton.jit
def lowered(x, PRECISION: tl.constexpr):
    """X as an operand of a product."""
    if PRECISION == "bf16":
        return x.to(tl.bfloat16)
    else:
        return x.to(tl.float32)


@triton.jit
def product(x, y, total, PRECISION: tl.constexpr):
    """Total + x y with float32 sums, by the arithmetic that launch.PRECISION names."""
    x, y = lowered(x, PRECISION), lowered(y, PRECISION)
    if _INTERPRETED:
        x, y = x.to(tl.float32), y.to(tl.float32)
    return tl.dot(x, y, total, input_precision="tf32" if PRECISION == "tf32" else "ieee")


@triton.jit
def features(z, keep, FEATURE_MAP: tl.constexpr):
    """Phi of the rows z, zero where keep [n, P] is False, and 1 / |z| for the cosine map."""
    z = z.to(tl.float32)
    inverse = tl.zeros([z.shape[0]], tl.float32)
    if FEATURE_MAP == "cosine":
        squared = tl.sum(z * z, 1)
        nonzero = squared >= _TINY
        inverse = tl.where(nonzero, 1.0 / tl.sqrt_rn(tl.where(nonzero, squared, 1.0)), 0.0)
        phi = z * inverse[:, None]
    elif FEATURE_MAP == "elu":
        phi = tl.where(z > 0, z + 1.0, tl.exp(tl.minimum(z, 0.0)))
    elif FEATURE_MAP == "relu":
        phi = tl.maximum(z, 0.0)
    else:
        tl.static_assert(FEATURE_MAP == "identity")
        phi = z
    return tl.where(keep, phi, 0.0), inverse


@triton.jit
def pull_back(phi, inverse, d_phi, factor, FEATURE_MAP: tl.constexpr):
    """Gradient of z from that of its features, times a factor [n, 1].

    What the derivative needs of z is phi and 1 / |z|.
    """
    if FEATURE_MAP == "cosine":
        dz = (d_phi - phi * tl.sum(phi * d_phi, 1)[:, None]) * (inverse[:, None] * factor)
    elif FEATURE_MAP == "elu":
        dz = d_phi * tl.minimum(phi, 1.0) * factor
    elif FEATURE_MAP == "relu":
        dz = tl.where(phi > 0, d_phi, 0.0) * factor
    else:
        tl.static_assert(FEATURE_MAP == "identity")
        dz = d_phi * factor
    return dz
