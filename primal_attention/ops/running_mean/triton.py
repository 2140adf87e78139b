"""The running mean as a fused op: each segment of a sequence is walked once, in either direction.

Letters: B batch, N tokens, H heads, C head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from primal_attention.ops import launch
from primal_attention.ops.launch import Config, Segments
from primal_attention.ops.running_mean.triton_walks import add_up, walk_along

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
WHOLE = {64: Config(block=32, num_warps=2, num_stages=1)}


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
    d_mean: Tensor, d_total: Tensor | None, counts: Tensor, token_mask: Tensor | None
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
    y, total = launch.empty_rows(x), launch.float32(x, B, H, C)
    x, mask = launch.contiguous_rows(x), launch.mask_bytes(token_mask)
    config = config_of(x)
    segments = launch.divide(x, config.block, 1 if B * H >= ENOUGH else None)
    sums = segment_sums(x, counts, mask, segments, config, backward=options["BACKWARD"])
    walk_along[(B * segments.number * H,)](
        x, counts, mask, x.stride(), counts.stride(), N, H, segments.number, segments.tokens,
        sums, None if carry is None else carry.contiguous(), y, total, y.stride(),
        **launch.compiled_for(C, config), **options,
    )  # fmt: skip
    return y, total


def config_of(x: Tensor) -> Config:
    """The sizes for tokens x."""
    width = launch.padded(x.shape[-1])
    if x.dtype == torch.bfloat16 and x.shape[0] * x.shape[2] >= MANY:
        return WHOLE.get(width, CONFIGS[width])
    return CONFIGS[width]


def segment_sums(
    x: Tensor,
    counts: Tensor,
    mask: Tensor | None,
    segments: Segments,
    config: Config,
    *,
    backward: bool = False,
) -> Tensor | None:
    """What the tokens of each segment add to the carry, [B, segments, H, C]; None for a single."""
    B, N, H, C = x.shape
    if segments.number == 1:
        return None
    sums = launch.float32(x, B, segments.number, H, C)
    add_up[(B * segments.number * H,)](
        x, counts, mask, x.stride(), counts.stride(), N, H, segments.number, segments.tokens,
        sums, BACKWARD=backward, **launch.compiled_for(C, config),
    )  # fmt: skip
    return sums
