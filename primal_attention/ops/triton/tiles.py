"""Device code for tiles: rows of tokens, small matrices, products, features and their gradients.

Rows are the tokens of a block in one head, [n, C]; rows and matrices are padded to powers of two
and zero outside the tensor. Rows of a segment are found by short offsets from its first token.
Letters: B batch, N tokens, H heads, C head dim, n tokens of a block.
"""

import triton
import triton.language as tl

from primal_attention.feature_maps import FIXED_MAPS, cosine, elu, identity, relu

# Arguments whose values make no difference to the code, so that no length is compiled for.
LENGTHS = ["N", "H", "splits", "tokens", "B", "sequences"]
_MAPS = {"cosine": cosine, "elu": elu, "relu": relu, "identity": identity}  # of `features`


def has_maps(*names: str) -> bool:
    """Return whether the device code has these feature maps under their names."""
    return all(name in _MAPS and FIXED_MAPS.get(name) is _MAPS[name] for name in names)


@triton.jit
def share_of_tokens(program, N, H, number, tokens):
    """Return sequence, head, first and last token of a program; neighbours read near heads."""
    first = (program // H % number) * tokens
    last = tl.minimum(first + tokens, N)
    return (program // H // number).to(tl.int64), (program % H).to(tl.int64), first, last


@triton.jit
def spread_tokens(program, N, H, number, tokens, BLOCK: tl.constexpr):
    """Return a share as `share_of_tokens` does; the last ones are a block shorter as needed."""
    part, shorter = program // H % number, number * (tokens // BLOCK) - tl.cdiv(N, BLOCK)
    first = part * tokens - tl.maximum(part + shorter - number, 0) * BLOCK
    last = tl.minimum(first + tokens - (part + shorter >= number) * BLOCK, N)
    return (program // H // number).to(tl.int64), (program % H).to(tl.int64), first, last


@triton.jit
def sequence_of(tensor, strides, b, h):
    """Sequence b and head h of a tensor [B, N, H, C]: a pointer to its first token.

    For a descriptor [B, N, H C] return itself, the sequence and the column: the place to load from.
    """
    if isinstance(tensor, tl.tensor):
        return tensor + b * strides[0] + h * strides[2]
    else:
        return tensor, b.to(tl.int32), (h * strides[2]).to(tl.int32)


@triton.jit
def existing(start, end, BLOCK_N: tl.constexpr):
    """Mark the n tokens from start on that lie before the end; all of them without an end."""
    n = start + tl.arange(0, BLOCK_N)
    return tl.full([BLOCK_N], True, tl.int1) if end is None else n < end


@triton.jit
def real_tokens(mask, b, N, start, end, BLOCK_N: tl.constexpr):
    """Mark the n tokens from start on that are real and lie before the end, if there is one."""
    real = existing(start, end, BLOCK_N)
    if mask is not None:
        n = start + tl.arange(0, BLOCK_N)
        real = real & (tl.load(mask + b * N + n, mask=real, other=0) != 0)
    return real


@triton.jit
def _row_places(
    tensor, start, stride, tokens, column, C: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    n, c = tl.arange(0, tokens.shape[0]), column + tl.arange(0, BLOCK_C)
    exists = tokens[:, None]
    if C % BLOCK_C != 0:
        exists = exists & (c < C)[None, :]
    first = tl.full([], 0, tl.int64) + start  # the number of the token times the stride may be long
    return tensor + first * stride + (n[:, None] * stride + c[None, :]), exists


@triton.jit
def load_rows(tensor, start, stride, real, column, C: tl.constexpr, BLOCK_C: tl.constexpr):
    """Columns of the n tokens from start on, by a descriptor if given; zero where not real."""
    if isinstance(tensor, tl.tensor):
        places, exists = _row_places(tensor, start, stride, real, column, C, BLOCK_C)
        return tl.load(places, mask=exists, other=0.0)
    else:
        descriptor, b, head = tensor
        rows = descriptor.load([b, start, head + column])
        return tl.reshape(rows, [real.shape[0], BLOCK_C])


@triton.jit
def store_rows(
    tensor, rows, start, stride, end, column, C: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """Write columns of the tokens from start on that lie before the end, if there is one."""
    # The condition differs from that of the loads: these are made blocks ahead, and a condition for
    # both would be kept until here.
    n = tl.arange(0, rows.shape[0])
    written = tl.full(n.shape, True, tl.int1) if end is None else n < end - start
    places, exists = _row_places(tensor, start, stride, written, column, C, BLOCK_C)
    tl.store(places, rows.to(tensor.dtype.element_ty), mask=exists)


@triton.jit
def columns_of(real, C: tl.constexpr, WIDTH: tl.constexpr):
    """Mark the entries of a block [n, WIDTH] that are of real tokens and not padded columns."""
    keep = real[:, None]
    if C != WIDTH:
        keep = keep & (tl.arange(0, WIDTH) < C)[None, :]
    return keep


@triton.jit
def walk(first, last, step, BLOCK: tl.constexpr, BACKWARD: tl.constexpr):
    """Return the first token of the block that comes at this step."""
    if BACKWARD:
        step = tl.cdiv(last - first, BLOCK) - 1 - step
    return first + step * BLOCK


@triton.jit
def counted(counts, strides, b, start, end, BLOCK: tl.constexpr):
    """Return the number t of real tokens up to each, float32 [n], by counts or of all tokens."""
    n = start + tl.arange(0, BLOCK)
    if counts is None:
        return (n + 1).to(tl.float32)
    else:
        places = counts + b * strides[0] + n * strides[1]
        return tl.load(places, mask=existing(start, end, BLOCK), other=1).to(tl.float32)


@triton.jit
def shares(counts, strides, b, start, end, BLOCK: tl.constexpr):
    """Return 1 / t for the number t of real tokens up to each, float32 [n]."""
    return 1.0 / tl.maximum(counted(counts, strides, b, start, end, BLOCK), 1.0)


@triton.jit
def row_of(tensor, row, C: tl.constexpr, WIDTH: tl.constexpr):
    """Load a row of a contiguous matrix [., C] in float32, padded with zeros; zeros if None."""
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
def by_eight(rows):
    """Sums of the rows [n, C] that are eight apart, in pairs: of a product, one thread has both."""
    pairs = tl.reshape(rows, [rows.shape[0] // 16, 2, 8, rows.shape[1]])
    return tl.reshape(tl.sum(pairs, 1), [rows.shape[0] // 2, rows.shape[1]])


@triton.jit
def _matrix_places(
    tensor, row, column,
    R: tl.constexpr, C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    r, c = row + tl.arange(0, BLOCK_R), column + tl.arange(0, BLOCK_C)
    return tensor + (r[:, None] * C + c[None, :]), (r < R)[:, None] & (c < C)[None, :]


@triton.jit
def load_matrix(
    tensor, row, column,
    R: tl.constexpr, C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Load a block of a contiguous matrix [R, C], in float32."""
    return load_operand(tensor, row, column, R, C, BLOCK_R, BLOCK_C).to(tl.float32)


@triton.jit
def load_operand(
    tensor, row, column,
    R: tl.constexpr, C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Load a block of a contiguous matrix [R, C], in its own dtype."""
    places, exists = _matrix_places(tensor, row, column, R, C, BLOCK_R, BLOCK_C)
    return tl.load(places, mask=exists, other=0.0)


@triton.jit
def store_block(tensor, block, row, column, R: tl.constexpr, C: tl.constexpr):
    """Write a block of a contiguous matrix [R, C]."""
    places, exists = _matrix_places(tensor, row, column, R, C, block.shape[0], block.shape[1])
    tl.store(places, block.to(tensor.dtype.element_ty), mask=exists)


@triton.jit
def load_stacked(
    tensor, number, R: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Load one of the contiguous matrices [., R, C] in float32; zeros where there are none."""
    matrix = tl.zeros([ROWS, COLUMNS], tl.float32)
    if tensor is not None:
        offset = tl.cast(number, tl.int64) * (R * C)
        matrix += load_operand(tensor + offset, 0, 0, R, C, ROWS, COLUMNS)
    return matrix


@triton.jit
def store_stacked(tensor, number, matrix, R: tl.constexpr, C: tl.constexpr):
    """Write one of the contiguous matrices [., R, C]."""
    store_block(tensor + tl.cast(number, tl.int64) * (R * C), matrix, 0, 0, R, C)


# The interpreter has plain products only, and none of bfloat16: it takes the rounded operands in
# float32.
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
EXACT = tl.constexpr("bf16x6")  # six products of bfloat16 parts hold the digits of float32


@triton.jit
def product(x, y, total, PRECISION: tl.constexpr = EXACT):
    """Return total + x y by the tensor cores, with float32 sums.

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
    """Return a matrix in the dtype of the products, and the scale that float16 needs to hold it."""
    scale = tl.full([], 1.0, tl.float32)
    if tl.float16 == DOT:
        top = tl.max(tl.abs(matrix))
        scale = tl.where(top > 0, top, 1.0)
        matrix = matrix / scale
    return matrix.to(DOT), scale


@triton.jit
def scaled_product(x, y, scale, total):
    """Return total + x y scale, for a fitted matrix y."""
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
    """Phi of the rows as factor * base, in the dtype of the products; zero where not real."""
    # The base of the cosine map is the rows as they lie in memory; float16, whose range is too
    # short for that, takes phi.
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
def unit_elu(rows, keep):
    """Phi of the rows as base and factor: elu + 1, and 1 over its length; zero where not kept.

    The largest entry of a row is at least 0, by a shift that the length cancels.
    """
    z = tl.where(keep, rows.to(tl.float32), -1e38)
    top = tl.minimum(tl.max(z, 1), 0.0)[:, None]
    z = z - top
    base = tl.where(keep, tl.where(z > 0, z + 1.0, tl.exp(tl.minimum(z, 0.0))), 0.0)
    squared = tl.sum(base * base, 1)
    squared = tl.where(squared > 0, squared, 1.0)
    inverse = tl.rsqrt(squared)
    return base, inverse + 0.5 * inverse * (1.0 - squared * inverse * inverse)


@triton.jit
def scaled(rows, factor):
    """Rows in float32, each times its factor."""
    return rows.to(tl.float32) * factor[:, None]


@triton.jit
def pull_back(base, factor, inverse, d_phi, FEATURE_MAP: tl.constexpr):
    """Gradient of z from that of its features phi = factor * base."""
    base = base.to(tl.float32)
    if FEATURE_MAP == "cosine" or FEATURE_MAP == "unit_elu":
        radial = factor * tl.sum(base * d_phi, 1)
        dz = scaled(d_phi, inverse) - scaled(base, inverse * factor * radial)
        if FEATURE_MAP == "unit_elu":
            dz = dz * tl.minimum(base, 1.0)
    elif FEATURE_MAP == "elu":
        dz = d_phi * tl.minimum(base, 1.0)
    elif FEATURE_MAP == "relu":
        dz = tl.where(base > 0, d_phi, 0.0)
    else:
        tl.static_assert(FEATURE_MAP == "identity")
        dz = d_phi
    return dz


@triton.jit
def times(x, y, PRECISION: tl.constexpr):
    """X y, for lack of a sum to add it to."""
    return lowered_product(x, y, tl.zeros([x.shape[0], y.shape[1]], tl.float32), PRECISION)


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
