"""The sum of the rows of a matrix as a fused op, and with it the gradient of an affine map.

Letters: R rows, E columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from primal_attention.ops.column_sum.linear import products
from primal_attention.ops.column_sum.triton_add_up import add_up
from primal_attention.ops.column_sum.triton_blocks import row_sum_blocks
from primal_attention.ops.gpu import device_of
from primal_attention.ops.launch import padded
from primal_attention.ops.triton_launch import DOTS
from primal_attention.precision import exact

_ROWS, _COLUMNS = 32, 128  # of a block
_FEW, _NARROW = 512, 16  # as many rows are one block of so many columns, whose sums are the total
_PROGRAMS = 528  # wanted: four for each multiprocessor, so that enough memory is under way


def takes(x: Tensor, weight: Tensor, d_y: Tensor, *options: Any) -> bool:
    """Whether the fused op is made for these dtypes and sizes."""
    return d_y.dtype in DOTS and d_y.numel() > 0


@exact
def backward(
    x: Tensor, weight: Tensor, d_y: Tensor, of_x: bool, of_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias; the first two are empty where they are not wanted."""
    rows = d_y.reshape(-1, d_y.shape[-1])
    return *products(x, weight, rows, of_x=of_x, of_weight=of_weight), column_sum(rows)


def column_sum(rows: Tensor) -> Tensor:
    """The sum over the rows of a matrix [R, E], in its dtype, added up in float32."""
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
    """The sums over each share of the rows."""
    R, E = rows.shape
    with device_of(rows):
        row_sum_blocks[(-(-R // share), -(-E // width))](
            rows, sums, rows.stride(0), R, E, share, height, width, num_warps=8
        )
