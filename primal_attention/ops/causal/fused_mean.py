"""The running mean as fused passes: each segment of a sequence is walked once, in either direction.

Letters: B batch, N tokens, H heads, C head dim, n tokens of a block.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from primal_attention.ops.causal.eager import token_counts
from primal_attention.ops.triton.launch import (
    PARTS,
    PARTS_OF_GRADIENT,
    Config,
    Segments,
    contiguous_rows,
    count_strides,
    divide,
    empty_rows,
    float32,
    mask_bytes,
    padded,
    strides,
)
from primal_attention.ops.triton.launcher import launched
from primal_attention.ops.triton.sums import add_up
from primal_attention.ops.triton.tiles import (
    by_eight,
    load_rows,
    lowered_product,
    real_tokens,
    row_of,
    scaled,
    sequence_of,
    share_of_tokens,
    shares,
    store_row,
    store_rows,
    walk,
)

CONFIGS = {  # by the padded head dim
    16: Config(block=64, num_warps=2, num_stages=3),
    32: Config(block=64, num_warps=2, num_stages=3),
    64: Config(block=64, num_warps=4, num_stages=3),
    128: Config(block=64, num_warps=8, num_stages=3),
    256: Config(block=32, num_warps=4, num_stages=2),
}
# Programs that keep the memory busy, two for each multiprocessor, with several blocks under way in
# each. Where sequences and heads are fewer, segments of them are walked, at the price of a pass for
# their sums.
ENOUGH = 256
# In bfloat16, where sequences and heads are so many programs that one block under way in each is
# enough, and each walks over all tokens.
MANY = 512
ONE_SEGMENT = {64: Config(block=32, num_warps=2, num_stages=1)}
# Registers of a thread in bfloat16, so that all programs are under way at once.
REGISTERS = {64: 128}
Known = tuple[Segments, Tensor]  # and what they add to the carry, [B, segments, H, C]


def counts_if_masked(z: Tensor, token_mask: Tensor | None) -> Tensor | None:
    """Count the real tokens up to each position, [B, N]; None where all are real."""
    return None if token_mask is None else token_counts(z, token_mask, None)


def is_one_segment(z: Tensor) -> bool:
    """Return whether a sequence is one segment."""
    return z.shape[0] * z.shape[2] >= ENOUGH


class Direction(NamedTuple):
    """Direction of a walk and its effect on the rows, by the names in the device code."""

    BACKWARD: bool  # from the last token to the first: gradients
    DIVIDED: bool  # gradients come divided by the counts
    PARTS: int  # bfloat16 numbers that hold the digits of one that is added up


def means(
    z: Tensor, before: Tensor | None, counts: Tensor | None, token_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Means, and the sum after the last token."""
    return _walk(z, before, counts, token_mask, Direction(False, False, PARTS[z.dtype]))


def mean_gradients(
    d_mean: Tensor, d_total: Tensor | None, counts: Tensor | None, token_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradients of the tokens and of the sum before them."""
    return _walk(d_mean, d_total, counts, token_mask, _backward(d_mean))


def mean_gradients_with_sum(
    d_mean: Tensor,
    counts: Tensor | None,
    token_mask: Tensor | None,
    *,
    divided: bool,
    known: Known | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients of the tokens, and their sum over all tokens, [H, C], in the same dtype.

    The gradients of the means may come divided by the counts, and then with their sums over
    segments.
    """
    direction = _backward(d_mean, divided=divided)
    dz, parts = _walk(d_mean, None, counts, token_mask, direction, with_sum=True, known=known)
    total = d_mean.new_empty(d_mean.shape[2:])
    add_up((parts, total))
    return dz, total


def _backward(d_mean: Tensor, *, divided: bool = False) -> Direction:
    parts = PARTS if divided else PARTS_OF_GRADIENT
    return Direction(True, divided, parts[d_mean.dtype])


def _walk(
    x: Tensor,
    carry: Tensor | None,
    counts: Tensor | None,
    token_mask: Tensor | None,
    direction: Direction,
    *,
    with_sum: bool = False,
    known: Known | None = None,
) -> tuple[Tensor, Tensor]:
    """Walk along the tokens; return the new rows and the carry after them, [B, H, C].

    With the sum, the new rows summed over each segment replace the carry, [B segments, H, C].
    """
    B, N, H, C = x.shape
    y = empty_rows(x)
    x, mask = contiguous_rows(x), mask_bytes(token_mask)
    config = config_of(x)
    if known is None:
        segments = divide(x, config.block, 1 if is_one_segment(x) else None)
        sums = _segment_sums(x, counts, mask, segments, config, direction)
    else:
        segments, sums = known
    after = float32(x, B * segments.number if with_sum else B, H, C)
    total, columns = (None, after) if with_sum else (after, None)
    walk_along[(B * segments.number * H,)](
        x, counts, mask, strides(x), count_strides(counts), N, H, segments.number, segments.tokens,
        sums, None if carry is None else carry.contiguous(), y, total, columns, strides(y),
        **direction._asdict(), **_compiled_for(C, config), WHOLE=segments.whole(N, config.block),
        **_registers(x),
    )  # fmt: skip
    return y, after


def _registers(x: Tensor) -> dict[str, int]:
    most = REGISTERS.get(padded(x.shape[-1]))
    return {"maxnreg": most} if most and x.dtype == torch.bfloat16 else {}


def config_of(x: Tensor) -> Config:
    """Return the sizes for tokens x."""
    width = padded(x.shape[-1])
    if x.dtype == torch.bfloat16 and x.shape[0] * x.shape[2] >= MANY:
        return ONE_SEGMENT.get(width, CONFIGS[width])
    return CONFIGS[width]


def _segment_sums(
    x: Tensor,
    counts: Tensor | None,
    mask: Tensor | None,
    segments: Segments,
    config: Config,
    direction: Direction,
) -> Tensor | None:
    """Sum the parts of the carry over each segment, [B, segments, H, C]; None for a single one."""
    B, N, H, C = x.shape
    if segments.number == 1:
        return None
    sums = float32(x, B, segments.number, H, C)
    add_segments[(B * segments.number * H,)](
        x, counts, mask, strides(x), count_strides(counts), N, H, segments.number, segments.tokens,
        sums, BACKWARD=direction.BACKWARD, DIVIDED=direction.DIVIDED,
        **_compiled_for(C, config), WHOLE=segments.whole(N, config.block),
    )  # fmt: skip
    return sums


def _compiled_for(width: int, config: Config) -> dict[str, Any]:
    """Return the compile-time constants of a walk with one width of tiles."""
    return {
        "C": width,
        "WIDTH": padded(width),
        "BLOCK": config.block,
        "STAGES": config.num_stages,
        "num_warps": config.num_warps,
    }


@triton.jit
def carried(
    sums, program, b, h, H, number,
    C: tl.constexpr, WIDTH: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Sum the parts of the carry over the segments before this one, or after it, [WIDTH].

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
    """Broadcast a sum [C] to the rows in which `sums_along` carries it on."""
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
        total = lowered_product(matrix, part, total, "bf16")
        x = x.to(tl.float32) - part.to(tl.float32)
    return total


@triton.jit
def _added(
    x, counts, mask, strides, count_strides, N, b, start, end,
    C: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    BACKWARD: tl.constexpr, DIVIDED: tl.constexpr,
):  # fmt: skip
    """Return the parts of the carry in a block, [n, C]: its rows, or its gradients divided by t."""
    taken = real_tokens(None if BACKWARD else mask, b, N, start, end, BLOCK)
    rows = load_rows(x, start, strides[1], taken, 0, C, WIDTH)
    if BACKWARD and not DIVIDED:
        return scaled(rows, shares(counts, count_strides, b, start, end, BLOCK))
    else:
        return rows


@launched()
def add_segments(
    x, counts, mask, strides, count_strides, N, H, number, tokens, sums,
    C: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    BACKWARD: tl.constexpr, DIVIDED: tl.constexpr, STAGES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Sum the parts of the carry over each segment.

    It ends where the walk begins, which finds in the cache what was read last.
    """
    program = tl.program_id(0)
    b, h, first, last = share_of_tokens(program, N, H, number, tokens)
    end = None if WHOLE else last
    x = sequence_of(x, strides, b, h)
    total = tl.zeros([BLOCK, WIDTH], tl.float32)
    for step in tl.range(0, tl.cdiv(last - first, BLOCK), num_stages=STAGES):
        start = walk(first, last, step, BLOCK, not BACKWARD)
        total += _added(
            x, counts, mask, strides, count_strides, N, b, start, end,
            C, WIDTH, BLOCK, BACKWARD, DIVIDED,
        ).to(tl.float32)  # fmt: skip
    store_row(sums, program, tl.sum(total, 0), C, WIDTH)


@launched()
def walk_along(
    x, counts, mask, strides, count_strides, N, H, number, tokens, sums, carry, y, total, columns,
    y_strides,
    C: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    BACKWARD: tl.constexpr, DIVIDED: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Means of one segment; in the other direction the gradients of its tokens.

    Their sums over each segment are the rows of columns, where there are any.
    """
    program = tl.program_id(0)
    b, h, first, last = share_of_tokens(program, N, H, number, tokens)
    end = None if WHOLE else last
    x, y = sequence_of(x, strides, b, h), sequence_of(y, y_strides, b, h)
    so_far = carried(sums, program, b, h, H, number, C, WIDTH, BACKWARD)
    so_far = as_carry(so_far + row_of(carry, b * H + h, C, WIDTH), BLOCK, PARTS)
    passed = tl.zeros([BLOCK // 2, WIDTH], tl.float32)
    for step in tl.range(0, tl.cdiv(last - first, BLOCK), num_stages=STAGES):
        start = walk(first, last, step, BLOCK, BACKWARD)
        added = _added(
            x, counts, mask, strides, count_strides, N, b, start, end,
            C, WIDTH, BLOCK, BACKWARD, DIVIDED,
        )  # fmt: skip
        rows, so_far = sums_along(added, so_far, BACKWARD, PARTS)
        if BACKWARD:
            rows = tl.where(real_tokens(mask, b, N, start, end, BLOCK)[:, None], rows, 0.0)
        else:
            rows = scaled(rows, shares(counts, count_strides, b, start, end, BLOCK))
        if columns is not None:
            passed += by_eight(rows)
        store_rows(y, rows, start, y_strides[1], end, 0, C, WIDTH)
    if columns is not None:
        store_row(columns, program, tl.sum(passed, 0), C, WIDTH)
    if total is not None:
        ends = first == 0 if BACKWARD else last == N
        if ends:  # rows are all the same: the first is written
            store_rows(total + (b * H + h) * C, so_far, 0, C, 1, 0, C, WIDTH)
