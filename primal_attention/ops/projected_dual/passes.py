"""The passes that the op is composed of, and their composition in both directions.

Letters: B batch, N tokens, D model dim, H heads, C head dim, P feature dim, S directions.
"""

from __future__ import annotations

from torch import Tensor

from primal_attention.ops.collapse.composed import collapse_composed, side_backward
from primal_attention.ops.moment import chunked as moment
from primal_attention.ops.projected import passes as projected
from primal_attention.ops.projected.frame import given_or_empty, project, projection_gradients
from primal_attention.ops.projected.passes import Passes, empty_like, given_side, used
from primal_attention.ops.projected_dual.reference import (
    Heads,
    directions_of,
    heads_of,
    inverse_counts,
)


def compose_forward(
    passes: Passes,
    x: Tensor,
    weight: Tensor,
    shift: Tensor | None,
    c_e: Tensor | None,
    c_r: Tensor | None,
    bias: Tensor | None,
    num_heads: int,
    token_mask: Tensor | None,
    map_q: str,
    map_k: str,
    gram_q: bool,
    gram_k: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The five outputs; then what the backward pass needs: tokens, rows, A_e, A_r and 1 / n."""
    rows, tokens = project(x, weight, shift)
    heads = heads_of(rows, num_heads, directions_of(c_e, c_r))
    inverse_n = inverse_counts(x, token_mask, weight.dtype)
    options = token_mask, map_q, map_k
    e, r, a_e, a_r = passes.weights(heads, c_e, c_r, inverse_n, *options)
    sides = given_side(a_e, c_e), given_side(a_r, c_r)
    out, g_q, g_k = passes.attend(heads.q, heads.k, *sides, bias, *options, gram_q, gram_k)
    return out, g_q, g_k, e, r, tokens, rows, a_e, a_r, inverse_n


def compose_backward(
    passes: Passes,
    x: Tensor,
    weight: Tensor,
    shift: Tensor | None,
    c_e: Tensor | None,
    c_r: Tensor | None,
    bias: Tensor | None,
    num_heads: int,
    token_mask: Tensor | None,
    map_q: str,
    map_k: str,
    e: Tensor,
    r: Tensor,
    tokens: Tensor,
    rows: Tensor,
    a_e: Tensor,
    a_r: Tensor,
    inverse_n: Tensor,
    d_out: Tensor | None,
    d_gram_q: Tensor | None,
    d_gram_k: Tensor | None,
    d_e: Tensor | None,
    d_r: Tensor | None,
    of_x: bool,
    of_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the first six inputs; empty where they are not given or not wanted."""
    sides, options = (given_side(a_e, c_e), given_side(a_r, c_r)), (token_mask, map_q, map_k)
    d_rows, da_e, da_r, d_bias = (empty_like(rows, t) for t in (rows, *sides, bias))
    heads, d_heads = (heads_of(t, num_heads, directions_of(c_e, c_r)) for t in (rows, d_rows))
    passes.write_gradients(
        heads.q, heads.k, *sides, bias, *options, d_out, d_gram_q, d_gram_k,
        (d_heads.q, d_heads.k, da_e, da_r, d_bias),
    )  # fmt: skip
    d_sides = used(d_out, da_e, c_e), used(d_out, da_r, c_r)
    dc_e, dc_r = passes.add_gradients(
        heads, c_e, c_r, inverse_n, *options, e, r, d_e, d_r, *d_sides, d_heads
    )
    d_projection = projection_gradients(
        passes.column_sum, x, weight, shift, tokens, d_rows, of_x=of_x, of_weight=of_weight
    )
    dx, d_weight, d_shift = given_or_empty(x, *d_projection)
    return dx, d_weight, d_shift, dc_e, dc_r, d_bias


def weights_in_pieces(
    heads: Heads,
    c_e: Tensor | None,
    c_r: Tensor | None,
    inverse_n: Tensor,
    token_mask: Tensor | None,
    map_q: str,
    map_k: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """W_e of the keys and H_r, W_r of the queries and H_e, A_e and A_r (empty if not output)."""
    e = moment.forward_in_pieces(heads.k, heads.h_r, token_mask, map_k)
    r = moment.forward_in_pieces(heads.q, heads.h_e, token_mask, map_q)
    for total in (e, r):
        total *= inverse_n[:, None, None, None]
    return e, r, *collapse_composed(e, r, c_e, c_r)


def add_gradients_in_pieces(
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
    dw_e, dc_e = side_backward(e, c_e, d_e, da_e)
    dw_r, dc_r = side_backward(r, c_r, d_r, da_r)
    by_n = inverse_n[:, None, None, None]
    moment.add_gradients(heads.k, heads.h_r, token_mask, map_k, dw_e * by_n, d_heads.k, d_heads.h_r)
    moment.add_gradients(heads.q, heads.h_e, token_mask, map_q, dw_r * by_n, d_heads.q, d_heads.h_e)
    return dc_e, dc_r


IN_PIECES = projected.IN_PIECES._replace(
    weights=weights_in_pieces, add_gradients=add_gradients_in_pieces
)
