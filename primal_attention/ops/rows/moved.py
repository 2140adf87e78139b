"""Rows put in another order; the gradient puts them back.

Both directions are gathers: no row is added to another, so that nothing is atomic, and what a row
holds changes no other.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from primal_attention.ops.op import Op


def moved(
    rows: Tensor,  # [N, ...]
    there: Tensor,  # [M]: which row stands at each place; -1 for a row of zeros
    back: Tensor,  # [N]: at which place each row stands; -1 where at none
) -> Tensor:
    """The rows [M, ...] in their new places, each at one of them at most."""
    result: Tensor = _moved(rows, there, back)
    return result


def gathered(rows: Tensor, there: Tensor, back: Tensor) -> Tensor:
    """The rows in their new places."""
    there = there.view(-1, *[1] * (rows.ndim - 1))
    return rows.index_select(0, there.flatten().clamp(min=0)).masked_fill(there < 0, 0)


def _empty_rows(rows: Tensor, there: Tensor, back: Tensor) -> Tensor:
    return rows.new_empty((there.shape[0], *rows.shape[1:]))


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _gradients(ctx: Any, d_result: Tensor) -> tuple[Tensor, None, None]:
    there, back = ctx.saved_tensors
    return _moved(d_result, back, there), None, None


_moved = Op(
    "moved",
    gathered,
    _empty_rows,
    gradients=_gradients,
    save=_save,
    composition=gathered,
)
