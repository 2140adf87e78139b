"""The moment Phi^T V as fused passes, for heads of any width.

Letters: B batch, N tokens, H heads, P feature dim, S values, n tokens of a block.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from primal_attention.ops.op import Backward, FusedOp
from primal_attention.ops.primal.eager import MomentInputs, moment_eager
from primal_attention.ops.triton import launch
from primal_attention.ops.triton import tiles as tt
from primal_attention.ops.triton.launch import DOTS, Config, launched, padded, summed

# By the padded head dim. Tiles are columns of the moment.
HALF = {
    16: Config(block=128, tile=64, num_warps=4, num_stages=3),
    32: Config(block=64, tile=64, num_warps=4, num_stages=3),
    64: Config(block=64, tile=64, num_warps=4, num_stages=3),
    128: Config(block=64, tile=64, num_warps=8, num_stages=2),
    256: Config(block=32, tile=32, num_warps=8, num_stages=2),
}
CONFIGS = {
    torch.bfloat16: HALF,
    torch.float16: HALF,
    torch.float32: {
        16: Config(block=64, tile=32, num_warps=4, num_stages=2),
        32: Config(block=64, tile=32, num_warps=4, num_stages=2),
        64: Config(block=32, tile=32, num_warps=4, num_stages=2),
        128: Config(block=32, tile=16, num_warps=8, num_stages=1),
        256: Config(block=16, tile=16, num_warps=8, num_stages=1),
    },
}


class MomentOp(FusedOp):
    """Sums of phi h^T over the real tokens."""

    name = "moment"
    inputs = MomentInputs
    differentiable = ("z", "values")
    outputs = ("moment",)

    def supports(self, given: MomentInputs) -> bool:
        """Return whether the passes support these dtypes, sizes and this map."""
        z, values = given.z, given.values
        assert values is not None
        sizes = padded(z.shape[-1]) <= 256 and 0 < values.shape[-1] <= 256
        same = z.dtype == values.dtype and z.dtype in DOTS
        return same and sizes and tt.has_maps(given.feature_map)

    def forward(self, given: MomentInputs, *, keep: bool) -> Sequence[Tensor]:
        """Return the moment [B, H, P, S]."""
        [moment] = self.empty(given)
        add_moments(given, moment)
        return (moment,)

    def empty(self, given: MomentInputs) -> Sequence[Tensor]:
        """Allocate the moment."""
        assert given.values is not None
        (B, _, H, P), S = given.z.shape, given.values.shape[-1]
        return (given.z.new_empty((B, H, P, S), dtype=torch.float32),)

    def backward(self, given: MomentInputs, call: Backward) -> dict[str, Tensor]:
        """Gradients of the tokens and of their values."""
        assert given.values is not None
        [d_moment] = call.grads
        dz, d_values = torch.empty_like(given.z), torch.empty_like(given.values)
        pull_back_moment(given, d_moment, None, MomentGradients(dz, d_values))
        return {"z": dz, "values": d_values}

    def eager(self, given: MomentInputs) -> Sequence[Tensor]:
        """Compute the moment in plain PyTorch."""
        return (moment_eager(given),)


def add_moments(
    given: MomentInputs,
    total: Tensor,  # [B, H, P, S] or [H, P, S], written
    *,
    inverse_n: Tensor | None = None,  # [B], float32
) -> None:
    """Write the sum of phi h^T, times inverse_n; over the sequences for a total without batch."""
    assert given.values is not None
    config = CONFIGS[given.z.dtype][padded(given.z.shape[-1])]
    z, values = launch.readable(given.z), launch.readable(given.values)
    (_, N, H, P), S = z.shape, values.shape[-1]
    shares = launch.shares_of(z, config)
    tile = min(config.tile, padded(S))
    with summed(z, shares, total) as parts:
        moment_blocks[(shares.programs, -(-S // tile))](
            z, values, launch.mask_bytes(given.token_mask), inverse_n, *parts,
            *map(launch.strides, (z, values)), N, H, shares.splits, shares.tokens, P, S,
            given.feature_map, DOTS[z.dtype], config.block, padded(P), tile, **config.launch,
        )  # fmt: skip


class MomentGradients(NamedTuple):
    """Memory for the gradients of what a moment is made of."""

    z: Tensor
    values: Tensor | None = None
    add: bool = False  # to what stands in that of z


def pull_back_moment(
    given: MomentInputs,
    matrix: Tensor | None,  # [B, H, P, S] or [H, P, S]
    d_gram: Tensor | None,  # [B, H, P, P]
    into: MomentGradients,
    *,
    inverse_n: Tensor | None = None,  # [B], float32
) -> None:
    """Write gradients dz of dphi = h M^T + phi (dG + dG^T), and dh = phi M; M times inverse_n."""
    config = CONFIGS[given.z.dtype][padded(given.z.shape[-1])]
    z = launch.readable(given.z)
    values = None if given.values is None else launch.readable(given.values)
    (_, N, H, P), S = z.shape, 0 if values is None else values.shape[-1]
    matrix, d_gram = launch.contiguous(matrix, d_gram)
    tile = min(config.tile, padded(S if d_gram is None else P))
    shares = launch.shares_of(z, config._replace(programs=1 << 30))
    with launch.writable(into.z) as dz, launch.writable(into.values) as d_values:
        if into.add and dz is not None and dz is not into.z:
            dz.copy_(into.z)
        pull_back_blocks[(shares.programs,)](
            z, values, matrix, d_gram, launch.mask_bytes(given.token_mask), inverse_n, dz, d_values,
            *map(launch.strides, (z, values, dz, d_values)), launch.batch_stride(matrix), N, H,
            shares.splits, shares.tokens, P, S, given.feature_map, DOTS[z.dtype], into.add,
            config.block, padded(P), tile, **config.launch,
        )  # fmt: skip


@launched(*tt.LENGTHS)
def moment_blocks(
    z, values, mask, inverse_n, moment, z_strides, value_strides, N, H, splits, tokens,
    P: tl.constexpr, S: tl.constexpr, FEATURE_MAP: tl.constexpr, DOT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Sum phi h^T over the tokens of this program, by n or not; one tile of its columns."""
    b, h, first, last = tt.share_of_tokens(tl.program_id(0), N, H, splits, tokens)
    column = tl.program_id(1) * TILE
    z, values = tt.sequence_of(z, z_strides, b, h), tt.sequence_of(values, value_strides, b, h)
    total = summed_moment(
        z, values, mask, b, z_strides[1], value_strides[1], N, first, last, column,
        P, S, FEATURE_MAP, DOT, BLOCK_N, BLOCK_P, TILE,
    )  # fmt: skip
    if inverse_n is not None:
        total *= tl.load(inverse_n + b)
    program = tl.program_id(0).to(tl.int64)
    tt.store_block(moment + program * (P * S), total, 0, column, P, S)


@triton.jit
def summed_moment(
    z, values, mask, b, z_stride, value_stride, N, first, last, column,
    P: tl.constexpr, S: tl.constexpr, FEATURE_MAP: tl.constexpr, DOT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Sum phi h^T over the tokens from first to last, a tile of its columns."""
    total = tl.zeros([BLOCK_P, TILE], tl.float32)
    for start in range(first, last, BLOCK_N):
        real = tt.real_tokens(mask, b, N, start, last, BLOCK_N)
        rows = tt.load_rows(z, start, z_stride, real, 0, P, BLOCK_P)
        inverse = tt.inverse_norms(rows, FEATURE_MAP, DOT)
        base, factor = tt.features(rows, inverse, real, FEATURE_MAP, DOT)
        row_values = tt.load_rows(values, start, value_stride, real, column, S, TILE)
        total = tt.product(tl.trans(base), tt.scaled(row_values, factor).to(DOT), total)
    return total


@launched(*tt.LENGTHS)
def pull_back_blocks(
    z, values, matrix, d_gram, mask, inverse_n, dz, d_values,
    z_strides, value_strides, dz_strides, d_value_strides, matrix_stride, N, H, splits, tokens,
    P: tl.constexpr, S: tl.constexpr, FEATURE_MAP: tl.constexpr, DOT: tl.constexpr,
    ADD: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Gradients dz of dphi = h M^T + phi (dG + dG^T), and dh = phi M; dz is added to or written."""
    b, h, first, last = tt.share_of_tokens(tl.program_id(0), N, H, splits, tokens)
    z, dz = tt.sequence_of(z, z_strides, b, h), tt.sequence_of(dz, dz_strides, b, h)
    if values is not None:
        values = tt.sequence_of(values, value_strides, b, h)
        matrix += b * matrix_stride + h * (P * S)
    d_values = tt.sequence_of(d_values, d_value_strides, b, h) if d_values is not None else None
    d_gram = d_gram + (b * H + h) * (P * P) if d_gram is not None else None
    for start in range(first, last, BLOCK_N):
        real = tt.real_tokens(mask, b, N, start, last, BLOCK_N)
        rows = tt.load_rows(z, start, z_strides[1], real, 0, P, BLOCK_P)
        inverse = tt.inverse_norms(rows, FEATURE_MAP, DOT)
        base, factor = tt.features(rows, inverse, real, FEATURE_MAP, DOT)
        d_phi = tl.zeros([BLOCK_N, BLOCK_P], tl.float32)
        if d_gram is not None:
            d_phi = _gram_gradient(
                z, start, z_strides[1], real, base, inverse, d_phi, d_gram,
                P, FEATURE_MAP, DOT, BLOCK_P, TILE,
            )  # fmt: skip
            d_phi = tt.scaled(d_phi, factor)
        if values is not None:
            for column in range(0, S, TILE):
                row_values = tt.load_rows(values, start, value_strides[1], real, column, S, TILE)
                part = tt.load_matrix(matrix, 0, column, P, S, BLOCK_P, TILE)
                if inverse_n is not None:
                    part *= tl.load(inverse_n + b)
                part, scale = tt.fitted(part, DOT)
                d_phi = tt.scaled_product(row_values.to(DOT), tl.trans(part), scale, d_phi)
                if d_values is not None:
                    dh = tt.product(base, part, tl.zeros([BLOCK_N, TILE], tl.float32))
                    dh = tt.scaled(dh, factor * scale)
                    tt.store_rows(d_values, dh, start, d_value_strides[1], last, column, S, TILE)
        d_z = tt.pull_back(base, factor, inverse, d_phi, FEATURE_MAP)
        if ADD:
            d_z += tt.load_rows(dz, start, dz_strides[1], real, 0, P, BLOCK_P).to(tl.float32)
        tt.store_rows(dz, d_z, start, dz_strides[1], last, 0, P, BLOCK_P)


@triton.jit
def _gram_gradient(
    z, start, stride, real, base, inverse, d_phi, d_gram, P: tl.constexpr,
    FEATURE_MAP: tl.constexpr, DOT: tl.constexpr, BLOCK_P: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Base (dG + dG^T), added to dphi."""
    for row in range(0, P, TILE):
        down = tt.load_matrix(d_gram, 0, row, P, P, BLOCK_P, TILE)
        both = tt.load_matrix(d_gram, row, 0, P, P, TILE, BLOCK_P) + tl.trans(down)
        part, scale = tt.fitted(both, DOT)
        if TILE == BLOCK_P:
            d_phi = tt.scaled_product(base, part, scale, d_phi)
        else:
            columns = tt.load_rows(z, start, stride, real, row, P, TILE)
            tile, _ = tt.features(columns, inverse, real, FEATURE_MAP, DOT)
            d_phi = tt.scaled_product(tile, part, scale, d_phi)
    return d_phi
