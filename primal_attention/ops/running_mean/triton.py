"""The running mean as a fused op: each segment of a sequence is walked once, in either direction.

Letters: B batch, N tokens, H heads, C head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from primal_attention.ops import launch
from primal_attention.ops.column_sum import triton_add_up
from primal_attention.ops.launch import Config, Segments
from primal_attention.ops.running_mean.reference import token_counts
from primal_attention.ops.running_mean.triton_walks import add_up, walk_along
from primal_attention.ops.triton_launch import count_strides, strides

CONFIGS = {  # by the padded head dim
    16: Config(block=64, num_warps=2, num_stages=3),
    32: Config(block=64, num_warps=2, num_stages=3),
    64: Config(block=64, num_warps=4, num_stages=3),
    128: Config(block=64, num_warps=8, num_stages=3),
    256: Config(block=32, num_warps=4, num_stages=2),
}
# Programs that keep the memory busy, two for each multiprocessor, with several blocks under way in
# each. Where sequences and heads are fewer, segments of them are walked, at the price of a pass for
# their sums.
ENOUGH = 256
# In bfloat16, where sequences and heads are so many programs that one block under way in each is
# enough, and each walks over all tokens.
MANY = 512
ONE_SEGMENT = {64: Config(block=32, num_warps=2, num_stages=1)}
# Registers of a thread in bfloat16, so that all programs are under way at once.
REGISTERS = {64: 128}


Known = tuple[Segments, Tensor]  # and what they add to the carry, [B, segments, H, C]


def takes(z: Tensor, *options: Any) -> bool:
    """Whether the fused op is made for this dtype and head dim."""
    return z.dtype in launch.PRECISION and launch.padded(z.shape[-1]) in CONFIGS and z.numel() > 0


def counts_if_masked(z: Tensor, token_mask: Tensor | None) -> Tensor | None:
    """How many real tokens each position has seen, [B, N]; None where all are real."""
    return None if token_mask is None else token_counts(z, token_mask, None)


def is_one_segment(z: Tensor) -> bool:
    """Whether a sequence is one segment."""
    return z.shape[0] * z.shape[2] >= ENOUGH


def forward(
    z: Tensor, before: Tensor | None, counts: Tensor | None, token_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Means, and the sum after the last token."""
    options = {"BACKWARD": False, "DIVIDED": False, "PARTS": launch.PARTS[z.dtype]}
    return _walk(z, before, counts, token_mask, options)


def backward(
    d_mean: Tensor, d_total: Tensor | None, counts: Tensor | None, token_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradients of the tokens and of the sum before them."""
    return _walk(d_mean, d_total, counts, token_mask, _backward_options(d_mean))


def backward_with_sum(
    d_mean: Tensor,
    counts: Tensor | None,
    token_mask: Tensor | None,
    *,
    divided: bool,
    known: Known | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients of the tokens, and their sum over all tokens, [H, C], in the same dtype.

    The gradients of the means may come divided by the counts, and then with their sums over
    segments.
    """
    options = _backward_options(d_mean, divided=divided)
    dz, parts = _walk(d_mean, None, counts, token_mask, options, with_sum=True, known=known)
    total = d_mean.new_empty(d_mean.shape[2:])
    triton_add_up.add_up((parts, total))
    return dz, total


def _backward_options(d_mean: Tensor, *, divided: bool = False) -> dict[str, Any]:
    parts = launch.PARTS if divided else launch.PARTS_OF_GRADIENT
    return {"BACKWARD": True, "DIVIDED": divided, "PARTS": parts[d_mean.dtype]}


def _walk(
    x: Tensor,
    carry: Tensor | None,
    counts: Tensor | None,
    token_mask: Tensor | None,
    options: dict[str, Any],
    *,
    with_sum: bool = False,
    known: Known | None = None,
) -> tuple[Tensor, Tensor]:
    """What the tokens become, and the carry after them, [B, H, C].

    With the sum, that is what they become summed over each segment instead, [B segments, H, C].
    """
    B, N, H, C = x.shape
    y = launch.empty_rows(x)
    x, mask = launch.contiguous_rows(x), launch.mask_bytes(token_mask)
    config = config_of(x)
    if known is None:
        segments = launch.divide(x, config.block, 1 if is_one_segment(x) else None)
        kind = {name: options[name] for name in ("BACKWARD", "DIVIDED")}
        sums = segment_sums(x, counts, mask, segments, config, kind)
    else:
        segments, sums = known
    after = launch.float32(x, B * segments.number if with_sum else B, H, C)
    total, columns = (None, after) if with_sum else (after, None)
    walk_along[(B * segments.number * H,)](
        x, counts, mask, strides(x), count_strides(counts), N, H, segments.number, segments.tokens,
        sums, None if carry is None else carry.contiguous(), y, total, columns, strides(y),
        **options, **launch.compiled_for(C, config), WHOLE=segments.whole(N, config.block),
        **_registers(x),
    )  # fmt: skip
    return y, after


def _registers(x: Tensor) -> dict[str, int]:
    most = REGISTERS.get(launch.padded(x.shape[-1]))
    return {"maxnreg": most} if most and x.dtype == torch.bfloat16 else {}


def config_of(x: Tensor) -> Config:
    """The sizes for tokens x."""
    width = launch.padded(x.shape[-1])
    if x.dtype == torch.bfloat16 and x.shape[0] * x.shape[2] >= MANY:
        return ONE_SEGMENT.get(width, CONFIGS[width])
    return CONFIGS[width]


def segment_sums(
    x: Tensor,
    counts: Tensor | None,
    mask: Tensor | None,
    segments: Segments,
    config: Config,
    kind: dict[str, bool],
) -> Tensor | None:
    """What the tokens of each segment add to the carry, [B, segments, H, C]; None for a single."""
    B, N, H, C = x.shape
    if segments.number == 1:
        return None
    sums = launch.float32(x, B, segments.number, H, C)
    add_up[(B * segments.number * H,)](
        x, counts, mask, strides(x), count_strides(counts), N, H, segments.number, segments.tokens,
        sums, **kind, **launch.compiled_for(C, config), WHOLE=segments.whole(N, config.block),
    )  # fmt: skip
    return sums
