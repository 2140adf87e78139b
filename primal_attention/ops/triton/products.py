"""Products on the tensor cores with float32 sums; called from Triton code."""

import triton
import triton.language as tl

# The interpreter has plain products only, and none of bfloat16: it takes the rounded operands in
# float32.
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
EXACT = tl.constexpr("bf16x6")  # six products of bfloat16 parts hold the digits of float32


@triton.jit
def product(x, y, total, PRECISION: tl.constexpr = EXACT):
    """The sum total + x y on the tensor cores, with float32 sums.

    Operands of the same half precision are multiplied as they are. Others are float32 then, and
    the precision is what launch.PRODUCTS names for them.
    """
    if x.dtype != y.dtype or x.dtype == tl.float32:
        x, y = _single(x, PRECISION), _single(y, PRECISION)
    if _INTERPRETED:
        total = tl.dot(x.to(tl.float32), y.to(tl.float32), total, input_precision="ieee")
    elif x.dtype == tl.float32:
        total = tl.dot(x, y, total, input_precision=PRECISION)
    else:
        total = tl.dot(x, y, total)
    return total


@triton.jit
def _single(x, PRECISION: tl.constexpr):
    """X in float32, with no more digits than the precision; half precision has not more anyway."""
    if x.dtype == tl.float32 and PRECISION == "tf32":
        x = _nearest(x)
    return x.to(tl.float32)


@triton.jit
def _nearest(x):
    """The nearest TensorFloat-32 number; the tensor cores themselves would cut digits off."""
    if _INTERPRETED:
        bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
        x = bits.to(tl.float32, bitcast=True)
    else:
        x = tl.inline_asm_elementwise(
            "cvt.rna.tf32.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return x


@triton.jit
def fitted(matrix, DOT: tl.constexpr):
    """A matrix in the dtype of the products, and the scale that float16 needs to hold it."""
    scale = tl.full([], 1.0, tl.float32)
    if tl.float16 == DOT:
        top = tl.max(tl.abs(matrix))
        scale = tl.where(top > 0, top, 1.0)
        matrix = matrix / scale
    return matrix.to(DOT), scale


@triton.jit
def scaled_product(x, y, scale, total):
    """The sum total + x y scale, for a fitted matrix y."""
    if y.dtype == tl.float16:
        total += product(x, y, tl.zeros(total.shape, tl.float32)) * scale
    else:
        total = product(x, y, total)
    return total


@triton.jit
def lowered(x, PRECISION: tl.constexpr):
    """X as an operand of a product."""
    if PRECISION == "bf16":
        return x.to(tl.bfloat16)
    else:
        return x.to(tl.float32)


@triton.jit
def lowered_product(x, y, total, PRECISION: tl.constexpr):
    """Total + x y with float32 sums, by the arithmetic that launch.PRECISION names."""
    x, y = lowered(x, PRECISION), lowered(y, PRECISION)
    if _INTERPRETED:
        x, y = x.to(tl.float32), y.to(tl.float32)
    return tl.dot(x, y, total, input_precision="tf32" if PRECISION == "tf32" else "ieee")
