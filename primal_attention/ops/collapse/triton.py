"""A = W C of both sides as fused ops: one launch forward, two backward.

Letters: B batch, H heads, C head dim, P feature dim, S directions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from primal_attention.ops.collapse.triton_blocks import collapse_blocks, total_blocks
from primal_attention.ops.column_sum.triton_add_up import add_up
from primal_attention.ops.gpu import device_of
from primal_attention.ops.launch import padded
from primal_attention.ops.triton_launch import DOTS, PRODUCTS, contiguous, warps_of

_TILE = 64  # rows of W that one program takes, at most


def takes(w_e: Tensor, w_r: Tensor, c_e: Tensor | None, c_r: Tensor | None, *rest: Any) -> bool:
    """Whether the fused ops are made for these dtypes and sizes."""
    dtypes = all(each is None or each.dtype in DOTS for each in (w_e, w_r, c_e, c_r))
    return dtypes and w_e.shape[-1] <= 128 and w_e.numel() > 0


class MapSizes(NamedTuple):
    """What the passes over the rows of W are compiled for."""

    P: int
    S: int
    C: int
    tile: int
    block: int  # directions
    columns: int

    @property
    def tiles(self) -> int:
        """How many of them the rows of W make."""
        return -(-self.P // self.tile)


def map_sizes(P: int, S: int, c_e: Tensor | None, c_r: Tensor | None, tile: int) -> MapSizes:
    """Sizes of weights [P, S] and output maps [S, C]; many directions take shorter tiles."""
    C = max(0 if c is None else c.shape[1] for c in (c_e, c_r))
    block = padded(S)
    tile, columns = min(tile, max(2048 // block, 16)), 64 if block <= 32 else 32
    return MapSizes(P, S, C, min(padded(P), tile), block, min(padded(C), columns))


def map_strides(c: Tensor | None) -> tuple[int, ...]:
    """Strides of an output map that may be missing."""
    return (0, 0) if c is None else c.stride()


def forward(
    w_e: Tensor,
    w_r: Tensor,
    c_e: Tensor | None,
    c_r: Tensor | None,
    precision: str | None = None,  # of the products; None: by the dtype of the weights
    of_a: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """A_e and A_r; empty where they are not wanted."""
    return _collapsed(w_e, w_r, c_e, c_r, None, None, precision, of_a)


def forward_with_weights(
    w_e: Tensor,
    w_r: Tensor,
    c_e: Tensor | None,
    c_r: Tensor | None,
    precision: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Copies of both weights in float32, A_e and A_r; empty where they are not wanted."""
    e, r = (w_e.new_empty(w_e.shape, dtype=torch.float32) for _ in range(2))
    return e, r, *_collapsed(w_e, w_r, c_e, c_r, e, r, precision, torch.float32)


def _collapsed(
    w_e: Tensor,
    w_r: Tensor,
    c_e: Tensor | None,
    c_r: Tensor | None,
    e: Tensor | None,
    r: Tensor | None,
    precision: str | None,
    of_a: torch.dtype,
) -> tuple[Tensor, Tensor]:
    *lead, P, S = w_e.shape
    sizes, matrices = map_sizes(P, S, c_e, c_r, _TILE), w_e.numel() // (P * S)
    a_e, a_r = (
        w_e.new_empty(0, dtype=torch.float32)
        if c is None
        else w_e.new_empty((*lead, P, sizes.C), dtype=of_a)
        for c in (c_e, c_r)
    )
    with device_of(w_e):
        collapse_blocks[(matrices, sizes.tiles, 2)](
            *contiguous(w_e, w_r), c_e, c_r, e, r, a_e, a_r,
            map_strides(c_e), map_strides(c_r), *sizes,
            precision or PRODUCTS[w_e.dtype],
            num_warps=warps_of(2 * sizes.tiles * matrices),
        )  # fmt: skip
    return a_e, a_r


def backward(
    w_e: Tensor,
    w_r: Tensor,
    c_e: Tensor | None,
    c_r: Tensor | None,
    da_e: Tensor | None,
    da_r: Tensor | None,
    d_e: Tensor | None = None,  # gradients of the weights by their other uses
    d_r: Tensor | None = None,
    precision: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of w_e, w_r, c_e and c_r; empty where there is no such input."""
    totals = [w.new_empty(w.shape) for w in (w_e, w_r)]
    d_maps = [None if c is None else torch.empty_like(c) for c in (c_e, c_r)]
    sides = contiguous(w_e, w_r, d_e, d_r, da_e, da_r)
    parts = pull_back((c_e, c_r), sides, totals, 1.0, precision or PRODUCTS[w_e.dtype])
    add_up_maps(parts, d_maps)
    dc_e, dc_r = (w_e.new_empty(0) if dc is None else dc for dc in d_maps)
    dw_e, dw_r = totals
    return dw_e, dw_r, dc_e, dc_r


def pull_back(
    maps: tuple[Tensor | None, Tensor | None],
    given: list[Tensor | None],  # both weights, their gradients, and those of A_e and A_r
    totals: list[Tensor],
    scale: float,
    precision: str,
) -> list[Tensor | None]:
    """Write the gradients of both weights by all of their uses.

    The result are parts of the gradients of C_e and C_r, [parts, C, S].
    """
    w_e, *_, da_e, da_r = given
    assert w_e is not None
    P, S = w_e.shape[-2:]
    sizes = map_sizes(P, S, *maps, _TILE)
    matrices = w_e.numel() // (P * S)
    shape = (matrices * sizes.tiles, sizes.C, S)
    parts = [
        None if da is None else w_e.new_empty(shape, dtype=torch.float32) for da in (da_e, da_r)
    ]
    with device_of(w_e):
        total_blocks[(matrices, sizes.tiles, 2)](
            *maps, *given, *totals, *parts, *map(map_strides, maps), scale, *sizes, precision,
            num_warps=warps_of(2 * sizes.tiles * matrices),
        )  # fmt: skip
    return parts


def add_up_maps(parts: list[Tensor | None], d_maps: list[Tensor | None]) -> None:
    """The gradients of C_e and C_r from their parts."""
    for part, d_map in zip(parts, d_maps, strict=True):
        if d_map is not None and part is None:
            d_map.zero_()
    totals = (None if d_map is None else d_map.mT for d_map in d_maps)
    add_up(*zip(parts, totals, strict=True))
