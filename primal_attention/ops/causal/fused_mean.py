"""The running mean as fused passes: each segment of a sequence is walked once, in either direction.

Letters: B batch, N tokens, H heads, C head dim, n tokens of a block.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from primal_attention.ops.triton import launch
from primal_attention.ops.triton import tiles as tt
from primal_attention.ops.triton.launch import Config, Segments, launched, padded

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


def is_one_segment(z: Tensor) -> bool:
    """Return whether a sequence is one segment."""
    return z.shape[0] * z.shape[2] >= ENOUGH


class Direction(NamedTuple):
    """Direction of a walk and its effect on the rows, by the names in the device code."""

    BACKWARD: bool  # from the last token to the first: gradients
    DIVIDED: bool  # gradients come divided by the counts
    PARTS: int  # bfloat16 numbers that hold the digits of one that is added up


def means(z: Tensor, counts: Tensor | None, token_mask: Tensor | None) -> Tensor:
    """Means of the rows z over the real tokens up to each."""
    return _walk(z, counts, token_mask, Direction(False, False, launch.PARTS[z.dtype]))[0]


def mean_gradients(
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
    parts = (launch.PARTS if divided else launch.PARTS_OF_GRADIENT)[d_mean.dtype]
    dz, sums = _walk(d_mean, counts, token_mask, Direction(True, divided, parts), known)
    total = d_mean.new_empty(d_mean.shape[2:])
    launch.add_up((sums, total))
    return dz, total


def _walk(
    x: Tensor,
    counts: Tensor | None,
    token_mask: Tensor | None,
    direction: Direction,
    known: Known | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Walk along the tokens; return the new rows and, backward, their sums over each segment.

    What the segments add to the carry is summed first, where they are several and it is not known.
    """
    B, N, H, C = x.shape
    y, mask, x = launch.empty_rows(x), launch.mask_bytes(token_mask), launch.contiguous_rows(x)
    width, many = padded(C), x.dtype == torch.bfloat16 and B * H >= MANY
    config = ONE_SEGMENT.get(width, CONFIGS[width]) if many else CONFIGS[width]
    segments = launch.divide(x, config.block, 1 if is_one_segment(x) else None)
    segments, sums = known or (segments, None)
    programs = B * segments.number * H
    options: dict[str, Any] = {
        "C": C,
        "WIDTH": width,
        "BLOCK": config.block,
        "STAGES": config.num_stages,
        "BACKWARD": direction.BACKWARD,
        "DIVIDED": direction.DIVIDED,
        "WHOLE": segments.whole(N, config.block),
        "num_warps": config.num_warps,
    }
    given = x, counts, mask, launch.strides(x), launch.matrix_strides(counts)
    layout = N, H, segments.number, segments.tokens
    if known is None and segments.number > 1:
        sums = launch.float32(x, B, segments.number, H, C)
        add_segments[(programs,)](*given, *layout, sums, **options)
    if x.dtype == torch.bfloat16 and width in REGISTERS:
        options["maxnreg"] = REGISTERS[width]
    columns = launch.float32(x, B * segments.number, H, C) if direction.BACKWARD else None
    walk_along[(programs,)](
        *given, *layout, sums, y, columns, launch.strides(y), PARTS=direction.PARTS, **options
    )
    return y, columns


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
        total = tt.lowered_product(matrix, part, total, "bf16")
        x = x.to(tl.float32) - part.to(tl.float32)
    return total


@triton.jit
def _added(
    x, counts, mask, strides, count_strides, N, b, start, end,
    C: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    BACKWARD: tl.constexpr, DIVIDED: tl.constexpr,
):  # fmt: skip
    """Return the parts of the carry in a block, [n, C]: its rows, or its gradients divided by t."""
    taken = tt.real_tokens(None if BACKWARD else mask, b, N, start, end, BLOCK)
    rows = tt.load_rows(x, start, strides[1], taken, 0, C, WIDTH)
    if BACKWARD and not DIVIDED:
        return tt.scaled(rows, tt.shares(counts, count_strides, b, start, end, BLOCK))
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
    b, h, first, last = tt.share_of_tokens(program, N, H, number, tokens)
    end = None if WHOLE else last
    x = tt.sequence_of(x, strides, b, h)
    total = tl.zeros([BLOCK, WIDTH], tl.float32)
    for step in tl.range(0, tl.cdiv(last - first, BLOCK), num_stages=STAGES):
        start = tt.walk(first, last, step, BLOCK, not BACKWARD)
        total += _added(
            x, counts, mask, strides, count_strides, N, b, start, end,
            C, WIDTH, BLOCK, BACKWARD, DIVIDED,
        ).to(tl.float32)  # fmt: skip
    tt.store_row(sums, program, tl.sum(total, 0), C, WIDTH)


@launched()
def walk_along(
    x, counts, mask, strides, count_strides, N, H, number, tokens, sums, y, columns, y_strides,
    C: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    BACKWARD: tl.constexpr, DIVIDED: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Means of one segment; in the other direction the gradients of its tokens.

    Their sums over each segment are the rows of columns, where there are any.
    """
    program = tl.program_id(0)
    b, h, first, last = tt.share_of_tokens(program, N, H, number, tokens)
    end = None if WHOLE else last
    x, y = tt.sequence_of(x, strides, b, h), tt.sequence_of(y, y_strides, b, h)
    so_far = carried(sums, program, b, h, H, number, C, WIDTH, BACKWARD)
    so_far = as_carry(so_far, BLOCK, PARTS)
    passed = tl.zeros([BLOCK // 2, WIDTH], tl.float32)
    for step in tl.range(0, tl.cdiv(last - first, BLOCK), num_stages=STAGES):
        start = tt.walk(first, last, step, BLOCK, BACKWARD)
        added = _added(
            x, counts, mask, strides, count_strides, N, b, start, end,
            C, WIDTH, BLOCK, BACKWARD, DIVIDED,
        )  # fmt: skip
        rows, so_far = sums_along(added, so_far, BACKWARD, PARTS)
        if BACKWARD:
            rows = tl.where(tt.real_tokens(mask, b, N, start, end, BLOCK)[:, None], rows, 0.0)
        else:
            rows = tt.scaled(rows, tt.shares(counts, count_strides, b, start, end, BLOCK))
        if columns is not None:
            passed += tt.by_eight(rows)
        tt.store_rows(y, rows, start, y_strides[1], end, 0, C, WIDTH)
    if columns is not None:
        tt.store_row(columns, program, tl.sum(passed, 0), C, WIDTH)
