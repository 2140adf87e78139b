"""Sums of the rows of a matrix, and of parts that programs wrote apart, always in the same order.

Letters: B batch, N tokens, H heads, R rows, C and E columns.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from primal_attention.ops.triton.launch import Shares, constant, empty_rows, padded
from primal_attention.ops.triton.launcher import launched

_ROWS, _COLUMNS = 32, 128  # of a block
_FEW, _NARROW = 512, 16  # as many rows are one block of so many columns, whose sums are the total
_PROGRAMS = 528  # wanted: four for each multiprocessor, so that enough memory is under way
_AT_ONCE = {4: 4, 32: 32, 128: 64}  # parts that a program reads, up to so many of them; else 256
_MANY = 128  # parts
_READ = 512  # entries of a warp at once: a program waits for each of its reads


@launched("R", "share")
def row_sum_blocks(
    rows, parts, stride, R, E, share, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Sum some columns over a share of the rows."""
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


@launched("number_0", "number_1", "number_2", "number_3")
def add_up_blocks(
    parts_0, total_0, parts_1, total_1, parts_2, total_2, parts_3, total_3,
    number_0, number_1, number_2, number_3, layout_0, layout_1, layout_2, layout_3,
    READ: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Add up a block of one of the totals; it may be launched early, and waits for its parts."""
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
    """Add up one group of entries; the layout is a `Layout`."""
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


def column_sum(rows: Tensor) -> Tensor:
    """Sum the rows of a matrix [R, E] in float32; the result has its dtype."""
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    R, E = rows.shape
    total = rows.new_empty(E)
    if R <= _FEW:
        _sum_blocks(rows, total, R, padded(R), _NARROW)
        return total
    share = -(-R // max(1, _PROGRAMS // -(-E // _COLUMNS)) // _ROWS) * _ROWS
    parts = rows.new_empty((-(-R // share), E), dtype=torch.float32)
    _sum_blocks(rows, parts, share, _ROWS, _COLUMNS)
    add_up((parts, total))
    return total


def _sum_blocks(rows: Tensor, sums: Tensor, share: int, height: int, width: int) -> None:
    """Sum over each share of the rows."""
    R, E = rows.shape
    row_sum_blocks[(-(-R // share), -(-E // width))](
        rows, sums, rows.stride(0), R, E, share, height, width, num_warps=8
    )


class Layout(NamedTuple):
    """Places of the parts of a sum, and of its total."""

    at_once: Any  # parts that a program reads
    size: int  # entries of a group
    groups: int  # of entries that lie together in a part
    of_group: int  # strides of the parts
    of_part: int
    columns: int  # of the total
    of_row: int  # strides of the total
    of_column: int


_MISSING = Layout(0, 0, 0, 0, 0, 1, 0, 0)


@contextmanager
def summed(z: Tensor, shares: Shares, *totals: Tensor | None) -> Iterator[list[Tensor | None]]:
    """Allocate the sums of the programs over z [B, N, H, C]; add them up on leaving.

    A total is [B, H, R, C]; [H, R, C], over the sequences too; or [C], over the heads too.
    """
    contiguous = [
        total if total is None or total.is_contiguous() else empty_rows(total) for total in totals
    ]
    parts = [_parts(total, z, shares) for total in contiguous]
    pairs = list(zip(parts, contiguous, strict=True))
    yield [total if part is None else part for part, total in pairs]
    add_up(*pairs)
    for total, written in zip(totals, contiguous, strict=True):
        if total is not None and written is not None and written is not total:
            total.copy_(written)


def _parts(total: Tensor | None, z: Tensor, shares: Shares) -> Tensor | None:
    """Allocate the parts, [number, ...]; None where the total is the only one."""
    if total is None:
        return None
    B, _, H, _ = z.shape
    number = {4: shares.splits, 3: shares.programs // H, 1: shares.programs}[total.ndim]
    if number == 1:
        return None
    if total.ndim == 4:  # the parts of a sequence are neighbours
        shape = (B, number, *total.shape[1:])
        return total.new_empty(shape, dtype=torch.float32).transpose(0, 1)
    return total.new_empty((number, *total.shape), dtype=torch.float32)


def add_up(*sums: tuple[Tensor | None, Tensor | None]) -> None:
    """Add up to four totals, each from its parts, [number, ...]; None for what is not wanted.

    A total is contiguous or a matrix [R, C]. Parts are contiguous, but for their first two axes.
    """
    wanted = [(parts, total) for parts, total in sums if parts is not None and total is not None]
    if not wanted:
        return
    missing = 4 - len(wanted)
    numbers = [len(parts) for parts, _ in wanted] + [0] * missing
    # Many parts make few programs, which are to read the more at once.
    warps = 16 if max(numbers) > _MANY else 4
    layouts = [_layout(*pair) for pair in wanted]
    blocks = max(-(-each.size * each.at_once.value // (_READ * warps)) for each in layouts)
    groups = max(each.groups for each in layouts)
    tensors = [tensor for pair in wanted for tensor in pair]
    overlaps = _overlaps(tensors[0].device)
    add_up_blocks[(blocks, len(wanted), groups)](
        *tensors, *[None] * (2 * missing), *numbers, *map(tuple, layouts + [_MISSING] * missing),
        _READ * warps, overlaps, num_warps=warps, **({"launch_pdl": True} if overlaps else {}),
    )  # fmt: skip


@cache
def _overlaps(device: torch.device) -> bool:
    """Return whether a launch may begin before the one ahead of it is over."""
    on_gpu = device.type == "cuda" and torch.version.hip is None
    return on_gpu and torch.cuda.get_device_capability(device) >= (9, 0)


def _layout(parts: Tensor, total: Tensor) -> Layout:
    number = len(parts)
    at_once = constant(next((some for most, some in _AT_ONCE.items() if number <= most), 256))
    if not parts.is_contiguous():
        groups, strides = len(total), parts.stride()
        return Layout(at_once, total[0].numel(), groups, strides[1], strides[0], 1, 1, 0)
    size = total.numel()
    if total.is_contiguous():
        return Layout(at_once, size, 1, 0, size, 1, 1, 0)
    return Layout(at_once, size, 1, 0, size, total.shape[1], *total.stride())
