r"""The running mean in pieces, with its own backward pass: nothing of the sequence is kept.

The sum up to a piece is carried forward, and in the backward pass what the means from a piece on
pass to every earlier token is carried backward:

$dz_t = d\,\mathrm{total} + \sum_{\tau \ge t} d\bar z_\tau / \tau$ at the real tokens.

Letters: B batch, N tokens, H heads, C head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from primal_attention.ops.chunks import masked, token_chunks
from primal_attention.ops.launch import empty_rows
from primal_attention.ops.op import Op
from primal_attention.ops.running_mean import reference
from primal_attention.ops.running_mean.reference import RunningMean
from primal_attention.precision import accumulate, accumulation_dtype, exact

_BLOCK = 16  # tokens


def running_mean(
    z: Tensor,  # [B, N, H, C]
    counts: Tensor,  # [B, N], from token_counts
    *,
    token_mask: Tensor | None = None,
    before: Tensor | None = None,  # [B, H, C]: the sum over earlier tokens
) -> RunningMean:
    """The same values as the reference."""
    return RunningMean(*_forward(z, before, counts, token_mask))


def _pieces(z: Tensor, counts: Tensor, token_mask: Tensor | None) -> Iterator[Any]:
    """Slices of the tokens, with their counts [B, n, 1, 1] and their mask."""
    for piece in token_chunks(z):
        mask = None if token_mask is None else token_mask[:, piece]
        yield piece, counts[:, piece].clamp(min=1)[:, :, None, None], mask


@exact
def forward_in_pieces(
    z: Tensor, before: Tensor | None, counts: Tensor, token_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Means, and the sum after the last token."""
    mean, total = _empty_outputs(z)
    total.zero_() if before is None else total.copy_(before)
    for piece, t, mask in _pieces(z, counts, token_mask):
        sums = running_sums(masked(accumulate(z[:, piece]), mask), total)
        total.copy_(sums[:, -1])
        mean[:, piece] = sums.div_(t)
    return mean, total


@exact
def backward_in_pieces(
    d_mean: Tensor, d_total: Tensor | None, counts: Tensor, token_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradients of the tokens and of the sum before them."""
    dz, d_before = _empty_outputs(d_mean)
    d_before.zero_() if d_total is None else d_before.copy_(d_total)
    for piece, t, mask in reversed(list(_pieces(d_mean, counts, token_mask))):
        sums = running_sums(accumulate(d_mean[:, piece]) / t, d_before, reverse=True)
        d_before.copy_(sums[:, 0])
        dz[:, piece] = masked(sums, mask)
    return dz, d_before


def running_sums(
    values: Tensor, start: Tensor, room: Tensor | None = None, *, reverse: bool = False
) -> Tensor:
    """The start and the values [B, n, H, C] up to each token, or from each on, added up.

    They are written to the room that is given for them, which may be that of the values. Blocks of
    tokens are walked through side by side: along this axis ``cumsum`` is slow on a CPU.
    """
    if values.shape[1] % _BLOCK:
        sums = values.flip(1).cumsum(1).flip(1) if reverse else values.cumsum(1)
        sums += start[:, None]
        return sums if room is None else room.copy_(sums)
    if room is None:
        room = torch.empty_like(values, memory_format=torch.contiguous_format)
    blocks = _in_blocks(room)  # [B, blocks, tokens of a block, H, C]
    pairs = zip(_in_blocks(values).unbind(2), blocks.unbind(2), strict=True)
    first, *steps = reversed(list(pairs)) if reverse else pairs
    first[1].copy_(first[0])
    for (_, before), (value, here) in pairwise((first, *steps)):
        torch.add(before, value, out=here)
    blocks += _before_each(steps[-1][1], start, reverse=reverse)[:, :, None]
    return room


def _in_blocks(values: Tensor) -> Tensor:
    B, n, H, C = values.shape
    return values.view(B, n // _BLOCK, _BLOCK, H, C)


def _before_each(totals: Tensor, start: Tensor, *, reverse: bool) -> Tensor:
    """The start and the totals [B, blocks, H, C] of the earlier blocks, or later ones, added up."""
    totals = totals.flip(1) if reverse else totals
    sums = torch.cat((start[:, None], totals), 1).cumsum(1)[:, :-1]
    return sums.flip(1) if reverse else sums


def _empty_outputs(z: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    B, _, H, C = z.shape
    return empty_rows(z), z.new_empty((B, H, C), dtype=accumulation_dtype(z.dtype))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, before, counts, token_mask = inputs
    ctx.has_before = before is not None
    ctx.save_for_backward(counts, token_mask)


def _gradients(ctx: Any, d_mean: Tensor, d_total: Tensor) -> tuple[Tensor | None, ...]:
    dz, d_before = _backward(d_mean, d_total, *ctx.saved_tensors)
    return dz, d_before if ctx.has_before else None, None, None


def _gradients_of_gradients(
    ctx: Any, d_dz: Tensor, d_d_before: Tensor
) -> tuple[Tensor | None, ...]:
    """The op is linear, so the transpose of its transpose is the op itself."""
    return (*_forward(d_dz, d_d_before, *ctx.saved_tensors), None, None)


def _composition(
    z: Tensor, before: Tensor | None, counts: Tensor, token_mask: Tensor | None
) -> RunningMean:
    return reference.running_mean(z, counts, token_mask=token_mask, before=before)


_forward = Op(
    "running_mean_forward",
    forward_in_pieces,
    _empty_outputs,
    fused="primal_attention.ops.running_mean.triton.forward",
    gradients=_gradients,
    save=_save,
    composition=_composition,
)
_backward = Op(
    "running_mean_backward",
    backward_in_pieces,
    _empty_outputs,
    fused="primal_attention.ops.running_mean.triton.backward",
    gradients=_gradients_of_gradients,
    save=_save,
    composition=reference.running_mean_gradients,
)
