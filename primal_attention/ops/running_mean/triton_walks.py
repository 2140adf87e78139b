"""The walks of the fused running mean over the blocks of one segment, either way.

Letters: B batch, N tokens, H heads, C head dim, n tokens of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from primal_attention.ops.triton_kernel import launched
from primal_attention.ops.triton_maps import (
    by_eight,
    load_rows,
    real_tokens,
    scaled,
    sequence_of,
    store_rows,
)
from primal_attention.ops.triton_sums import (
    as_carry,
    carried,
    row_of,
    share_of_tokens,
    shares,
    store_row,
    sums_along,
    walk,
)


@triton.jit
def _added(
    x, counts, mask, strides, count_strides, N, b, start, end,
    C: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    BACKWARD: tl.constexpr, DIVIDED: tl.constexpr,
):  # fmt: skip
    """What the tokens of a block add to the carry, [n, C]: themselves, or their gradients by t."""
    taken = real_tokens(None if BACKWARD else mask, b, N, start, end, BLOCK)
    rows = load_rows(x, start, strides[1], taken, 0, C, WIDTH)
    if BACKWARD and not DIVIDED:
        return scaled(rows, shares(counts, count_strides, b, start, end, BLOCK))
    else:
        return rows


@launched
@triton.jit
def add_up(
    x, counts, mask, strides, count_strides, N, H, number, tokens, sums,
    C: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    BACKWARD: tl.constexpr, DIVIDED: tl.constexpr, STAGES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The sum of what the tokens of each segment add to the carry.

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


@launched
@triton.jit
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
