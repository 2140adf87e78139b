"""What the fused ops do with a block of tokens: load rows, apply a fixed map, pull back gradients.

All of these functions are called from Triton code; rows are [n, C] blocks of one head, padded to
powers of two, zero outside the tensor.

Letters: N tokens, C head dim, P feature dim, n tokens of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl

_TINY = tl.constexpr(1.1754943508222875e-38)  # the smallest normal number of float32


@triton.jit
def share_of_tokens(N, H, splits, tokens):
    """Sequence, head, and first and last token of this program; neighbours read one token."""
    program = tl.program_id(0)
    first = (program // H % splits) * tokens
    last = tl.minimum(first + tokens, N)
    return (program // H // splits).to(tl.int64), (program % H).to(tl.int64), first, last


@triton.jit
def sequence_of(tensor, strides, b, h):
    """Pointer to the first token of sequence b and head h of a tensor [B, N, H, C]."""
    return tensor + b * strides[0] + h * strides[2]


@triton.jit
def real_tokens(mask, b, stride, start, last, BLOCK_N: tl.constexpr):
    """Which of the tokens from start on lie before last and are real, [n]."""
    n = start + tl.arange(0, BLOCK_N)
    real = n < last
    if mask is not None:
        real = real & (tl.load(mask + b * stride + n, mask=real, other=0) != 0)
    return real


@triton.jit
def _places(
    tensor, start, stride_n, last, C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr
):
    n, c = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_C)
    exists = (start + n < last)[:, None]
    if C != BLOCK_C:
        exists = exists & (c < C)[None, :]
    first = tensor + start.to(tl.int64) * stride_n
    return first + (n[:, None] * stride_n + c[None, :]), exists


@triton.jit
def load_rows(
    tensor, start, stride_n, last, C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr
):
    """The tokens from start to last, at most n of them, in the tensor's dtype."""
    places, exists = _places(tensor, start, stride_n, last, C, BLOCK_N, BLOCK_C)
    return tl.load(places, mask=exists, other=0.0)


@triton.jit
def store_rows(tensor, rows, start, stride_n, last, C: tl.constexpr):
    """Write rows as the tokens from start to last."""
    places, exists = _places(tensor, start, stride_n, last, C, rows.shape[0], rows.shape[1])
    tl.store(places, rows.to(tensor.dtype.element_ty), mask=exists)


@triton.jit
def _matrix_places(
    tensor, R: tl.constexpr, C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):
    r, c = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_C)
    return tensor + (r[:, None] * C + c[None, :]), (r < R)[:, None] & (c < C)[None, :]


@triton.jit
def load_matrix(
    tensor, R: tl.constexpr, C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):
    """A contiguous matrix [R, C] in float32."""
    places, exists = _matrix_places(tensor, R, C, BLOCK_R, BLOCK_C)
    return tl.load(places, mask=exists, other=0.0).to(tl.float32)


@triton.jit
def store_matrix(tensor, matrix, R: tl.constexpr, C: tl.constexpr):
    """Write a matrix as the contiguous [R, C]."""
    places, exists = _matrix_places(tensor, R, C, matrix.shape[0], matrix.shape[1])
    tl.store(places, matrix.to(tensor.dtype.element_ty), mask=exists)


@triton.jit
def masked_rows(rows, real, mask):
    """Zeros at the tokens that are not real; without a mask the load has seen to that."""
    if mask is not None:
        rows = tl.where(real[:, None], rows, 0.0)
    return rows


@triton.jit
def features(rows, real, FEATURE_MAP: tl.constexpr, DOT: tl.constexpr):
    """phi of the rows as factor * base, and 1 / |z| for the cosine map.

    The base is in the dtype of the products: the rows themselves for the cosine map, so that they
    go from memory into the products as they are. float16 takes phi, for its range is too short for
    rows of any length. At tokens that are not real, rows are zero, and so is the base.
    """
    z = rows.to(tl.float32)
    factor = tl.full([rows.shape[0]], 1.0, tl.float32)
    inverse = factor
    if FEATURE_MAP == "cosine":
        squared = tl.sum(z * z, 1)
        inverse = _inverse_root(squared)
        if DOT == tl.float16:
            base = z * inverse[:, None]
        else:
            base, factor = rows, inverse
    elif FEATURE_MAP == "elu":
        base = tl.where(z > 0, z + 1.0, tl.exp(tl.where(z > 0, 0.0, z)))
        base = tl.where(real[:, None], base, 0.0)
    elif FEATURE_MAP == "relu":
        base = tl.where(z < 0, 0.0, z)
    else:
        tl.static_assert(FEATURE_MAP == "identity")
        base = rows
    return base.to(DOT), factor, inverse


@triton.jit
def _inverse_root(squared):
    """1 / sqrt(x), to the last digits by one step of Newton's method; 0 for x next to 0."""
    x = tl.maximum(squared, _TINY, propagate_nan=tl.PropagateNan.ALL)
    root = tl.rsqrt(x)
    root += 0.5 * root * (1.0 - x * root * root)
    return tl.where(squared < _TINY, 0.0, root)


@triton.jit
def scaled(rows, factor):
    """Rows in float32, each times its factor."""
    return rows.to(tl.float32) * factor[:, None]


@triton.jit
def pull_back(phi, inverse, d_phi, FEATURE_MAP: tl.constexpr):
    """Gradient of z from that of its features; what the derivative needs is phi and 1 / |z|."""
    if FEATURE_MAP == "cosine":
        radial = tl.sum(phi * d_phi, 1)
        dz = scaled(d_phi - scaled(phi, radial), inverse)
    elif FEATURE_MAP == "elu":
        dz = d_phi * tl.minimum(phi, 1.0)
    elif FEATURE_MAP == "relu":
        dz = tl.where(phi > 0, d_phi, 0.0)
    else:
        tl.static_assert(FEATURE_MAP == "identity")
        dz = d_phi
    return dz


@triton.jit
def product(x, y, total):
    """total + x y: by tensor cores in the half precisions, in full float32 otherwise."""
    return tl.dot(x, y, total, input_precision="ieee")


@triton.jit
def fitted(matrix, DOT: tl.constexpr):
    """A float32 matrix in the dtype of the products, and the scale that float16 needs to hold it."""
    scale = tl.full([], 1.0, tl.float32)
    if DOT == tl.float16:
        top = tl.max(tl.abs(matrix))
        scale = tl.where(top > 0, top, 1.0)
        matrix = matrix / scale
    return matrix.to(DOT), scale
