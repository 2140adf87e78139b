"""What the fused causal ops do beside those of triton_maps: they walk over the tokens with a carry.

A program walks over the blocks of one segment of one sequence and head, forward or backward. All of
these functions are called from Triton code.

Letters: B batch, N tokens, H heads, C head dim, n tokens of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from primal_attention.ops.triton_maps import features

# The interpreter has no products of bfloat16: it takes the rounded operands in float32.
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def walk(first, last, step, BLOCK: tl.constexpr, BACKWARD: tl.constexpr):
    """The first token of the block that comes at this step."""
    if BACKWARD:
        step = tl.cdiv(last - first, BLOCK) - 1 - step
    return first + step * BLOCK


@triton.jit
def counts_of(counts, stride, start, last, BLOCK: tl.constexpr):
    """Real tokens up to each, at least one, as float32 [n]."""
    n = start + tl.arange(0, BLOCK)
    t = tl.load(counts + n * stride, mask=n < last, other=1)
    return tl.maximum(t.to(tl.float32), 1.0)


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
def carried(sums, b, h, H, number, C: tl.constexpr, WIDTH: tl.constexpr, BACKWARD: tl.constexpr):
    """What the segments before this one add to the carry, or those after it, [WIDTH].

    sums is [B, number, H, C], or None where there is one segment.
    """
    total = tl.zeros([WIDTH], tl.float32)
    if sums is not None:
        columns = tl.arange(0, WIDTH)
        segment = tl.program_id(0) // H % number
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

    A product with a triangle of ones, in bfloat16 parts of x that together hold its digits: one
    part is exact for bfloat16, two for float16, three for float32.
    """
    n = tl.arange(0, x.shape[0])
    taken = n[:, None] <= n[None, :] if BACKWARD else n[:, None] >= n[None, :]
    triangle = tl.where(taken, 1.0, 0.0).to(tl.bfloat16)
    part = x.to(tl.bfloat16)
    total = product(triangle, part, tl.zeros(x.shape, tl.float32))
    rest = x.to(tl.float32)
    for _ in tl.static_range(PARTS - 1):
        rest -= part.to(tl.float32)
        part = rest.to(tl.bfloat16)
        total = product(triangle, part, total)
    return total


@triton.jit
def product(x, y, total):
    """total + x y with float32 sums: bfloat16 as it is, float16 by TensorFloat-32, else in full.

    TensorFloat-32 has the digits of float16 and the range of float32, which sums along the tokens
    and gradients divided by their number need.
    """
    if _INTERPRETED:
        x, y = x.to(tl.float32), y.to(tl.float32)
    return tl.dot(x, y, total, input_precision="ieee")


@triton.jit
def masked_features(z, keep, FEATURE_MAP: tl.constexpr):
    """phi of the rows z and 1 / |z|; phi is zero where keep [n, P] is False."""
    phi, inverse = features(z, tl.full([z.shape[0]], 1, tl.int1), FEATURE_MAP)
    return tl.where(keep, phi, 0.0), inverse
