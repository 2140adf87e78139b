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
from primal_attention.ops import triton_tiles as tiles
from primal_attention.ops.launch import Config

CONFIGS = {  # by the padded head dim
    16: Config(block=64, num_warps=2, num_stages=3),
    32: Config(block=64, num_warps=2, num_stages=3),
    64: Config(block=64, num_warps=4, num_stages=3),
    128: Config(block=64, num_warps=4, num_stages=3),
    256: Config(block=32, num_warps=4, num_stages=2),
}


def takes(z: Tensor, *options: Any) -> bool:
    """Whether the fused op is made for this dtype and head dim."""
    return z.dtype in launch.DTYPES and launch.padded(z.shape[-1]) in CONFIGS and z.numel() > 0


def forward(
    z: Tensor, before: Tensor | None, counts: Tensor, token_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Means, and the sum after the last token."""
    parts = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}[z.dtype]
    return _walk(z, before, counts, token_mask, BACKWARD=False, PARTS=parts)


def backward(
    d_mean: Tensor, d_total: Tensor, counts: Tensor, token_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradients of the tokens and of the sum before them."""
    parts = {torch.bfloat16: 2, torch.float16: 2, torch.float32: 3}[d_mean.dtype]
    return _walk(d_mean, d_total, counts, token_mask, BACKWARD=True, PARTS=parts)


def _walk(
    x: Tensor, carry: Tensor | None, counts: Tensor, token_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    B, N, H, C = x.shape
    y, total = torch.empty_like(x), x.new_empty((B, H, C), dtype=torch.float32)
    x, mask = launch.contiguous_rows(x), launch.mask_bytes(token_mask, counts)
    width = launch.padded(C)
    config = CONFIGS[width]
    segments = launch.divide(x, config.block)
    sums = x.new_empty((B, segments.number, H, C), dtype=torch.float32)
    rest: dict[str, Any] = dict(
        H=H,
        number=segments.number,
        length=segments.length,
        C=C,
        WIDTH=width,
        BLOCK=config.block,
        MASKED=token_mask is not None,
        num_warps=config.num_warps,
        STAGES=config.num_stages,
    )
    strides = x.stride()[:3], counts.stride(), mask.stride()[:2]
    grid = (B * segments.number * H,)
    if segments.number > 1:
        backward = options["BACKWARD"]
        _sums_kernel[grid](x, counts, mask, sums, strides, N, BACKWARD=backward, **rest)
    before = sums if carry is None else carry.contiguous()
    outputs, y_strides, has_carry = (y, total), y.stride()[:3], carry is not None
    _walk_kernel[grid](
        x, counts, mask, sums, strides, N, before, *outputs, y_strides, CARRY=has_carry, **rest,
        **options,
    )  # fmt: skip
    return y, total


@triton.jit
def _added(
    x, counts, mask, strides, b, h, start, N,
    C: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    MASKED: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """What each token of a block adds to the carry, [n, WIDTH]: itself, or its gradient by t."""
    if BACKWARD:
        real = start + tl.arange(0, BLOCK) < N
    else:
        real = tiles.real_rows(mask, strides[2], b, start, N, BLOCK, MASKED)
    keep = real[:, None] & (tl.arange(0, WIDTH) < C)[None, :]
    added = tiles.load_tile(tiles.at(x, strides[0], b, start, h), strides[0][1], keep, BLOCK, WIDTH)
    if BACKWARD:
        t = tiles.counts_of(counts, strides[1], b, start, N, BLOCK)
        added = added.to(tl.float32) / t[:, None]
    return added


@triton.jit
def _sums_kernel(
    x, counts, mask, sums, strides, N, H, number, length,
    C: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    MASKED: tl.constexpr, BACKWARD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The sum of what the tokens of each segment add to the carry."""
    b, segment, h = tiles.place(number, H)
    total = tl.zeros([BLOCK, WIDTH], tl.float32)
    first = segment * length
    last = tl.minimum(first + length, tl.cdiv(N, BLOCK))
    for block in tl.range(first, last, num_stages=STAGES):
        total += _added(
            x, counts, mask, strides, b, h, block * BLOCK, N, C, WIDTH, BLOCK, MASKED, BACKWARD
        ).to(tl.float32)
    columns = tl.arange(0, WIDTH)
    place = sums + ((b * number + segment) * H + h) * C + columns
    tl.store(place, tl.sum(total, 0), mask=columns < C)


@triton.jit
def _walk_kernel(
    x, counts, mask, sums, strides, N, before, y, total, y_strides, H, number, length,
    C: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    MASKED: tl.constexpr, BACKWARD: tl.constexpr, CARRY: tl.constexpr, PARTS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Means of one segment; in the other direction the gradients of its tokens."""
    b, segment, h = tiles.place(number, H)
    columns = tl.arange(0, WIDTH)
    carry = tiles.carried(sums, b, segment, h, number, H, C, WIDTH, BACKWARD)
    if CARRY:
        carry += tl.load(before + (b * H + h) * C + columns, mask=columns < C, other=0.0)
    first = segment * length
    last = tl.minimum(first + length, tl.cdiv(N, BLOCK))
    for step in tl.range(0, last - first, num_stages=STAGES):
        start = (last - 1 - step if BACKWARD else first + step) * BLOCK
        added = _added(x, counts, mask, strides, b, h, start, N, C, WIDTH, BLOCK, MASKED, BACKWARD)
        walked = carry[None, :] + tiles.sums_along(added, BLOCK, BACKWARD, PARTS)
        carry += tl.sum(added.to(tl.float32), 0)
        if BACKWARD:
            real = tiles.real_rows(mask, strides[2], b, start, N, BLOCK, MASKED)
            walked = tl.where(real[:, None], walked, 0.0)
        else:
            walked /= tiles.counts_of(counts, strides[1], b, start, N, BLOCK)[:, None]
        keep = (start + tl.arange(0, BLOCK) < N)[:, None] & (columns < C)[None, :]
        tiles.store_tile(tiles.at(y, y_strides, b, start, h), y_strides[1], walked, keep,
                         BLOCK, WIDTH)  # fmt: skip
    if segment == (0 if BACKWARD else number - 1):
        tl.store(total + (b * H + h) * C + columns, carry, mask=columns < C)
