"""What the fused causal ops have in common: they walk over the tokens with a carry.

A program walks over the blocks of one segment of one sequence and head, forward or backward. All of
these functions are called from Triton code; rows are [n, C] blocks of one head, padded to powers of
two, zero outside the tensor.

Letters: B batch, N tokens, H heads, C head dim, P feature dim, n tokens of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl

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
def sequence_of(tensor, strides, b, h):
    """Pointer to the first token of sequence b and head h of a tensor [B, N, H, C]."""
    return tensor + b * strides[0] + h * strides[2]


@triton.jit
def existing(start, last, BLOCK: tl.constexpr):
    """Which of the tokens from start on lie before last, [n]."""
    return start + tl.arange(0, BLOCK) < last


@triton.jit
def real_tokens(mask, b, N, start, last, BLOCK: tl.constexpr):
    """Which of the tokens from start on lie before last and are real, [n]; mask is [B, N]."""
    real = existing(start, last, BLOCK)
    if mask is not None:
        n = b * N + start + tl.arange(0, BLOCK)
        real = real & (tl.load(mask + n, mask=real, other=0) != 0)
    return real


@triton.jit
def columns_of(real, C: tl.constexpr, WIDTH: tl.constexpr):
    """Which entries of a block [n, WIDTH] are of real tokens and not padding of the columns."""
    keep = real[:, None]
    if C != WIDTH:
        keep = keep & (tl.arange(0, WIDTH) < C)[None, :]
    return keep


@triton.jit
def _places(tensor, start, stride, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    n, c = tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    return tensor + start.to(tl.int64) * stride + (n[:, None] * stride + c[None, :])


@triton.jit
def load_rows(tensor, start, stride, keep, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """The tokens from start on in the tensor's dtype, zero where keep is False."""
    return tl.load(_places(tensor, start, stride, BLOCK, WIDTH), mask=keep, other=0.0)


@triton.jit
def store_rows(tensor, rows, start, stride, keep):
    """Write rows as the tokens from start on, where keep is True."""
    places = _places(tensor, start, stride, rows.shape[0], rows.shape[1])
    tl.store(places, rows.to(tensor.dtype.element_ty), mask=keep)


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
def counted(counts, strides, b, start, last, BLOCK: tl.constexpr):
    """The number t of real tokens up to each, float32 [n]; counts is [B, N].

    Without counts, all tokens are real and no others come before them.
    """
    n = start + tl.arange(0, BLOCK)
    if counts is None:
        return (n + 1).to(tl.float32)
    else:
        places = counts + b * strides[0] + n * strides[1]
        return tl.load(places, mask=n < last, other=1).to(tl.float32)


@triton.jit
def shares(counts, strides, b, start, last, BLOCK: tl.constexpr):
    """1 / t for the number t of real tokens up to each, float32 [n, 1]."""
    t = counted(counts, strides, b, start, last, BLOCK)
    return (1.0 / tl.maximum(t, 1.0))[:, None]


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
def sums_along(x, BACKWARD: tl.constexpr, PARTS: tl.constexpr):
    """Sums of the rows of x [n, C] up to each, or from each on, in float32.

    For the half precisions a product with a triangle of ones, in bfloat16 parts of x that together
    hold its digits. Tensor cores cut float32 sums off, so that float32 (no parts) is added up.
    """
    if PARTS == 0:
        return tl.cumsum(x.to(tl.float32), 0, reverse=BACKWARD)
    else:
        n = tl.arange(0, x.shape[0])
        taken = n[:, None] <= n[None, :] if BACKWARD else n[:, None] >= n[None, :]
        triangle = tl.where(taken, 1.0, 0.0).to(tl.bfloat16)
        part = x.to(tl.bfloat16)
        total = product(triangle, part, tl.zeros(x.shape, tl.float32), "bf16")
        rest = x.to(tl.float32)
        for _ in tl.static_range(PARTS - 1):
            rest -= part.to(tl.float32)
            part = rest.to(tl.bfloat16)
            total = product(triangle, part, total, "bf16")
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
