"""The sampled weights as fused ops: one launch forward, five backward.

Letters: B batch, N tokens, D model dim, H heads, C head dim, P feature dim, S directions,
M landmarks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from primal_attention.ops.collapse.triton import (
    MapSizes,
    add_up_maps,
    map_sizes,
    map_strides,
    pull_back,
)
from primal_attention.ops.column_sum.triton_add_up import add_up
from primal_attention.ops.gpu import device_of
from primal_attention.ops.launch import padded
from primal_attention.ops.sampled.triton_blocks import (
    parameter_blocks,
    row_blocks,
    weight_blocks,
)
from primal_attention.ops.triton_launch import (
    DOTS,
    PRODUCTS,
    Config,
    contiguous,
    readable,
    strides,
    writable,
)

# By the arithmetic of the products. Blocks of landmarks; tiles are rows of W.
CONFIGS = {
    "bf16": Config(block=64, tile=64, num_warps=4, num_stages=2, programs=528),
    "tf32": Config(block=64, tile=64, num_warps=8, num_stages=1, programs=1056),
    "bf16x6": Config(block=32, tile=32, num_warps=4, num_stages=1),
}
_NEARBY = 32  # landmarks of a block that is added to its tokens
_NEARBY_WARPS = 4
# Registers of a thread of this pass, by precision, tile and block of directions. Its programs wait
# for one read after the other: so five have room on a multiprocessor, where else there are three.
_NEARBY_REGISTERS = {("tf32", 64, 32): {"maxnreg": 96}}
FEW = 264  # programs, two for each multiprocessor of a large GPU: beside so few, each has one side


def takes(x: Tensor, index: Tensor, w_e: Tensor, w_r: Tensor, *rest: Any) -> bool:
    """Whether the fused ops are made for these dtypes and sizes."""
    _, M, S = w_e.shape
    dtypes = all(each is None or each.dtype in DOTS for each in (x, w_e, w_r, *rest[:2]))
    return dtypes and w_r.dtype == w_e.dtype and S <= 128 and M <= 4096 and x.numel() * M > 0


def _config(x: Tensor) -> Config:
    """Tokens of bfloat16 go into the products as they are."""
    return CONFIGS["bf16" if x.dtype == torch.bfloat16 else PRODUCTS[x.dtype]]


def _sizes(x: Tensor, w_e: Tensor, c_e: Tensor | None, c_r: Tensor | None) -> MapSizes:
    H, _, S = w_e.shape
    return map_sizes(x.shape[2] // H, S, c_e, c_r, _config(x).tile)


def _sides(programs: int) -> int:
    """Sides of a program."""
    return 1 if programs < FEW else 2


def forward(
    x: Tensor,
    index: Tensor,
    w_e: Tensor,
    w_r: Tensor,
    c_e: Tensor | None,
    c_r: Tensor | None,
    scale: float,
    of_a: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """W_e, W_r, A_e and A_r; empty where they are not wanted."""
    sizes, config, precision = _sizes(x, w_e, c_e, c_r), _config(x), PRODUCTS[x.dtype]
    P, S, C, tile, block, columns = sizes
    B, (H, M, _) = x.shape[0], w_e.shape
    sides = _sides(B * H * sizes.tiles)
    e, r = (x.new_empty((B, H, P, S), dtype=torch.float32) for _ in range(2))
    a_e, a_r = (
        x.new_empty(0) if c is None else x.new_empty((B, H, P, C), dtype=of_a) for c in (c_e, c_r)
    )
    rows = readable(torch.unflatten(x, -1, (H, -1)))
    with device_of(x):
        weight_blocks[(B * H, sizes.tiles, 2 // sides)](
            rows, index.contiguous(), *contiguous(w_e, w_r), c_e, c_r, e, r, a_e, a_r,
            strides(rows), map_strides(c_e), map_strides(c_r), H, scale,
            M, P, S, C, min(config.block, padded(M)), tile, block, columns, sides, precision,
            **config.launch,
        )  # fmt: skip
    return e, r, a_e, a_r


def backward(
    x: Tensor,
    index: Tensor,
    w_e: Tensor,
    w_r: Tensor,
    c_e: Tensor | None,
    c_r: Tensor | None,
    scale: float,
    e: Tensor,
    r: Tensor,
    d_e: Tensor | None,
    d_r: Tensor | None,
    da_e: Tensor | None,
    da_r: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, w_e, w_r, c_e and c_r; empty where there is no such input."""
    dx = torch.empty_like(x)
    given = e, r, d_e, d_r, da_e, da_r
    with writable(torch.unflatten(dx, -1, (w_e.shape[0], -1))) as d_rows:
        assert d_rows is not None
        grads = add_gradients(x, index, w_e, w_r, c_e, c_r, scale, *given, d_rows.zero_())
    return dx, *grads


def add_gradients(
    x: Tensor,
    index: Tensor,
    w_e: Tensor,
    w_r: Tensor,
    c_e: Tensor | None,
    c_r: Tensor | None,
    scale: float,
    e: Tensor,
    r: Tensor,
    d_e: Tensor | None,
    d_r: Tensor | None,
    da_e: Tensor | None,
    da_r: Tensor | None,
    d_rows: Tensor | None,  # [B, N, H, P] with adjacent columns
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of w_e, w_r, c_e and c_r; that of x is added to the rows of its landmarks."""
    sizes, index, precision = _sizes(x, w_e, c_e, c_r), index.contiguous(), PRODUCTS[x.dtype]
    totals = [e.new_empty(e.shape) for _ in range(2)]
    given = contiguous(e, r, d_e, d_r, da_e, da_r)
    c_parts = pull_back((c_e, c_r), given, totals, scale, precision)
    if d_rows is not None:
        _add_rows(index, w_e, w_r, totals, d_rows, sizes, precision)
    w_parts = _parameter_parts(x, index, w_e, totals, sizes)
    dw = [w.new_empty(w.shape) for w in (w_e, w_r)]
    d_maps = [None if c is None else torch.empty_like(c) for c in (c_e, c_r)]
    add_up_maps(c_parts, d_maps)  # many parts of few entries; the others are few parts of many
    add_up(*zip(w_parts, dw, strict=True))
    dc_e, dc_r = (e.new_empty(0) if dc is None else dc for dc in d_maps)
    dw_e, dw_r = dw
    return dw_e, dw_r, dc_e, dc_r


def _add_rows(
    index: Tensor,
    w_e: Tensor,
    w_r: Tensor,
    totals: list[Tensor],
    d_rows: Tensor,
    sizes: MapSizes,
    precision: str,
) -> None:
    """Add the gradients of the landmarks to those of their tokens."""
    P, S, _, tile, block, _ = sizes
    B, (H, M, _) = d_rows.shape[0], w_e.shape
    with device_of(d_rows):
        row_blocks[(B * H * -(-M // _NEARBY), sizes.tiles)](
            index, *contiguous(w_e, w_r), *totals, d_rows, strides(d_rows), H,
            M, P, S, _NEARBY, padded(M), tile, block, precision,
            num_warps=_NEARBY_WARPS, num_stages=1,
            **_NEARBY_REGISTERS.get((precision, tile, block), {}),
        )  # fmt: skip


def _parameter_parts(
    x: Tensor, index: Tensor, w_e: Tensor, totals: list[Tensor], sizes: MapSizes
) -> list[Tensor]:
    """Gradients of w_e and w_r, [groups, H, M, S], each summed over a group of sequences."""
    (P, S, _, tile, block, _), config = sizes, _config(x)
    B, (H, M, _) = x.shape[0], w_e.shape
    landmarks = min(config.block, padded(M))
    blocks = H * -(-M // landmarks)
    sides = _sides(B * blocks)
    group = -(-B * blocks * 2 // sides // config.programs)
    groups = -(-B // group)
    parts = [totals[0].new_empty((groups, H, M, S)) for _ in range(2)]
    rows = readable(torch.unflatten(x, -1, (H, -1)))
    with device_of(x):
        parameter_blocks[(blocks, groups, 2 // sides)](
            rows, index, *totals, *parts, strides(rows), B, H, group,
            M, P, S, landmarks, tile, block, sides, PRODUCTS[x.dtype], **config.launch,
        )  # fmt: skip
    return parts
