"""The moment as a fused op.

Letters: B batch, N tokens, H heads, P feature dim, S values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from primal_attention.ops.column_sum.triton_add_up import summed
from primal_attention.ops.gpu import device_of
from primal_attention.ops.launch import mask_bytes, padded
from primal_attention.ops.moment.triton_blocks import moment_blocks, pull_back_blocks
from primal_attention.ops.triton_launch import (
    DOTS,
    Config,
    batch_stride,
    contiguous,
    readable,
    shares_of,
    strides,
    writable,
)

# By the padded head dim. Tiles are columns of the moment.
_HALF = {
    16: Config(block=128, tile=64, num_warps=4, num_stages=3),
    32: Config(block=64, tile=64, num_warps=4, num_stages=3),
    64: Config(block=64, tile=64, num_warps=4, num_stages=3),
    128: Config(block=64, tile=64, num_warps=8, num_stages=2),
    256: Config(block=32, tile=32, num_warps=8, num_stages=2),
}
CONFIGS = {
    torch.bfloat16: _HALF,
    torch.float16: _HALF,
    torch.float32: {
        16: Config(block=64, tile=32, num_warps=4, num_stages=2),
        32: Config(block=64, tile=32, num_warps=4, num_stages=2),
        64: Config(block=32, tile=32, num_warps=4, num_stages=2),
        128: Config(block=32, tile=16, num_warps=8, num_stages=1),
        256: Config(block=16, tile=16, num_warps=8, num_stages=1),
    },
}


def takes(z: Tensor, values: Tensor, *options: Any) -> bool:
    """Whether the fused op is made for these dtypes and sizes."""
    sizes = padded(z.shape[-1]) <= 256 and values.shape[-1] <= 256
    return z.dtype in DOTS and values.dtype == z.dtype and sizes and values.numel() * z.numel() > 0


def forward(z: Tensor, values: Tensor, token_mask: Tensor | None, feature_map: str) -> Tensor:
    """The moment, [B, H, P, S]."""
    shape = (z.shape[0], z.shape[2], z.shape[3], values.shape[-1])
    moment = z.new_empty(shape, dtype=torch.float32)
    add_moments(z, values, token_mask, feature_map, moment)
    return moment


def backward(
    z: Tensor, values: Tensor, token_mask: Tensor | None, feature_map: str, d_moment: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of z and of the values."""
    dz, d_values = torch.empty_like(z), torch.empty_like(values)
    pull_back(z, values, d_moment, None, token_mask, feature_map, dz, d_values)
    return dz, d_values


def config_of(z: Tensor) -> Config:
    """The sizes for the dtype and the head dim of z."""
    return CONFIGS[z.dtype][padded(z.shape[-1])]


def add_moments(
    z: Tensor,  # [B, N, H, P]
    values: Tensor,  # [B, N, H, S]
    token_mask: Tensor | None,
    feature_map: str,
    total: Tensor,  # [B, H, P, S] or [H, P, S], written
    config: Config | None = None,
    *,
    inverse_n: Tensor | None = None,  # [B], float32
) -> None:
    """The sum of phi h^T over the tokens, and over the sequences where the total has no batch.

    The sum of each sequence is multiplied by its ``inverse_n``, where that is given.
    """
    config = config or config_of(z)
    z, values = readable(z), readable(values)
    (_, N, H, P), S = z.shape, values.shape[-1]
    shares = shares_of(z, config)
    tile = min(config.tile, padded(S))
    with summed(z, shares, total) as parts, device_of(z):
        moment_blocks[(shares.programs, -(-S // tile))](
            z, values, mask_bytes(token_mask), inverse_n, *parts, strides(z), strides(values),
            N, H, shares.splits, shares.tokens, P, S, feature_map, DOTS[z.dtype],
            config.block, padded(P), tile, **config.launch,
        )  # fmt: skip


def pull_back(
    z: Tensor,  # [B, N, H, P]
    values: Tensor | None,  # [B, N, H, S]
    matrix: Tensor | None,  # [B, H, P, S] or [H, P, S]
    d_gram: Tensor | None,  # [B, H, P, P]
    token_mask: Tensor | None,
    feature_map: str,
    dz: Tensor,  # written
    d_values: Tensor | None,  # written
    config: Config | None = None,
    *,
    inverse_n: Tensor | None = None,  # [B], float32
    add: bool = False,
) -> None:
    """Gradients dz of dphi = h M^T + phi (dG + dG^T), and dh = phi M.

    The matrix of each sequence is multiplied by its ``inverse_n``, where that is given. What stands
    in dz is kept and added to where ``add`` is set.
    """
    config = config or config_of(z)
    z, values = readable(z), None if values is None else readable(values)
    (_, N, H, P), S = z.shape, 0 if values is None else values.shape[-1]
    matrix, d_gram = contiguous(matrix, d_gram)
    tile = min(config.tile, padded(S if d_gram is None else P))
    shares = shares_of(z, config._replace(programs=1 << 30))
    with writable(dz) as dz_rows, writable(d_values) as d_value_rows, device_of(z):
        if add and dz_rows is not None and dz_rows is not dz:
            dz_rows.copy_(dz)
        pull_back_blocks[(shares.programs,)](
            z, values, matrix, d_gram, mask_bytes(token_mask), inverse_n, dz_rows, d_value_rows,
            strides(z), strides(values), strides(dz_rows), strides(d_value_rows),
            batch_stride(matrix), N, H, shares.splits, shares.tokens, P, S, feature_map,
            DOTS[z.dtype], add, config.block, padded(P), tile, **config.launch,
        )  # fmt: skip
