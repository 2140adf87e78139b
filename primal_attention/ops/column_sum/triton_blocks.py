"""The fused passes of sums: over the rows of a matrix, and over parts that programs wrote apart.

They add up in the same order every time.

Letters: R rows, E columns.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from primal_attention.ops.triton_kernel import launched


@launched
@triton.jit(do_not_specialize=["R", "share"])
def row_sum_blocks(
    rows, parts, stride, R, E, share, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """The sum of some columns over a share of the rows."""
    program = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    first = program * share
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(first, tl.minimum(first + share, R), ROWS):
        r = start + tl.arange(0, ROWS)
        exists = (r < R)[:, None] & (c < E)[None, :]
        sums += tl.load(rows + r[:, None] * stride + c[None, :], mask=exists, other=0.0).to(
            tl.float32
        )
    tl.store(parts + program * E + c, tl.sum(sums, 0).to(parts.dtype.element_ty), mask=c < E)


@launched
@triton.jit(do_not_specialize=["number_0", "number_1", "number_2", "number_3"])
def add_up_blocks(
    parts_0, total_0, parts_1, total_1, parts_2, total_2, parts_3, total_3,
    number_0, number_1, number_2, number_3, layout_0, layout_1, layout_2, layout_3,
    READ: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A block of one of the totals, from so many entries of its parts at once.

    It may be launched while those that write the parts are still at work, and waits for them.
    """
    if OVERLAPS:
        gdc_wait()
    pair = tl.program_id(1)
    if pair == 0:
        _add_up(parts_0, total_0, number_0, layout_0, READ)
    elif pair == 1:
        _add_up(parts_1, total_1, number_1, layout_1, READ)
    elif pair == 2:
        _add_up(parts_2, total_2, number_2, layout_2, READ)
    else:
        _add_up(parts_3, total_3, number_3, layout_3, READ)


@triton.jit
def _add_up(parts, total, number, layout, READ: tl.constexpr):
    """Of one group of entries; the layout is a `triton_add_up.Layout`."""
    if parts is not None:
        _, size, groups, of_group, of_part, columns, of_row, of_column = layout
        AT_ONCE: tl.constexpr = layout[0]
        BLOCK: tl.constexpr = READ // AT_ONCE
        group = tl.program_id(2).to(tl.int64)
        place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = (place < size) & (group < groups)
        parts, total = parts + group * of_group, total + group * size
        sums = tl.zeros([AT_ONCE, BLOCK], tl.float32)
        for start in range(0, number, AT_ONCE):
            part = start + tl.arange(0, AT_ONCE)
            exists = (part < number)[:, None] & inside[None, :]
            places = parts + part.to(tl.int64)[:, None] * of_part + place[None, :]
            sums += tl.load(places, mask=exists, other=0.0)
        places = total + place // columns * of_row + place % columns * of_column
        tl.store(places, tl.sum(sums, 0).to(total.dtype.element_ty), mask=inside)
