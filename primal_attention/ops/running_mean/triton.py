"""The running mean as a fused op: each segment of a sequence is walked once, in either direction.

Letters: B batch, N tokens, H heads, C head dim.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from primal_attention.ops import launch
from primal_attention.ops.launch import Config
from primal_attention.ops.triton_sums import (
    carried,
    columns_of,
    counts_of,
    load_rows,
    real_tokens,
    row_of,
    row_of_tokens,
    sequence_of,
    share_of_tokens,
    store_row,
    store_rows,
    sums_along,
    walk,
)

CONFIGS = {  # by the padded head dim
    16: Config(block=64, num_warps=2, num_stages=3),
    32: Config(block=64, num_warps=2, num_stages=3),
    64: Config(block=64, num_warps=4, num_stages=3),
    128: Config(block=64, num_warps=4, num_stages=3),
    256: Config(block=32, num_warps=4, num_stages=2),
}


def takes(z: Tensor, *options: Any) -> bool:
    """Whether the fused op is made for this dtype and head dim."""
    return z.dtype in launch.PRECISION and launch.padded(z.shape[-1]) in CONFIGS and z.numel() > 0


def forward(
    z: Tensor, before: Tensor | None, counts: Tensor, token_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Means, and the sum after the last token."""
    options = {"BACKWARD": False, "PARTS": launch.PARTS[z.dtype]}
    return _walk(z, before, counts, token_mask, options)


def backward(
    d_mean: Tensor, d_total: Tensor, counts: Tensor, token_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradients of the tokens and of the sum before them."""
    options = {"BACKWARD": True, "PARTS": launch.PARTS_OF_GRADIENT[d_mean.dtype]}
    return _walk(d_mean, d_total, counts, token_mask, options)


def _walk(
    x: Tensor,
    carry: Tensor | None,
    counts: Tensor,
    token_mask: Tensor | None,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    B, N, H, C = x.shape
    y, total = torch.empty_like(x), x.new_empty((B, H, C), dtype=torch.float32)
    x, mask = launch.contiguous_rows(x), launch.mask_bytes(token_mask)
    config = CONFIGS[launch.padded(C)]
    segments = launch.divide(x, config.block)
    tensors = x, counts, mask, x.stride(), counts.stride(), N, H, segments.number, segments.tokens
    options |= {"C": C, "WIDTH": launch.padded(C), "BLOCK": config.block}
    options |= {"num_warps": config.num_warps, "num_stages": config.num_stages}
    grid = (B * segments.number * H,)
    sums = None
    if segments.number > 1:
        sums = x.new_empty((B, segments.number, H, C), dtype=torch.float32)
        _sums_kernel[grid](*tensors, sums, **options)
    carry = None if carry is None else carry.contiguous()
    _walk_kernel[grid](*tensors, sums, carry, y, total, y.stride(), **options)
    return y, total


@triton.jit
def _added(
    x, counts, mask, stride, count_stride, start, last,
    C: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """What the tokens of a block add to the carry, [n, C]: themselves, or their gradients by t."""
    real = real_tokens(None if BACKWARD else mask, start, last, BLOCK)
    rows = load_rows(x, start, stride, columns_of(real, C, WIDTH), BLOCK, WIDTH)
    if BACKWARD:
        rows = rows.to(tl.float32) / counts_of(counts, count_stride, start, last, BLOCK)[:, None]
    return rows


@triton.jit
def _sums_kernel(
    x, counts, mask, strides, count_strides, N, H, number, tokens, sums,
    C: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    BACKWARD: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The sum of what the tokens of each segment add to the carry."""
    b, h, first, last = share_of_tokens(N, H, number, tokens)
    x = sequence_of(x, strides, b, h)
    counts, mask = row_of_tokens(counts, count_strides[0], b), row_of_tokens(mask, N, b)
    total = tl.zeros([BLOCK, WIDTH], tl.float32)
    for step in range(tl.cdiv(last - first, BLOCK)):
        start = walk(first, last, step, BLOCK, BACKWARD)
        total += _added(
            x, counts, mask, strides[1], count_strides[1], start, last, C, WIDTH, BLOCK, BACKWARD
        ).to(tl.float32)
    store_row(sums, tl.program_id(0), tl.sum(total, 0), C, WIDTH)


@triton.jit
def _walk_kernel(
    x, counts, mask, strides, count_strides, N, H, number, tokens, sums, carry, y, total, y_strides,
    C: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    BACKWARD: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Means of one segment; in the other direction the gradients of its tokens."""
    b, h, first, last = share_of_tokens(N, H, number, tokens)
    x, y = sequence_of(x, strides, b, h), sequence_of(y, y_strides, b, h)
    counts, mask = row_of_tokens(counts, count_strides[0], b), row_of_tokens(mask, N, b)
    so_far = carried(sums, b, h, H, number, C, WIDTH, BACKWARD)
    so_far += row_of(carry, b * H + h, C, WIDTH)
    for step in range(tl.cdiv(last - first, BLOCK)):
        start = walk(first, last, step, BLOCK, BACKWARD)
        added = _added(
            x, counts, mask, strides[1], count_strides[1], start, last, C, WIDTH, BLOCK, BACKWARD
        )
        rows = so_far[None, :] + sums_along(added, BACKWARD, PARTS)
        so_far += tl.sum(added.to(tl.float32), 0)
        if BACKWARD:
            rows = tl.where(real_tokens(mask, start, last, BLOCK)[:, None], rows, 0.0)
        else:
            rows /= counts_of(counts, count_strides[1], start, last, BLOCK)[:, None]
        exists = columns_of(real_tokens(None, start, last, BLOCK), C, WIDTH)
        store_rows(y, rows, start, y_strides[1], exists)
    ends = first == 0 if BACKWARD else last == N
    if ends:
        store_row(total, b * H + h, so_far, C, WIDTH)
