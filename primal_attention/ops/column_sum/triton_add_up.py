"""Sums of the parts that programs wrote apart: several in one launch, in the same order every time.

Letters: R rows, C columns.
"""

from __future__ import annotations

from torch import Tensor

from primal_attention.ops.column_sum.triton_blocks import BLOCK, add_up_blocks
from primal_attention.ops.gpu import device_of

_FEW = 128  # parts, that few reads take


def add_up(*sums: tuple[Tensor | None, Tensor | None]) -> None:
    """Up to four totals, each with its parts, [number, ...]; None for what is not wanted.

    A total is contiguous or a matrix [R, C].
    """
    wanted = [(parts, total) for parts, total in sums if parts is not None and total is not None]
    if not wanted:
        return
    missing = 4 - len(wanted)
    layouts = [_layout(total) for _, total in wanted] + [(0, 1, 0, 0)] * missing
    numbers = [len(parts) for parts, _ in wanted] + [0] * missing
    blocks = -(-max(size for size, *_ in layouts) // BLOCK.value)
    tensors = [tensor for pair in wanted for tensor in pair]
    with device_of(tensors[0]):
        add_up_blocks[(blocks, len(wanted))](
            *tensors, *[None] * (2 * missing), *numbers, *layouts, **_sizes(max(numbers))
        )


def _sizes(number: int) -> dict[str, int]:
    """Of many parts more are read at once: a program waits for each of its reads."""
    return {"PARTS": 256, "num_warps": 16} if number > _FEW else {"PARTS": 64, "num_warps": 4}


def _layout(total: Tensor) -> tuple[int, int, int, int]:
    """Entries, columns, and the strides of rows and columns."""
    if total.is_contiguous():
        return total.numel(), 1, 1, 0
    return total.numel(), total.shape[1], total.stride(0), total.stride(1)
