"""What the fused causal ops have in common: tiles of tokens, feature maps, sums along the tokens.

A program of a fused op walks over the blocks of one segment of one sequence and head. All of these
functions are called from Triton code.

Letters: B batch, N tokens, H heads, C columns (head dim, features or values), n tokens of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl

_TINY = tl.constexpr(1.1754943508222875e-38)  # the smallest normal number of float32


@triton.jit
def place(segments, H):
    """Sequence, segment and head of this program; neighbours read neighbouring heads."""
    program = tl.program_id(0)
    return program // (segments * H), program // H % segments, program % H


@triton.jit
def at(tensor, strides, b, n, h):
    """Pointer to token n of sequence b and head h in a tensor [B, N, H, C]."""
    far = tl.cast(b, tl.int64) * strides[0] + tl.cast(n, tl.int64) * strides[1]
    return tensor + far + h * strides[2]


@triton.jit
def real_rows(mask, strides, b, start, N, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Which of the tokens from start on exist and are real, [n]."""
    rows = tl.arange(0, BLOCK)
    real = start + rows < N
    if MASKED:
        tokens = mask + tl.cast(b, tl.int64) * strides[0] + (start + rows).to(tl.int64) * strides[1]
        real = real & (tl.load(tokens, mask=real, other=0) != 0)
    return real


@triton.jit
def counts_of(counts, strides, b, start, N, BLOCK: tl.constexpr):
    """Real tokens up to each, at least one, as float32 [n]."""
    rows = start + tl.arange(0, BLOCK)
    tokens = counts + tl.cast(b, tl.int64) * strides[0] + rows.to(tl.int64) * strides[1]
    return tl.maximum(tl.load(tokens, mask=rows < N, other=1).to(tl.float32), 1.0)


@triton.jit
def load_tile(tensor, stride, keep, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Rows from a pointer on, in their dtype; zeros where keep [n, WIDTH] is False."""
    rows, columns = tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    return tl.load(tensor + rows[:, None] * stride + columns[None, :], mask=keep, other=0.0)


@triton.jit
def store_tile(tensor, stride, tile, keep, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Write the rows of a tile from a pointer on, where keep is True."""
    rows, columns = tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    places = tensor + rows[:, None] * stride + columns[None, :]
    tl.store(places, tile.to(tensor.dtype.element_ty), mask=keep)


@triton.jit
def inside(ROWS: tl.constexpr, COLUMNS: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr):
    """Which entries of a padded matrix [ROWS, COLUMNS] belong to the matrix [rows, columns]."""
    return (tl.arange(0, ROWS) < rows)[:, None] & (tl.arange(0, COLUMNS) < columns)[None, :]


@triton.jit
def sum_of_rows(tensor, stride, first, last, C: tl.constexpr, WIDTH: tl.constexpr):
    """The sum of the rows first..last - 1 of a float32 matrix, [WIDTH]."""
    columns = tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], tl.float32)
    for start in range(first, last, 16):
        rows = start + tl.arange(0, 16)
        keep = (rows < last)[:, None] & (columns < C)[None, :]
        total += tl.sum(
            tl.load(tensor + rows[:, None] * stride + columns[None, :], mask=keep, other=0.0), 0
        )
    return total


@triton.jit
def carried(
    sums, b, segment, h, number, H, C: tl.constexpr, WIDTH: tl.constexpr, BACKWARD: tl.constexpr
):
    """What the segments before this one add up to, or those after it; sums is [B, number, H, C]."""
    rows = sums + (b * number * H + h) * C
    if BACKWARD:
        return sum_of_rows(rows, H * C, segment + 1, number, C, WIDTH)
    else:
        return sum_of_rows(rows, H * C, 0, segment, C, WIDTH)


@triton.jit
def sums_along(x, BLOCK: tl.constexpr, BACKWARD: tl.constexpr, PARTS: tl.constexpr):
    """Sums of the rows of x [n, C] up to each, or from each on; float32.

    A product with a triangle of ones, in bfloat16 parts of x that together hold its digits: one
    part is exact for bfloat16, two for float16, three for float32.
    """
    rows = tl.arange(0, BLOCK)
    if BACKWARD:
        triangle = (rows[:, None] <= rows[None, :]).to(tl.bfloat16)
    else:
        triangle = (rows[:, None] >= rows[None, :]).to(tl.bfloat16)
    part = x.to(tl.bfloat16)
    total = tl.dot(triangle, part)
    rest = x.to(tl.float32)
    for _ in tl.static_range(PARTS - 1):
        rest -= part.to(tl.float32)
        part = rest.to(tl.bfloat16)
        total = tl.dot(triangle, part, total)
    return total


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """a b with float32 sums; the operands are in the compute dtype."""
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _norm(z):
    squared = tl.sum(z * z, 1)[:, None]
    nonzero = squared >= _TINY
    return tl.sqrt(tl.where(nonzero, squared, 1.0)), nonzero


@triton.jit
def features(z, keep, MAP: tl.constexpr):
    """The fixed map of the rows of z (float32), zero where keep is False."""
    if MAP == "cosine":
        norm, nonzero = _norm(z)
        phi = tl.where(nonzero, z / norm, 0.0)
    elif MAP == "elu":
        phi = tl.where(z > 0, z + 1.0, tl.exp(tl.minimum(z, 0.0)))
    elif MAP == "relu":
        phi = tl.maximum(z, 0.0)
    else:
        tl.static_assert(MAP == "identity")
        phi = z
    return tl.where(keep, phi, 0.0)


@triton.jit
def features_vjp(z, d_phi, keep, MAP: tl.constexpr):
    """Gradient of z from that of its features, zero where keep is False."""
    if MAP == "cosine":
        norm, nonzero = _norm(z)
        phi = z / norm
        tangent = d_phi - phi * tl.sum(phi * d_phi, 1)[:, None]
        dz = tl.where(nonzero, tangent / norm, 0.0)
    elif MAP == "elu":
        dz = d_phi * tl.where(z > 0, 1.0, tl.exp(tl.minimum(z, 0.0)))
    elif MAP == "relu":
        dz = tl.where(z > 0, d_phi, 0.0)
    else:
        tl.static_assert(MAP == "identity")
        dz = d_phi
    return tl.where(keep, dz, 0.0)
