"""Fused forms of the landmarks' positions and of the weights that are sampled from them.

The token of a landmark is found by counting: as many positions lie before it as have seen no more
real tokens than its order. X' is never built: its rows are read where the tokens are.

Letters: B batch, N tokens, H heads, C head dim, P feature dim, S directions, M landmarks.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from primal_attention.ops.landmarks.eager import IndexInputs
from primal_attention.ops.op import FusedOp
from primal_attention.ops.primal import fused_collapse as collapse
from primal_attention.ops.triton import launch
from primal_attention.ops.triton import tiles as tt
from primal_attention.ops.triton.launch import PRODUCTS, Config, add_up, launched, padded

_BLOCK_M, _BLOCK_N = 32, 256  # landmarks and tokens of a program that counts
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


class LandmarkIndexOp(FusedOp):
    """Positions of the landmarks in one launch."""

    name = "landmark_index"
    inputs = IndexInputs
    outputs = ("index",)

    def supports(self, given: IndexInputs) -> bool:
        """Take any tokens."""
        return True

    def empty(self, given: IndexInputs) -> Sequence[Tensor]:
        """Allocate the positions."""
        return (given.x.new_empty((given.x.shape[0], given.num_landmarks), dtype=torch.long),)

    def forward(self, given: IndexInputs, *, keep: bool) -> Sequence[Tensor]:
        """Compute the position of each landmark, [B, M]; -1 where there is none."""
        (B, N, _), M = given.x.shape, given.num_landmarks
        [index] = self.empty(given)
        moves, drops = launch.contiguous(given.moves, given.drops)
        index_blocks[(B, -(-M // _BLOCK_M))](
            launch.mask_bytes(given.token_mask), moves, drops, index, N, M,
            given.jitter, given.dropout, _BLOCK_M, _BLOCK_N, num_warps=4,
        )  # fmt: skip
        return (index,)


class Sampled(NamedTuple):
    """Tokens, positions and parameters that weights are sampled from."""

    x: Tensor  # [B, N, D] with D = H P
    positions: Tensor  # [B, M], of the landmarks; -1 for a row of zeros
    parameters: collapse.CollapseWeights  # [H, M, S], and the parts of the output map
    scale: float  # of all landmarks

    @property
    def rows(self) -> Tensor:
        """The tokens [B, N, H, P], readable."""
        return launch.readable(torch.unflatten(self.x, -1, (len(self.parameters.e), -1)))

    @property
    def config(self) -> Config:
        """The sizes of blocks; tokens of bfloat16 go into the products as they are."""
        return CONFIGS["bf16" if self.x.dtype == torch.bfloat16 else self.precision]

    @property
    def precision(self) -> str:
        """The arithmetic of float32 products."""
        return PRODUCTS[self.x.dtype]

    @property
    def sizes(self) -> collapse.MapSizes:
        """The sizes of the weights."""
        (H, _, S), (*_, c_e, c_r) = self.parameters.e.shape, self.parameters
        return collapse.map_sizes(self.x.shape[2] // H, S, c_e, c_r, self.config.tile)


def supports_sampled(given: Sampled) -> bool:
    """Return whether the passes take these dtypes and sizes."""
    w_e, w_r, *_ = given.parameters
    _, M, S = w_e.shape
    same = w_r.dtype == w_e.dtype
    return collapse.supports_maps(S, given.x, *given.parameters) and same and 0 < M <= 4096


def _sides(programs: int) -> int:
    """Choose the sides of a program."""
    return 1 if programs < FEW else 2


def sample(given: Sampled, of_a: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute W_e, W_r, A_e and A_r; empty where they are not wanted."""
    x, index, (w_e, w_r, c_e, c_r), scale = given
    sizes, config, rows = given.sizes, given.config, given.rows
    P, S, C, tile, block, columns = sizes
    B, (H, M, _) = x.shape[0], w_e.shape
    sides = _sides(B * H * sizes.tiles)
    e, r = (x.new_empty((B, H, P, S), dtype=torch.float32) for _ in range(2))
    a_e, a_r = (x.new_empty(0 if c is None else (B, H, P, C), dtype=of_a) for c in (c_e, c_r))
    weight_blocks[(B * H, sizes.tiles, 2 // sides)](
        rows, index.contiguous(), *launch.contiguous(w_e, w_r), c_e, c_r, e, r, a_e, a_r,
        launch.strides(rows), *map(launch.matrix_strides, (c_e, c_r)), H, scale, M, P, S, C,
        min(config.block, padded(M)), tile, block, columns, sides, given.precision, **config.launch,
    )  # fmt: skip
    return e, r, a_e, a_r


def sampled_gradients(
    given: Sampled,
    weights: tuple[Tensor, Tensor],  # W_e and W_r
    grads: collapse.WeightGradients,
    d_rows: Tensor | None,  # [B, N, H, P] with adjacent columns
) -> dict[str, Tensor]:
    """Compute gradients of w_e, w_r, c_e and c_r; add that of x to the rows of its landmarks."""
    given = given._replace(positions=given.positions.contiguous())
    sampled = collapse.CollapseWeights(*weights, *given.parameters[2:])
    totals, c_parts = collapse.pull_back_sides(sampled, grads, given.scale, given.precision)
    if d_rows is not None:
        _add_rows(given, totals, d_rows)
    w_parts = _parameter_parts(given, totals)
    dw = [w.new_empty(w.shape) for w in given.parameters[:2]]
    d_maps = collapse.add_up_maps(
        c_parts, sampled
    )  # many parts of few entries; the others are few of many
    add_up(*zip(w_parts, dw, strict=True))
    return collapse.named_gradients(dw, d_maps)


def _add_rows(given: Sampled, totals: list[Tensor], d_rows: Tensor) -> None:
    """Add the gradients of the landmarks to those of their tokens."""
    P, S, _, tile, block, _ = given.sizes
    B, (H, M, _) = d_rows.shape[0], given.parameters.e.shape
    row_blocks[(B * H * -(-M // _NEARBY), given.sizes.tiles)](
        given.positions, *launch.contiguous(*given.parameters[:2]), *totals, d_rows,
        launch.strides(d_rows), H, M, P, S, _NEARBY, padded(M), tile, block, given.precision,
        num_warps=_NEARBY_WARPS, num_stages=1,
        **_NEARBY_REGISTERS.get((given.precision, tile, block), {}),
    )  # fmt: skip


def _parameter_parts(given: Sampled, totals: list[Tensor]) -> list[Tensor]:
    """Compute gradients of w_e and w_r, [groups, H, M, S], each summed over some sequences."""
    (P, S, _, tile, block, _), config, rows = given.sizes, given.config, given.rows
    B, (H, M, _) = given.x.shape[0], given.parameters.e.shape
    landmarks = min(config.block, padded(M))
    blocks = H * -(-M // landmarks)
    sides = _sides(B * blocks)
    group = -(-B * blocks * 2 // sides // config.programs)
    groups = -(-B // group)
    parts = [totals[0].new_empty((groups, H, M, S)) for _ in range(2)]
    parameter_blocks[(blocks, groups, 2 // sides)](
        rows, given.positions, *totals, *parts, launch.strides(rows), B, H, group,
        M, P, S, landmarks, tile, block, sides, given.precision, **config.launch,
    )  # fmt: skip
    return parts


@launched("N", "M")
def index_blocks(
    mask, moves, drops, index, N, M, jitter, dropout, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Positions of a block of landmarks of one sequence."""
    b = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    num_tokens = N
    if mask is not None:
        mask += b * N
        counts = tl.zeros([BLOCK_N], tl.int32)
        for start in range(0, N, BLOCK_N):
            counts += _real(mask, start, N, BLOCK_N)
        num_tokens = tl.sum(counts)
    last = tl.maximum(num_tokens - 1, 0)
    order = i.to(tl.int64) * last // tl.maximum(M - 1, 1)
    if moves is not None:
        move = tl.load(moves + b * M + i, mask=i < M, other=0.5).to(tl.float32)
        spacing = tl.div_rn(last.to(tl.float32), tl.maximum(M - 1, 1).to(tl.float32))
        offset = (2.0 * move - 1.0) * jitter * spacing
        below = tl.floor(offset)
        whole = below.to(tl.int64)
        rest = offset - below  # halves are rounded to even numbers
        up = (rest > 0.5) | ((rest == 0.5) & (whole % 2 != 0))
        order = tl.minimum(tl.maximum(order + whole + up.to(tl.int64), 0), last)
    position = order
    if mask is not None:
        position = tl.where(num_tokens > 0, _token_of(order, mask, N, BLOCK_N), -1)
    if drops is not None:
        drop = tl.load(drops + b * M + i, mask=i < M, other=0.0).to(tl.float32)
        position = tl.where(drop >= dropout, position, -1)
    tl.store(index + b * M + i, position.to(tl.int64), mask=i < M)


@triton.jit
def _real(mask, start, N, BLOCK_N: tl.constexpr):
    """1 at the real tokens from start on, else 0."""
    n = start + tl.arange(0, BLOCK_N)
    return (tl.load(mask + n, mask=n < N, other=0) != 0).to(tl.int32)


@triton.jit
def _token_of(order, mask, N, BLOCK_N: tl.constexpr):
    """Position of each real token, counted among the real ones."""
    before = tl.zeros(order.shape, tl.int32)
    seen = tl.full([], 0, tl.int32)
    for start in range(0, N, BLOCK_N):
        real = _real(mask, start, N, BLOCK_N)
        along = seen + tl.cumsum(real, 0)
        before += tl.sum((along[None, :] <= order[:, None]).to(tl.int32), 1)
        seen += tl.sum(real)
    return before


@launched("H")
def weight_blocks(
    x, index, w_e, w_r, c_e, c_r, given_e, given_r, a_e, a_r, x_strides, c_e_strides, c_r_strides,
    H, scale, M: tl.constexpr, P: tl.constexpr, S: tl.constexpr, C: tl.constexpr,
    BLOCK_M: tl.constexpr, TILE: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
    SIDES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows of W_e = scale X'^T w_e and of A_e = W_e C_e, those of the other side, or both."""
    matrix, row = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE
    b, h = matrix // H, matrix % H
    rows, stride = (tt.sequence_of(x, x_strides, b, h), index + b * M), x_strides[1]
    w_e, w_r = w_e + h * (M * S), w_r + h * (M * S)
    to_e, to_r = (c_e, given_e, a_e, c_e_strides), (c_r, given_r, a_r, c_r_strides)
    if SIDES == 2:
        e, r = _weights(rows, stride, w_e, w_r, row, M, P, S, BLOCK_M, TILE, BLOCK_S, PRECISION)
        collapse.store_side(e * scale, to_e, matrix, row, P, S, C, BLOCK_S, BLOCK_C, PRECISION)
        collapse.store_side(r * scale, to_r, matrix, row, P, S, C, BLOCK_S, BLOCK_C, PRECISION)
    elif tl.program_id(2) == 0:
        e, _ = _weights(rows, stride, w_e, None, row, M, P, S, BLOCK_M, TILE, BLOCK_S, PRECISION)
        collapse.store_side(e * scale, to_e, matrix, row, P, S, C, BLOCK_S, BLOCK_C, PRECISION)
    else:
        r, _ = _weights(rows, stride, w_r, None, row, M, P, S, BLOCK_M, TILE, BLOCK_S, PRECISION)
        collapse.store_side(r * scale, to_r, matrix, row, P, S, C, BLOCK_S, BLOCK_C, PRECISION)


@triton.jit
def _weights(
    rows, stride, w, other, row, M: tl.constexpr, P: tl.constexpr, S: tl.constexpr,
    BLOCK_M: tl.constexpr, TILE: tl.constexpr, BLOCK_S: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows of X'^T w of one sequence and head; with the other side's parameters if given."""
    x, index = rows
    total = tl.zeros([TILE, BLOCK_S], tl.float32)
    of_other = tl.zeros([TILE, BLOCK_S], tl.float32)
    for m in range(0, M, BLOCK_M):
        tokens = _landmarks(index, m, M, BLOCK_M)
        columns = tl.trans(_load_tokens(x, tokens, stride, row, P, TILE))
        part = tt.load_operand(w, m, 0, M, S, BLOCK_M, BLOCK_S)
        total = _product_of_tokens(columns, part, total, PRECISION)
        if other is not None:
            part = tt.load_operand(other, m, 0, M, S, BLOCK_M, BLOCK_S)
            of_other = _product_of_tokens(columns, part, of_other, PRECISION)
    return total, of_other


@launched("H")
def row_blocks(
    index, w_e, w_r, total_e, total_r, dx, dx_strides, H, M: tl.constexpr, P: tl.constexpr,
    S: tl.constexpr, BLOCK_M: tl.constexpr, ALL_M: tl.constexpr, TILE: tl.constexpr,
    BLOCK_S: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add w_e dW_e^T + w_r dW_r^T of a block of landmarks to the gradients of their tokens.

    Where landmarks stand at one token, the first of them adds what all of them give.
    """
    blocks: tl.constexpr = tl.cdiv(M, BLOCK_M)  # neighbours share the dW of a sequence and head
    matrix, number = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * BLOCK_M
    b, h = matrix // H, matrix % H
    row, given = tl.program_id(1) * TILE, matrix * (P * S)
    index, w_e, w_r = index + b * M, w_e + h * (M * S), w_r + h * (M * S)
    side_e = tt.load_matrix(total_e + given, row, 0, P, S, TILE, BLOCK_S)
    side_r = tt.load_matrix(total_r + given, row, 0, P, S, TILE, BLOCK_S)
    tokens = _landmarks(index, number, M, BLOCK_M)
    p = row + tl.arange(0, TILE)
    exists = (p < P)[:, None] & (tokens >= 0)[None, :]
    places = tt.sequence_of(dx, dx_strides, b, h) + p[:, None] + tokens[None, :] * dx_strides[1]
    # A landmark is a column here. The sum begins with what its token has: no registers for both.
    columns = tl.load(places, mask=exists, other=0.0).to(tl.float32)
    tokens = tokens.to(tl.int32)
    all_m, least = tl.arange(0, ALL_M), tl.min(tl.where(tokens >= 0, tokens, 2147483647))
    all_others = tl.load(index + all_m, mask=all_m < M, other=-1).to(tl.int32)
    between = (all_others >= least) & (all_others <= tl.max(tokens))
    begin, end = tl.min(tl.where(between, all_m, M)), tl.max(tl.where(between, all_m + 1, 0))
    first = tl.full([BLOCK_M], M, tl.int32)
    for m in range(begin, end, BLOCK_M):
        others = _landmarks(index, m, M, BLOCK_M).to(tl.int32)
        here = (others[:, None] == tokens[None, :]) & (tokens >= 0)[None, :]
        numbers = tl.where(here, (m + tl.arange(0, BLOCK_M))[:, None], M)
        first = tl.minimum(first, tl.min(numbers, 0))
        of_e = tl.trans(tt.load_operand(w_e, m, 0, M, S, BLOCK_M, BLOCK_S))
        of_r = tl.trans(tt.load_operand(w_r, m, 0, M, S, BLOCK_M, BLOCK_S))
        part = tt.product(side_e, of_e, tl.zeros([TILE, BLOCK_M], tl.float32), PRECISION)
        part = tt.product(side_r, of_r, part, PRECISION)
        columns = tt.product(part, tl.where(here, 1.0, 0.0), columns, PRECISION)
    adds = first == number + tl.arange(0, BLOCK_M)
    tl.store(places, columns.to(dx.dtype.element_ty), mask=exists & adds[None, :])


@launched("B", "H", "group")
def parameter_blocks(
    x, index, total_e, total_r, dw_e, dw_r, x_strides, B, H, group, M: tl.constexpr,
    P: tl.constexpr, S: tl.constexpr, BLOCK_M: tl.constexpr, TILE: tl.constexpr,
    BLOCK_S: tl.constexpr, SIDES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows of dw_e = X' dW_e, of dw_r, or of both, summed over a group of sequences."""
    h, m = (tl.program_id(0) % H).to(tl.int64), tl.program_id(0) // H * BLOCK_M
    part = (tl.program_id(1).to(tl.int64) * H + h) * (M * S)
    first = tl.program_id(1) * group
    places = index, H, first, tl.minimum(first + group, B), h, m
    if SIDES == 2:
        e, r = _parameters(
            x, x_strides, total_e, total_r, places, M, P, S, BLOCK_M, TILE, BLOCK_S, PRECISION
        )
        tt.store_block(dw_e + part, e, m, 0, M, S)
        tt.store_block(dw_r + part, r, m, 0, M, S)
    elif tl.program_id(2) == 0:
        e, _ = _parameters(
            x, x_strides, total_e, None, places, M, P, S, BLOCK_M, TILE, BLOCK_S, PRECISION
        )
        tt.store_block(dw_e + part, e, m, 0, M, S)
    else:
        r, _ = _parameters(
            x, x_strides, total_r, None, places, M, P, S, BLOCK_M, TILE, BLOCK_S, PRECISION
        )
        tt.store_block(dw_r + part, r, m, 0, M, S)


@triton.jit
def _parameters(
    x, x_strides, d_weights, other, places, M: tl.constexpr, P: tl.constexpr, S: tl.constexpr,
    BLOCK_M: tl.constexpr, TILE: tl.constexpr, BLOCK_S: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows of X' dW of one head from m on, and with the other side's dW if that is given."""
    index, H, first, last, h, m = places
    total = tl.zeros([BLOCK_M, BLOCK_S], tl.float32)
    of_other = tl.zeros([BLOCK_M, BLOCK_S], tl.float32)
    for number in range(first, last):
        b = tl.full([], 0, tl.int64) + number
        tokens = _landmarks(index + b * M, m, M, BLOCK_M)
        sequence, matrix = tt.sequence_of(x, x_strides, b, h), (b * H + h) * (P * S)
        for row in range(0, P, TILE):
            rows = _load_tokens(sequence, tokens, x_strides[1], row, P, TILE)
            part = tt.load_matrix(d_weights + matrix, row, 0, P, S, TILE, BLOCK_S)
            total = _product_of_tokens(rows, part, total, PRECISION)
            if other is not None:
                part = tt.load_matrix(other + matrix, row, 0, P, S, TILE, BLOCK_S)
                of_other = _product_of_tokens(rows, part, of_other, PRECISION)
    return total, of_other


@triton.jit
def _landmarks(index, m, M: tl.constexpr, BLOCK_M: tl.constexpr):
    """The tokens that the landmarks from m on are; -1 where there is none."""
    i = m + tl.arange(0, BLOCK_M)
    return tl.load(index + i, mask=i < M, other=-1)


@triton.jit
def _load_tokens(x, tokens, stride, column, P: tl.constexpr, TILE: tl.constexpr):
    """Columns of these tokens of one sequence and head; zero, and not read, where there is none."""
    p = column + tl.arange(0, TILE)
    exists = (tokens >= 0)[:, None] & (p < P)[None, :]
    return tl.load(x + tokens[:, None] * stride + p[None, :], mask=exists, other=0.0)


@triton.jit
def _product_of_tokens(x, y, total, PRECISION: tl.constexpr):
    """The sum total + x y, where a float32 matrix y meets bfloat16 x in two bfloat16 parts."""
    if x.dtype == tl.bfloat16 and y.dtype == tl.float32:
        high = y.to(tl.bfloat16)
        low = (y - high.to(tl.float32)).to(tl.bfloat16)
        total = tt.product(x, low, tt.product(x, high, total))
    else:
        total = tt.product(x, y, total, PRECISION)
    return total
