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
from primal_attention.ops.column_sum.triton_add_up import add_up, summed
from primal_attention.ops.gpu import device_of
from primal_attention.ops.launch import mask_bytes, padded
from primal_attention.ops.moment import triton as moment
from primal_attention.ops.primal import triton as primal
from primal_attention.ops.projected import triton as projected
from primal_attention.ops.projected_dual.passes import (
    Backward,
    DualPasses,
    add_gradients_in_pieces,
    attend_after,
    compose_backward,
    compose_forward,
    moments,
    weights_in_pieces,
    write_apart,
)
from primal_attention.ops.projected_dual.reference import Heads, directions_of
from primal_attention.ops.projected_dual.triton_blocks import row_gradient_blocks, sum_blocks
from primal_attention.ops.projected_dual.triton_whole import whole_blocks, whole_gradient_blocks
from primal_attention.ops.triton_launch import (
    DOTS,
    PRODUCTS,
    Config,
    contiguous,
    readable,
    shares_of,
    strides,
)
from primal_attention.precision import exact, operand_dtype

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
# Both in one pass: for sequences so short that their tokens are still in the cache when they are
# read again, and so many, times heads, that four of them come to each multiprocessor. Other dtypes
# would need more registers than there are.
WHOLE = {torch.bfloat16: _HALF_ROWS}
SHORT, MANY = 256, 528


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


def attend(
    precision: str,
    heads: Heads,
    c_e: Tensor | None,
    c_r: Tensor | None,
    *rest: Any,  # bias, 1 / n, mask, maps, and which Gram matrices are wanted
) -> tuple[Tensor, ...]:
    """Outputs and Gram matrices, W_e and W_r, A_e and A_r; empty where they are not wanted."""
    if c_e is not None and c_r is not None and _is_short(heads, c_e, c_r):
        return _attend_whole(precision, heads, c_e, c_r, *rest)
    return attend_after(partial(weights, precision), primal.forward, heads, c_e, c_r, *rest)


def _is_short(heads: Heads, c_e: Tensor, c_r: Tensor) -> bool:
    """Whether a program is to have a whole sequence and head."""
    (B, N, H, _), taken = heads.q.shape, heads.q.dtype in WHOLE
    return taken and N <= SHORT and B * H >= MANY and takes_two_passes(heads, c_e, c_r)


def _attend_whole(
    precision: str,
    heads: Heads,
    c_e: Tensor,
    c_r: Tensor,
    bias: Tensor | None,
    inverse_n: Tensor,
    token_mask: Tensor | None,
    map_q: str,
    map_k: str,
    gram_q: bool,
    gram_k: bool,
) -> tuple[Tensor, ...]:
    """The same in one pass."""
    q, (B, N, H, P), S, C = heads.q, heads.q.shape, heads.h_e.shape[-1], c_e.shape[1]
    config = primal.FORWARD[q.dtype][_width(heads, c_e, c_r)]
    of_sums, of_a = torch.float32, operand_dtype(q.dtype, torch.float32)
    out = q.new_empty((B, N, H, C))
    g_q, g_k = (q.new_empty((B, H, P, P) if g else 0, dtype=of_sums) for g in (gram_q, gram_k))
    e, r = (q.new_empty((B, H, P, S), dtype=of_sums) for _ in range(2))
    a_e, a_r = (q.new_empty((B, H, P, C), dtype=of_a) for _ in range(2))
    with device_of(q):
        whole_blocks[(B * H,)](
            *heads, c_e, c_r, *contiguous(bias), mask_bytes(token_mask), inverse_n,
            out, g_q if gram_q else None, g_k if gram_k else None, e, r, a_e, a_r,
            strides(q), strides(heads.h_e), strides(out),
            *map(collapse.map_strides, (c_e, c_r)), N, H,
            P, S, C, map_q, map_k, DOTS[q.dtype], precision,
            config.block, padded(P), padded(S), padded(max(P, C)), **config.launch,
        )  # fmt: skip
    return out, g_q, g_k, e, r, a_e, a_r


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
    of_a = operand_dtype(heads.q.dtype, torch.float32)
    return e, r, *collapse.forward(e, r, c_e, c_r, precision, of_a)


def write_gradients(
    precision: str, heads: Heads, given: Backward, d_heads: Heads, d_bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Write the gradients of the rows and of the bias; those of c_e and c_r come back."""
    if not takes_two_passes(heads, given.c_e, given.c_r):
        add = partial(_add_gradients, precision)
        return write_apart(projected.write_gradients, add, heads, given, d_heads, d_bias)
    c_e, c_r, d_out = given.c_e, given.c_r, given.d_out
    if d_out is not None and c_e is not None and c_r is not None and _is_short(heads, c_e, c_r):
        return _write_whole(precision, heads, given, (c_e, c_r), d_out, d_heads, d_bias)
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


def _write_whole(
    precision: str,
    heads: Heads,
    given: Backward,
    maps: tuple[Tensor, Tensor],
    d_out: Tensor,
    d_heads: Heads,
    d_bias: Tensor,
) -> tuple[Tensor, Tensor]:
    """All gradients of the rows and of the bias in one pass; those of c_e and c_r come back."""
    (B, N, H, P), S, q = heads.q.shape, heads.h_e.shape[-1], heads.q
    d_out, C = readable(d_out), d_out.shape[-1]
    width = _width(heads, *maps)
    config, stages = WHOLE[q.dtype][width], SUMS[q.dtype][width].num_stages
    parts = [given.e.new_empty(B * H, C, S) for _ in maps]
    bias_parts = None if given.bias is None else given.e.new_empty(B * H, C)
    with device_of(q):
        whole_gradient_blocks[(B * H,)](
            *heads, d_out,
            *contiguous(given.a_e, given.a_r, given.d_gram_q, given.d_gram_k),
            *contiguous(given.e, given.r, given.d_e, given.d_r), *maps,
            mask_bytes(given.token_mask), given.inverse_n, *d_heads, *parts, bias_parts,
            strides(q), strides(heads.h_e), strides(d_out), strides(d_heads.q),
            strides(d_heads.h_e), *map(collapse.map_strides, maps), N, H,
            P, S, C, given.map_q, given.map_k, DOTS[q.dtype], precision,
            config.block, padded(P), padded(S), padded(C), stages, **config.launch,
        )  # fmt: skip
    dc_e, dc_r = (torch.empty_like(c) for c in maps)
    totals = dc_e.mT, dc_r.mT, None if given.bias is None else d_bias
    add_up(*zip((*parts, bias_parts), totals, strict=True))
    return dc_e, dc_r


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
    of_bias = None if bias is None else d_bias
    with summed(q, shares, da_e, da_r, of_bias) as sums, device_of(q):
        sum_blocks[(2 * shares.programs,)](
            q, k, d_out, mask_bytes(given.token_mask), *sums,
            strides(q), strides(d_out), N, H, shares.splits, shares.tokens,
            P, C, given.map_q, given.map_k, DOTS[q.dtype],
            config.block, padded(P), padded(C), config.num_stages, **config.launch,
        )  # fmt: skip
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
        partial(attend, PRODUCTS[dtype]),
        partial(write_gradients, PRODUCTS[dtype]),
        column_sum,
        takes_two_passes,
    )


@exact
def forward(x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Outputs, and what the backward pass needs of their making."""
    return compose_forward(fused_passes(weight.dtype), x, weight, *rest)


@exact
def backward(x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Gradients of the first six inputs; empty where they are not given or not wanted."""
    return compose_backward(fused_passes(weight.dtype), x, weight, *rest)
