"""The walks of the fused running mean over the blocks of one segment, either way.

Letters: B batch, N tokens, H heads, C head dim, n tokens of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from primal_attention.ops.triton_kernel import launched
from primal_attention.ops.triton_sums import (
    carried,
    columns_of,
    counted,
    existing,
    load_rows,
    real_tokens,
    row_of,
    sequence_of,
    share_of_tokens,
    shares,
    store_row,
    store_rows,
    sums_along,
    walk,
)


@triton.jit
def _added(
    x, counts, mask, strides, count_strides, N, b, start, last,
    C: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    BACKWARD: tl.constexpr, DIVIDED: tl.constexpr,
):  # fmt: skip
    """What the tokens of a block add to the carry, [n, C]: themselves, or their gradients by t."""
    if BACKWARD and not DIVIDED:
        keep = columns_of(existing(start, last, BLOCK), C, WIDTH)
        share = shares(counts, count_strides, b, start, last, BLOCK)
        return load_rows(x, start, strides[1], keep, BLOCK, WIDTH).to(tl.float32) * share
    elif BACKWARD:
        keep = columns_of(existing(start, last, BLOCK), C, WIDTH)
        return load_rows(x, start, strides[1], keep, BLOCK, WIDTH)
    else:
        keep = columns_of(real_tokens(mask, b, N, start, last, BLOCK), C, WIDTH)
        return load_rows(x, start, strides[1], keep, BLOCK, WIDTH)


@triton.jit
def _by_sixteen(rows):
    """Sums of the rows [n, C] that are sixteen apart: those that one thread has."""
    groups = tl.reshape(rows.to(tl.float32), [rows.shape[0] // 16, 16, rows.shape[1]])
    return tl.sum(groups, 0)


@launched
@triton.jit
def add_up(
    x, counts, mask, strides, count_strides, N, H, number, tokens, sums,
    C: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    BACKWARD: tl.constexpr, DIVIDED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The sum of what the tokens of each segment add to the carry."""
    program = tl.program_id(0)
    b, h, first, last = share_of_tokens(program, N, H, number, tokens)
    x = sequence_of(x, strides, b, h)
    total = tl.zeros([BLOCK, WIDTH], tl.float32)
    for step in tl.range(0, tl.cdiv(last - first, BLOCK), num_stages=STAGES):
        start = walk(first, last, step, BLOCK, BACKWARD)
        total += _added(
            x, counts, mask, strides, count_strides, N, b, start, last,
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
):  # fmt: skip
    """Means of one segment; in the other direction the gradients of its tokens.

    What the means of a segment pass to the sum of all tokens' gradients is written to its row of
    columns, where there are any: t times what they pass to each.
    """
    program = tl.program_id(0)
    b, h, first, last = share_of_tokens(program, N, H, number, tokens)
    x, y = sequence_of(x, strides, b, h), sequence_of(y, y_strides, b, h)
    so_far = carried(sums, program, b, h, H, number, C, WIDTH, BACKWARD)
    so_far += row_of(carry, b * H + h, C, WIDTH)
    passed = tl.zeros([16, WIDTH], tl.float32)
    for step in tl.range(0, tl.cdiv(last - first, BLOCK), num_stages=STAGES):
        start = walk(first, last, step, BLOCK, BACKWARD)
        added = _added(
            x, counts, mask, strides, count_strides, N, b, start, last,
            C, WIDTH, BLOCK, BACKWARD, DIVIDED,
        )  # fmt: skip
        if columns is not None:
            t = counted(counts, count_strides, b, start, last, BLOCK)
            passed += _by_sixteen(added.to(tl.float32) * t[:, None])
        grown = so_far + tl.sum(_by_sixteen(added), 0)
        rows = so_far[None, :] + sums_along(added, BACKWARD, PARTS)
        so_far = grown
        if BACKWARD:
            rows = tl.where(real_tokens(mask, b, N, start, last, BLOCK)[:, None], rows, 0.0)
        else:
            rows *= shares(counts, count_strides, b, start, last, BLOCK)
        keep = columns_of(existing(start, last, BLOCK), C, WIDTH)
        store_rows(y, rows, start, y_strides[1], keep)
    if columns is not None:
        store_row(columns, program, tl.sum(passed, 0), C, WIDTH)
    ends = first == 0 if BACKWARD else last == N
    if ends:
        store_row(total, b * H + h, so_far, C, WIDTH)
