"""Features of the rows of a block, and the gradient of the rows; called from Triton code.

Features are factor * base. For the cosine map the base is the rows as they lie in memory, which
thus go into the products without passing through registers.
"""

import triton
import triton.language as tl

_TINY = tl.constexpr(1.1754943508222875e-38)  # the smallest normal number of float32


@triton.jit
def inverse_norms(rows, FEATURE_MAP: tl.constexpr, DOT: tl.constexpr):
    """1 / |z| of each row and 0 where z = 0, for the cosine map; 1 for the other maps."""
    inverse = tl.full([rows.shape[0]], 1.0, tl.float32)
    if FEATURE_MAP == "cosine":
        z = rows.to(tl.float32)
        squared = tl.sum(z * z, 1)
        zero = squared < _TINY
        squared = tl.where(zero, 1.0, squared)
        inverse = tl.rsqrt(squared)
        if tl.float32 == DOT:  # the last digits, by a step of Newton's method
            inverse += 0.5 * inverse * (1.0 - squared * inverse * inverse)
        inverse = tl.where(zero, 0.0, inverse)
    return inverse


@triton.jit
def features(rows, inverse, real, FEATURE_MAP: tl.constexpr, DOT: tl.constexpr):
    """Phi of the rows as factor * base, the base in the dtype of the products.

    For the cosine map the base is the rows themselves, which thus go from memory into the products
    as they are; but float16, whose range is too short for that, takes phi. Where tokens are not
    real, rows are zero, and so is the base.
    """
    factor = tl.full([rows.shape[0]], 1.0, tl.float32)
    z = rows.to(tl.float32)
    if FEATURE_MAP == "cosine":
        if tl.float16 == DOT:
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
    return base.to(DOT), factor


@triton.jit
def scaled(rows, factor):
    """Rows in float32, each times its factor."""
    return rows.to(tl.float32) * factor[:, None]


@triton.jit
def pull_back(base, factor, inverse, d_phi, FEATURE_MAP: tl.constexpr):
    """Gradient of z from that of its features phi = factor * base."""
    base = base.to(tl.float32)
    if FEATURE_MAP == "cosine":
        radial = factor * tl.sum(base * d_phi, 1)
        dz = scaled(d_phi, inverse) - scaled(base, inverse * factor * radial)
    elif FEATURE_MAP == "elu":
        dz = d_phi * tl.minimum(base, 1.0)
    elif FEATURE_MAP == "relu":
        dz = tl.where(base > 0, d_phi, 0.0)
    else:
        tl.static_assert(FEATURE_MAP == "identity")
        dz = d_phi
    return dz
