"""Sums of the parts that programs wrote apart: several in one launch, in the same order every time.

Letters: B batch, N tokens, H heads, R rows, C columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from primal_attention.ops.column_sum.triton_blocks import add_up_blocks
from primal_attention.ops.gpu import device_of
from primal_attention.ops.launch import empty_rows
from primal_attention.ops.triton_launch import Shares, constant

_AT_ONCE = {4: 4, 32: 32, 128: 64}  # parts that a program reads, up to so many of them; else 256
_MANY = 128  # parts
_READ = 512  # entries of a warp at once: a program waits for each of its reads


class Layout(NamedTuple):
    """Of a sum: where its parts lie, and its total."""

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
    """Memory for the sums of the programs over z [B, N, H, C], added up on leaving.

    A total is [B, H, R, C]; [H, R, C], where it runs over the sequences too; or [C], over the heads
    too. What one program has all of it writes to the total itself.
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
    """Memory for the parts, [number, ...]; None where the total is the only one."""
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
    """Up to four totals, each with its parts, [number, ...]; None for what is not wanted.

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
    with device_of(tensors[0]):
        add_up_blocks[(blocks, len(wanted), groups)](
            *tensors, *[None] * (2 * missing), *numbers,
            *map(tuple, layouts + [_MISSING] * missing), _READ * warps, overlaps,
            num_warps=warps, **({"launch_pdl": True} if overlaps else {}),
        )  # fmt: skip


@cache
def _overlaps(device: torch.device) -> bool:
    """Whether a launch may begin before the one ahead of it is over."""
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
