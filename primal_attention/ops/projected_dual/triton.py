"""The op with fused passes; the products with the projection's matrix are the library's.

Letters: B batch, N tokens, D model dim, H heads, C head dim, P feature dim, S directions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from primal_attention.ops.collapse import triton as collapse
from primal_attention.ops.launch import padded
from primal_attention.ops.moment import triton as moment
from primal_attention.ops.projected import triton as projected
from primal_attention.ops.projected_dual.passes import (
    add_gradients_in_pieces,
    compose_backward,
    compose_forward,
    weights_in_pieces,
)
from primal_attention.ops.projected_dual.reference import Heads, directions_of
from primal_attention.ops.triton_launch import DOTS
from primal_attention.precision import exact


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
    return e, r, *collapse.forward(e, r, c_e, c_r)


def add_gradients(
    heads: Heads,
    c_e: Tensor | None,
    c_r: Tensor | None,
    inverse_n: Tensor,
    token_mask: Tensor | None,
    map_q: str,
    map_k: str,
    e: Tensor,
    r: Tensor,
    d_e: Tensor | None,
    d_r: Tensor | None,
    da_e: Tensor | None,
    da_r: Tensor | None,
    d_heads: Heads,
) -> tuple[Tensor, Tensor]:
    """Gradients of c_e and c_r; those of q and k are added to, those of h_e and h_r written."""
    if not _fits(heads, c_e, c_r):
        maps, d_weights, d_sides = (token_mask, map_q, map_k), (d_e, d_r), (da_e, da_r)
        return add_gradients_in_pieces(
            heads, c_e, c_r, inverse_n, *maps, e, r, *d_weights, *d_sides, d_heads
        )
    dw_e, dw_r, dc_e, dc_r = collapse.backward(e, r, c_e, c_r, da_e, da_r, d_e, d_r)
    for z, h, dw, feature_map, dz, dh in (
        (heads.k, heads.h_r, dw_e, map_k, d_heads.k, d_heads.h_r),
        (heads.q, heads.h_e, dw_r, map_q, d_heads.q, d_heads.h_e),
    ):
        moment.pull_back(
            z, h, dw, None, token_mask, feature_map, dz, dh, inverse_n=inverse_n, add=True
        )
    return dc_e, dc_r


FUSED = projected.FUSED._replace(weights=weights, add_gradients=add_gradients)


@exact
def forward(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Outputs, and what the backward pass needs of their making."""
    return compose_forward(FUSED, x, *rest)


@exact
def backward(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Gradients of the first six inputs; empty where they are not given or not wanted."""
    return compose_backward(FUSED, x, *rest)
