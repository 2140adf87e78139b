"""The sums before each segment, or what comes from behind it, of both sides in one launch.

Letters: B batch, H heads, P features, S directions.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from primal_attention.ops.dual_causal.triton_blocks import running_sums
from primal_attention.ops.triton_launch import device_of

_ENTRIES = 2048  # of all segments, that a program has at once

Side = tuple[Tensor | None, Tensor | None]  # [B, H, P, S] where it starts; [B, segments, H, P, S]


def running(
    *sides: Side, number: int, backward: bool, inverse_n: Tensor | None = None
) -> list[Tensor | None]:
    """For each of two sides, [B, segments, H, P, S]: its start, and all segments before each.

    With backward, all segments behind each; the start counts inverse_n times, [B]. None where that
    is zero; for one segment the start itself, [B, H, P, S].
    """
    if number == 1:
        return [None if start is None else start.contiguous() for start, _ in sides]
    pairs = [[None if x is None else x.contiguous() for x in side] for side in sides]
    results = [_room(start, moments, number) for start, moments in pairs]
    shown = next((x for x in results if x is not None), None)
    if shown is not None:
        B, _, *rest = shown.shape
        size, height = torch.Size(rest).numel(), triton.next_power_of_2(number)
        width = max(16, _ENTRIES // height)
        given = [x for pair, y in zip(pairs, results, strict=True) for x in (*pair, y)]
        with device_of(shown):
            running_sums[(B, -(-size // width), 2)](
                *given, inverse_n, number, size, height, width, backward
            )
    return results


def _room(start: Tensor | None, moments: Tensor | None, number: int) -> Tensor | None:
    if moments is not None:
        return torch.empty_like(moments)
    return None if start is None else start.new_empty((len(start), number, *start.shape[1:]))
