"""The op with fused passes; the products with the projection's matrix are the library's.

Letters: B batch, N tokens, D model dim, H heads, C head dim, P feature dim, S directions.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from primal_attention.ops.collapse import triton as collapse
from primal_attention.ops.column_sum.triton import column_sum
from primal_attention.ops.column_sum.triton_add_up import add_up
from primal_attention.ops.launch import mask_bytes, padded
from primal_attention.ops.moment import triton as moment
from primal_attention.ops.primal import triton as primal
from primal_attention.ops.projected import triton as projected
from primal_attention.ops.projected_dual.passes import (
    Backward,
    DualPasses,
    add_gradients_in_pieces,
    compose_backward,
    compose_forward,
    moments,
    weights_in_pieces,
    write_apart,
)
from primal_attention.ops.projected_dual.reference import Heads, directions_of, heads_of
from primal_attention.ops.projected_dual.triton_blocks import row_gradient_blocks, sum_blocks
from primal_attention.ops.triton_launch import (
    DOTS,
    PRODUCTS,
    Config,
    contiguous,
    device_of,
    readable,
    shares_of,
    strides,
    summed,
)
from primal_attention.precision import exact

# By the largest padded width. The first pass of the backward pass, and the second, which has no
# sums and thus as many programs as it likes.
_HALF_SUMS = {
    16: Config(block=128, tile=16, num_warps=4, num_stages=3),
    32: Config(block=64, tile=32, num_warps=4, num_stages=3),
    64: Config(block=64, tile=64, num_warps=4, num_stages=3),
}
_HALF_ROWS = {
    width: config._replace(num_stages=2, programs=1 << 30, least=8)
    for width, config in _HALF_SUMS.items()
}
_FULL_SUMS = {
    16: Config(block=32, tile=16, num_warps=4, num_stages=2),
    32: Config(block=32, tile=32, num_warps=4, num_stages=2),
}
_FULL_ROWS = {
    width: config._replace(programs=1 << 30, least=8) for width, config in _FULL_SUMS.items()
}
SUMS = {torch.bfloat16: _HALF_SUMS, torch.float16: _HALF_SUMS, torch.float32: _FULL_SUMS}
ROWS = {torch.bfloat16: _HALF_ROWS, torch.float16: _HALF_ROWS, torch.float32: _FULL_ROWS}


def takes(
    x: Tensor,
    weight: Tensor,
    shift: Tensor | None,
    c_e: Tensor | None,
    c_r: Tensor | None,
    bias: Tensor | None,
    num_heads: int,
    *rest: Any,
) -> bool:
    """Whether the attention can be fused; the weights that cannot be are composed."""
    P = weight.shape[0] // (2 * num_heads) - directions_of(c_e, c_r)
    width = padded(max(P, *(c.shape[1] for c in (c_e, c_r) if c is not None)))
    return weight.dtype in DOTS and width <= 256 and x.numel() > 0


def _fits(heads: Heads, c_e: Tensor | None, c_r: Tensor | None) -> bool:
    """Whether the weights can be fused: as many directions as both of their passes are made for."""
    maps = all(c is None or c.dtype in DOTS for c in (c_e, c_r))
    return maps and heads.h_e.shape[-1] <= 128


def weights(
    precision: str,
    heads: Heads,
    c_e: Tensor | None,
    c_r: Tensor | None,
    inverse_n: Tensor,
    token_mask: Tensor | None,
    map_q: str,
    map_k: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """W_e of the keys and H_r, W_r of the queries and H_e, A_e and A_r (empty if not output)."""
    if not _fits(heads, c_e, c_r):
        return weights_in_pieces(heads, c_e, c_r, inverse_n, token_mask, map_q, map_k)
    (B, _, H, P), S = heads.q.shape, heads.h_e.shape[-1]
    e, r = (heads.q.new_empty((B, H, P, S), dtype=torch.float32) for _ in range(2))
    moment.add_moments(heads.k, heads.h_r, token_mask, map_k, e, inverse_n=inverse_n)
    moment.add_moments(heads.q, heads.h_e, token_mask, map_q, r, inverse_n=inverse_n)
    return e, r, *collapse.forward(e, r, c_e, c_r, precision)


def write_gradients(
    precision: str, heads: Heads, given: Backward, d_heads: Heads, d_bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Write the gradients of the rows and of the bias; those of c_e and c_r come back."""
    if not takes_two_passes(heads, given.c_e, given.c_r):
        add = partial(_add_gradients, precision)
        return write_apart(projected.write_gradients, add, heads, given, d_heads, d_bias)
    da_e, da_r = _sum_sides(heads, given, d_bias)
    dw_e, dw_r, dc_e, dc_r = _weight_gradients(precision, given, da_e, da_r)
    _write_rows(heads, given, dw_e, dw_r, d_heads)
    return dc_e, dc_r


def takes_two_passes(heads: Heads, c_e: Tensor | None, c_r: Tensor | None) -> bool:
    """Whether both gradients of a token are written at once, so that they may take its place."""
    return _fits(heads, c_e, c_r) and _width(heads, c_e, c_r) in SUMS[heads.q.dtype]


def _width(heads: Heads, c_e: Tensor | None, c_r: Tensor | None) -> int:
    columns = (c.shape[1] for c in (c_e, c_r) if c is not None)
    return padded(max(heads.q.shape[-1], heads.h_e.shape[-1], *columns))


def _sum_sides(
    heads: Heads, given: Backward, d_bias: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of A_e and A_r, and that of the bias."""
    q, k, bias = heads.q, heads.k, given.bias
    if given.d_out is None:
        if bias is not None:
            d_bias.zero_()
        return None, None
    d_out, (_, N, H, P), C = readable(given.d_out), q.shape, given.d_out.shape[-1]
    config = SUMS[q.dtype][_width(heads, given.c_e, given.c_r)]
    shares = shares_of(q, config)
    da_e, da_r = (None if a is None else torch.empty_like(a) for a in (given.a_e, given.a_r))
    parts = None if bias is None else d_bias.new_empty((shares.programs, C), dtype=torch.float32)
    with summed(da_e, q, shares) as sums_e, summed(da_r, q, shares) as sums_r, device_of(q):
        sum_blocks[(2 * shares.programs,)](
            q, k, d_out, mask_bytes(given.token_mask), sums_e, sums_r, parts,
            strides(q), strides(d_out), N, H, shares.splits, shares.tokens,
            P, C, given.map_q, given.map_k, DOTS[q.dtype],
            config.block, padded(P), padded(C), **config.launch,
        )  # fmt: skip
    add_up((parts, None if bias is None else d_bias))
    return da_e, da_r


def _write_rows(heads: Heads, given: Backward, dw_e: Tensor, dw_r: Tensor, d_heads: Heads) -> None:
    """The gradients of all that stands in the rows."""
    (_, N, H, P), S = heads.q.shape, heads.h_e.shape[-1]
    d_out = None if given.d_out is None else readable(given.d_out)
    C = 0 if d_out is None else d_out.shape[-1]
    config = ROWS[heads.q.dtype][_width(heads, given.c_e, given.c_r)]
    shares = shares_of(heads.q, config)
    sides = (None, None) if d_out is None else (given.a_e, given.a_r)
    with device_of(heads.q):
        row_gradient_blocks[(2 * shares.programs,)](
            *heads, d_out, *contiguous(*sides, given.d_gram_q, given.d_gram_k), dw_e, dw_r,
            mask_bytes(given.token_mask), given.inverse_n, *d_heads,
            strides(heads.q), strides(heads.h_e), strides(d_out),
            strides(d_heads.q), strides(d_heads.h_e), N, H, shares.splits, shares.tokens,
            P, S, C, given.map_q, given.map_k, DOTS[heads.q.dtype],
            config.block, padded(P), padded(S), padded(max(C, 1)), **config.launch,
        )  # fmt: skip


def _add_gradients(
    precision: str,
    heads: Heads,
    given: Backward,
    da_e: Tensor | None,
    da_r: Tensor | None,
    d_heads: Heads,
) -> tuple[Tensor, Tensor]:
    """For wide heads: gradients of c_e and c_r; those of q and k are added to."""
    if not _fits(heads, given.c_e, given.c_r):
        return add_gradients_in_pieces(heads, given, da_e, da_r, d_heads)
    dw_e, dw_r, dc_e, dc_r = _weight_gradients(precision, given, da_e, da_r)
    mask, by_n = given.token_mask, given.inverse_n
    for z, h, dw, name, dz, dh in moments(heads, given, dw_e, dw_r, d_heads):
        moment.pull_back(z, h, dw, None, mask, name, dz, dh, inverse_n=by_n, add=True)
    return dc_e, dc_r


def _weight_gradients(
    precision: str, given: Backward, da_e: Tensor | None, da_r: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of both weights by all of their uses, of c_e and of c_r."""
    weights, maps, d_weights = (given.e, given.r), (given.c_e, given.c_r), (given.d_e, given.d_r)
    return collapse.backward(*weights, *maps, da_e, da_r, *d_weights, precision)


def fused_passes(dtype: torch.dtype) -> DualPasses:
    """The passes for a projection in this dtype."""
    return DualPasses(
        partial(weights, PRODUCTS[dtype]),
        primal.forward,
        partial(write_gradients, PRODUCTS[dtype]),
        column_sum,
    )


@exact
def forward(x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Outputs, and what the backward pass needs of their making."""
    return compose_forward(fused_passes(weight.dtype), x, weight, *rest)


@exact
def backward(x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Gradients of the first six inputs; empty where they are not given or not wanted.

    Those of the rows are written over these where they are spent and both come at once.
    """
    *given, spent = rest
    _, c_e, c_r, _, num_heads = given[:5]
    heads = heads_of(given[11], num_heads, directions_of(c_e, c_r))
    over = spent and takes_two_passes(heads, c_e, c_r)
    return compose_backward(fused_passes(weight.dtype), x, weight, *(*given, over))
