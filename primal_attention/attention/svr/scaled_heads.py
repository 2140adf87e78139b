"""Heads that see their keys at different scales: the attention of Attention-SH.

Neighbouring keys and values are averaged into one: a smaller training set for the regression of a
head. Neighbours are counted among the real tokens.

Letters: B batch, N queries, T source tokens, H heads, C head dim, r tokens of a pooled one.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from primal_attention.attention.base.compaction import token_order
from primal_attention.attention.base.validation import check_sizes
from primal_attention.attention.baselines.blocks import into_blocks
from primal_attention.precision import accumulation_dtype


class KeysAndValues(NamedTuple):
    """Keys and values, and which of them are real; None where all are."""

    k: Tensor  # [B, T, H, C]
    v: Tensor  # [B, T, H, C]
    mask: Tensor | None  # [B, T]


Attend = Callable[[Tensor, KeysAndValues, slice], Tensor]
"""Outputs of queries [B, N, h, C] over their source; the slice says which heads these are."""


def check_scales(scales: Sequence[int] | None, num_heads: int) -> list[int]:
    """Return the scale of each head, 1 by default; raise unless each has a positive one."""
    scales = [1] * num_heads if scales is None else list(scales)
    if len(scales) != num_heads:
        raise ValueError(f"scales must have one entry for each of {num_heads} heads, got {scales}")
    check_sizes(**{f"scales[{head}]": scale for head, scale in enumerate(scales)})
    return scales


def default_scales(num_heads: int) -> list[int]:
    """1, 2, 4 and 8 tokens in equal shares of the heads: 1, 1, 2, 2, 4, 4, 8, 8 for eight."""
    return [2 ** (head * min(num_heads, 4) // num_heads) for head in range(num_heads)]


def attend_at_scales(scales: list[int], q: Tensor, source: KeysAndValues, attend: Attend) -> Tensor:
    """Compute outputs [B, N, H, C], with one call for neighbouring heads of equal scale."""
    packed = source
    if source.mask is not None and max(scales) > 1:
        order = token_order(source.k, source.mask)
        packed = KeysAndValues(order.pack(source.k), order.pack(source.v), order.real())
    outputs = []
    for scale, heads in _groups(scales):
        k, v, mask = source if scale == 1 else packed
        group = KeysAndValues(k[:, :, heads], v[:, :, heads], mask)
        outputs.append(attend(q[:, :, heads], pooled(group, scale), heads))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _groups(scales: list[int]) -> Iterator[tuple[int, slice]]:
    start = 0
    for scale, heads in groupby(scales):
        stop = start + len(list(heads))
        yield scale, slice(start, stop)
        start = stop


def pooled(source: KeysAndValues, scale: int) -> KeysAndValues:
    """Average each ``scale`` neighbours; the real tokens must stand at the front.

    A last block that is not full is the mean of its tokens.
    """
    if scale == 1:
        return source
    k, v, mask = source
    real = torch.ones_like(k[:1, :, 0, 0], dtype=torch.bool) if mask is None else mask
    real = into_blocks(real, scale)  # [B or 1, n, r]
    k, v = (_average(into_blocks(z, scale), real[..., None, None]) for z in (k, v))
    return KeysAndValues(k, v, None if mask is None else real.any(2))


def _average(z: Tensor, real: Tensor) -> Tensor:
    """Mean [B, n, H, C] of the real tokens of each block of z [B, n, r, H, C]."""
    total = torch.where(real, z, 0.0).sum(2, dtype=accumulation_dtype(z.dtype))
    return (total / real.sum(2).clamp(min=1)).to(z.dtype)
