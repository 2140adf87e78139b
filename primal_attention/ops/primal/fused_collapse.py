"""A = W C of both sides as fused passes: one launch forward, two backward.

A program takes a tile of the rows of W. Letters: B batch, H heads, C head dim, P features,
S directions.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from primal_attention.ops.triton import launch
from primal_attention.ops.triton import tiles as tt
from primal_attention.ops.triton.launch import DOTS, add_up, launched, padded

_TILE = 64  # rows of W that one program takes, at most


class CollapseWeights(NamedTuple):
    """The weights of both sides and their parts of the output map."""

    e: Tensor  # [B, H, P, S] or [H, P, S]
    r: Tensor
    c_e: Tensor | None  # [S, C]; None where e is not output
    c_r: Tensor | None


class WeightGradients(NamedTuple):
    """Gradients of what is made of the weights, where there are any."""

    d_e: Tensor | None  # of the weights by their other uses
    d_r: Tensor | None
    da_e: Tensor | None
    da_r: Tensor | None


class MapSizes(NamedTuple):
    """Compile-time sizes of the passes over the rows of W."""

    P: int
    S: int
    C: int
    tile: int
    block: int  # directions
    columns: int

    @property
    def tiles(self) -> int:
        """The number of tiles of the rows of W."""
        return -(-self.P // self.tile)


def supports_maps(num_directions: int, *tensors: Tensor | None) -> bool:
    """Return whether the passes take so many directions and these dtypes."""
    return num_directions <= 128 and all(x is None or x.dtype in DOTS for x in tensors)


def map_sizes(P: int, S: int, c_e: Tensor | None, c_r: Tensor | None, tile: int) -> MapSizes:
    """Choose sizes for weights [P, S] and maps [S, C]; many directions take shorter tiles."""
    C = max(0 if c is None else c.shape[1] for c in (c_e, c_r))
    block = padded(S)
    tile, columns = min(tile, max(2048 // block, 16)), 64 if block <= 32 else 32
    return MapSizes(P, S, C, min(padded(P), tile), block, min(padded(C), columns))


def collapse(
    weights: CollapseWeights,
    precision: str,
    of_a: torch.dtype,
    copies: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute A_e and A_r, empty where not wanted; write float32 copies of the weights."""
    e, r, c_e, c_r = weights
    *lead, P, S = e.shape
    sizes, matrices = map_sizes(P, S, c_e, c_r, _TILE), e.numel() // (P * S)
    a_e, a_r = (
        e.new_empty(0 if c is None else (*lead, P, sizes.C), dtype=of_a) for c in (c_e, c_r)
    )
    collapse_blocks[(matrices, sizes.tiles, 2)](
        *launch.contiguous(e, r), c_e, c_r, *(copies or (None, None)), a_e, a_r,
        *map(launch.matrix_strides, (c_e, c_r)), *sizes, precision,
        num_warps=launch.warps_of(2 * sizes.tiles * matrices),
    )  # fmt: skip
    return a_e, a_r


def collapse_gradients(
    weights: CollapseWeights, grads: WeightGradients, precision: str
) -> dict[str, Tensor]:
    """Compute gradients of w_e and w_r by all of their uses, and of c_e and c_r."""
    totals, parts = pull_back_sides(weights, grads, 1.0, precision)
    return named_gradients(totals, add_up_maps(parts, weights))


def named_gradients(weights: list[Tensor], maps: list[Tensor | None]) -> dict[str, Tensor]:
    """Name the gradients after the inputs of a layer."""
    found = zip(("w_e", "w_r", "c_e", "c_r"), (*weights, *maps), strict=True)
    return {name: each for name, each in found if each is not None}


def pull_back_sides(
    weights: CollapseWeights, grads: WeightGradients, scale: float, precision: str
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Compute gradients of both weights, and parts [parts, C, S] of those of C_e and C_r."""
    e, r, c_e, c_r = weights
    P, S = e.shape[-2:]
    sizes, matrices = map_sizes(P, S, c_e, c_r, _TILE), e.numel() // (P * S)
    totals = [w.new_empty(w.shape) for w in (e, r)]
    shape = (matrices * sizes.tiles, sizes.C, S)
    parts = [None if da is None else e.new_empty(shape, dtype=torch.float32) for da in grads[2:]]
    total_blocks[(matrices, sizes.tiles, 2)](
        c_e, c_r, *launch.contiguous(e, r, *grads), *totals, *parts,
        *map(launch.matrix_strides, (c_e, c_r)), scale, *sizes, precision,
        num_warps=launch.warps_of(2 * sizes.tiles * matrices),
    )  # fmt: skip
    return totals, parts


def add_up_maps(parts: list[Tensor | None], weights: CollapseWeights) -> list[Tensor | None]:
    """Add up the gradients of C_e and C_r."""
    d_maps = [None if c is None else torch.empty_like(c) for c in weights[2:]]
    for part, d_map in zip(parts, d_maps, strict=True):
        if d_map is not None and part is None:
            d_map.zero_()
    totals = (None if d_map is None else d_map.mT for d_map in d_maps)
    add_up(*zip(parts, totals, strict=True))
    return d_maps


@launched()
def collapse_blocks(
    w_e, w_r, c_e, c_r, given_e, given_r, a_e, a_r, c_e_strides, c_r_strides,
    P: tl.constexpr, S: tl.constexpr, C: tl.constexpr,
    TILE: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows of A_e = W_e C_e or of A_r, and of the weights in float32 where they are wanted."""
    matrix, row = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE
    to_e, to_r = (c_e, given_e, a_e, c_e_strides), (c_r, given_r, a_r, c_r_strides)
    if tl.program_id(2) == 0:
        weights = tt.load_matrix(w_e + matrix * (P * S), row, 0, P, S, TILE, BLOCK_S)
        store_side(weights, to_e, matrix, row, P, S, C, BLOCK_S, BLOCK_C, PRECISION)
    else:
        weights = tt.load_matrix(w_r + matrix * (P * S), row, 0, P, S, TILE, BLOCK_S)
        store_side(weights, to_r, matrix, row, P, S, C, BLOCK_S, BLOCK_C, PRECISION)


@triton.jit
def store_side(
    weights, side, matrix, row, P: tl.constexpr, S: tl.constexpr, C: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write rows of the weights of one side, and of their product with the output map."""
    c, given, a, c_strides = side
    if given is not None:
        tt.store_block(given + matrix * (P * S), weights, row, 0, P, S)
    if c is not None:
        for column in range(0, C, BLOCK_C):
            part = load_map(c, c_strides, column, S, C, BLOCK_S, BLOCK_C)
            nothing = tl.zeros([weights.shape[0], BLOCK_C], tl.float32)
            projected = tt.product(weights, part, nothing, PRECISION)
            tt.store_block(a + matrix * (P * C), projected, row, column, P, C)


@launched()
def total_blocks(
    c_e, c_r, w_e, w_r, d_e, d_r, da_e, da_r, total_e, total_r, dc_e, dc_r, c_e_strides,
    c_r_strides, scale, P: tl.constexpr, S: tl.constexpr, C: tl.constexpr, TILE: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add up the gradient of W_e or W_r over both uses, scaled, and a part of the gradient of C."""
    side_e = c_e, w_e, d_e, da_e, total_e, dc_e, c_e_strides
    side_r = c_r, w_r, d_r, da_r, total_r, dc_r, c_r_strides
    if tl.program_id(2) == 0:
        _side_total(side_e, scale, P, S, C, TILE, BLOCK_S, BLOCK_C, PRECISION)
    else:
        _side_total(side_r, scale, P, S, C, TILE, BLOCK_S, BLOCK_C, PRECISION)


@triton.jit
def _side_total(
    side, scale, P: tl.constexpr, S: tl.constexpr, C: tl.constexpr,
    TILE: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows of scale (dW + dA C^T), and the part dA^T W of the transpose of dC of these rows."""
    c, w, d_w, da, total, dc, c_strides = side
    matrix, row = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE
    side_total = tl.zeros([TILE, BLOCK_S], tl.float32)
    if d_w is not None:
        side_total += tt.load_matrix(d_w + matrix * (P * S), row, 0, P, S, TILE, BLOCK_S)
    if da is not None:
        part = dc + (matrix * tl.num_programs(1) + tl.program_id(1)) * (S * C)
        weights = tt.load_operand(w + matrix * (P * S), row, 0, P, S, TILE, BLOCK_S)
        for column in range(0, C, BLOCK_C):
            d_block = tt.load_operand(da + matrix * (P * C), row, column, P, C, TILE, BLOCK_C)
            of_c = load_map(c, c_strides, column, S, C, BLOCK_S, BLOCK_C)
            side_total = tt.product(d_block, tl.trans(of_c), side_total, PRECISION)
            nothing = tl.zeros([BLOCK_C, BLOCK_S], tl.float32)
            d_map = tt.product(tl.trans(d_block), weights, nothing, PRECISION)
            tt.store_block(part, d_map, column, 0, C, S)
    tt.store_block(total + matrix * (P * S), side_total * scale, row, 0, P, S)


@triton.jit
def load_map(
    c, strides, column,
    S: tl.constexpr, C: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Columns of the output map [S, C], in its own dtype."""
    s, i = tl.arange(0, BLOCK_S), column + tl.arange(0, BLOCK_C)
    exists = (s < S)[:, None] & (i < C)[None, :]
    places = c + s[:, None] * strides[0] + i[None, :] * strides[1]
    return tl.load(places, mask=exists, other=0.0)
