"""Load and store the rows of a block of tokens, and walk over the blocks of a sequence.

All of these functions are called from Triton code. Rows are the tokens of a block in one head,
[n, C], padded to powers of two and zero outside the tensor.

Letters: B batch, N tokens, H heads, C head dim, n tokens of a block.
"""

import triton
import triton.language as tl

# Arguments whose values make no difference to the code, so that no length is compiled for.
LENGTHS = ["N", "H", "splits", "tokens", "B", "sequences"]


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
    """Sequence b and head h of a tensor [B, N, H, C]: a pointer to its first token.

    Of a descriptor [B, N, H C], where it is to load instead: itself, the sequence and the column.
    """
    if isinstance(tensor, tl.tensor):
        return tensor + b * strides[0] + h * strides[2]
    else:
        return tensor, b.to(tl.int32), (h * strides[2]).to(tl.int32)


@triton.jit
def existing(start, end, BLOCK_N: tl.constexpr):
    """Which of the n tokens from start on lie before the end.

    Where all blocks are whole there is no end. The compiler sees that all tokens are before it.
    """
    n = start + tl.arange(0, BLOCK_N)
    return tl.full([BLOCK_N], True, tl.int1) if end is None else n < end


@triton.jit
def real_tokens(mask, b, N, start, end, BLOCK_N: tl.constexpr):
    """Which of the n tokens from start on are real and lie before the end, if there is one."""
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
    """Columns of the n tokens from start on; zero, and never read, where they are not real.

    By a descriptor where the tensor is one, of whose blocks all tokens are real.
    """
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
    """Write columns of the tokens from start on that lie before the end, if there is one.

    The condition is put otherwise than that of the loads. These are made blocks ahead, so that one
    condition for both would be kept until here, and be in the way of all between.
    """
    n = tl.arange(0, rows.shape[0])
    written = tl.full(n.shape, True, tl.int1) if end is None else n < end - start
    places, exists = _row_places(tensor, start, stride, written, column, C, BLOCK_C)
    tl.store(places, rows.to(tensor.dtype.element_ty), mask=exists)


@triton.jit
def columns_of(real, C: tl.constexpr, WIDTH: tl.constexpr):
    """Which entries of a block [n, WIDTH] are of real tokens and not padding of the columns."""
    keep = real[:, None]
    if C != WIDTH:
        keep = keep & (tl.arange(0, WIDTH) < C)[None, :]
    return keep


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
def by_eight(rows):
    """Sums of the rows [n, C] that are eight apart, in pairs: of a product, one thread has both."""
    pairs = tl.reshape(rows, [rows.shape[0] // 16, 2, 8, rows.shape[1]])
    return tl.reshape(tl.sum(pairs, 1), [rows.shape[0] // 2, rows.shape[1]])
