"""The sums before each segment, or what comes from behind it, of both sides in one launch.

Letters: B batch, H heads, P features, S directions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from primal_attention.ops.dual_causal.triton_blocks import running_sums
from primal_attention.ops.gpu import device_of

_ENTRIES = 2048  # of all segments, that a program has at once


class Side(NamedTuple):
    """What is known of a side: where its sum starts, and what each segment adds to it."""

    start: Tensor | None  # [B, H, P, S]
    moments: Tensor | None  # [B, segments, H, P, S]
    parts: Tensor | None = None  # [B, segments, H, P, P]: of its Gram matrix
    gram: Tensor | None = None  # [B, H, P, P]: their sum, written


def running(
    *sides: Side, number: int, backward: bool, inverse_n: Tensor | None = None
) -> list[Tensor | None]:
    """For each of two sides, [B, segments, H, P, S]: its start, and all segments before each.

    With backward, all segments behind each; the start counts inverse_n times, [B]. None where that
    is zero; for one segment the start itself, [B, H, P, S].
    """
    if number == 1:
        return [None if side.start is None else side.start.contiguous() for side in sides]
    sides = tuple(Side(*(None if x is None else x.contiguous() for x in side)) for side in sides)
    results = [_room(side, number) for side in sides]
    shown = next((x for x in results if x is not None), None)
    if shown is not None:
        B, _, *rest = shown.shape
        size, height = torch.Size(rest).numel(), triton.next_power_of_2(number)
        gram_size = max(0 if side.gram is None else side.gram[0].numel() for side in sides)
        width = max(16, _ENTRIES // height)
        given = [
            x
            for (start, moments, *grams), result in zip(sides, results, strict=True)
            for x in (start, moments, result, *grams)
        ]
        with device_of(shown):
            running_sums[(B, -(-max(size, gram_size) // width), 2)](
                *given, inverse_n, number, size, gram_size, height, width, backward
            )
    return results


def _room(side: Side, number: int) -> Tensor | None:
    start, moments, *_ = side
    if moments is not None:
        return torch.empty_like(moments)
    return None if start is None else start.new_empty((len(start), number, *start.shape[1:]))
