"""The passes that the op is composed of, and their composition in both directions.

Letters: B batch, N tokens, D model dim, H heads, C head dim, P feature dim, S directions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from primal_attention.ops.collapse.composed import collapse_composed, side_backward
from primal_attention.ops.moment import chunked as moment
from primal_attention.ops.primal.chunked import forward_in_pieces, write_gradients
from primal_attention.ops.products import affine
from primal_attention.ops.projected.frame import given_or_empty, projection_gradients
from primal_attention.ops.projected.passes import (
    as_operand,
    column_sum_in_pieces,
    empty_like,
    given_side,
    takes_no_places,
    used,
)
from primal_attention.ops.projected_dual.reference import (
    Heads,
    directions_of,
    heads_of,
    inverse_counts,
)


class DualPasses(NamedTuple):
    """One way to compute them."""

    attend: Callable[..., tuple[Tensor, ...]]  # outputs, Gram matrices, W_e, W_r, A_e and A_r
    write_gradients: Callable[..., tuple[Tensor, Tensor]]  # of what stands in the rows; of C
    column_sum: Callable[[Tensor], Tensor]  # of the gradients of what was projected
    # Whether the gradients of what stands in the rows may be written over it.
    takes_places: Callable[[Heads, Tensor | None, Tensor | None], bool]


class Backward(NamedTuple):
    """What the gradients of the rows are made of."""

    c_e: Tensor | None
    c_r: Tensor | None
    bias: Tensor | None
    token_mask: Tensor | None
    map_q: str
    map_k: str
    e: Tensor  # W_e and W_r
    r: Tensor
    a_e: Tensor | None  # None where its side is not output
    a_r: Tensor | None
    inverse_n: Tensor
    d_out: Tensor | None
    d_gram_q: Tensor | None
    d_gram_k: Tensor | None
    d_e: Tensor | None
    d_r: Tensor | None


def compose_forward(
    passes: DualPasses,
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The five outputs; then what the backward pass needs: rows, A_e, A_r and 1 / n."""
    rows = affine(x, weight, shift)
    heads = heads_of(rows, num_heads, directions_of(c_e, c_r))
    inverse_n = inverse_counts(x, token_mask)
    options = token_mask, map_q, map_k, gram_q, gram_k
    out, g_q, g_k, e, r, a_e, a_r = passes.attend(heads, c_e, c_r, bias, inverse_n, *options)
    return out, g_q, g_k, e, r, rows, a_e, a_r, inverse_n


def compose_backward(
    passes: DualPasses,
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
    spent: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the first six inputs; empty where they are not given or not wanted.

    Those of the rows are written over them where these are spent and the passes can.
    """
    sides, d_outputs = (given_side(a_e, c_e), given_side(a_r, c_r)), (d_out, d_gram_q, d_gram_k)
    options = token_mask, map_q, map_k
    given = Backward(c_e, c_r, bias, *options, e, r, *sides, inverse_n, *d_outputs, d_e, d_r)
    heads = d_heads = heads_of(rows, num_heads, directions_of(c_e, c_r))
    d_rows, d_bias = rows, empty_like(rows, bias)
    if not spent or not passes.takes_places(heads, c_e, c_r):
        d_rows = torch.empty_like(rows)
        d_heads = heads_of(d_rows, num_heads, directions_of(c_e, c_r))
    dc_e, dc_r = passes.write_gradients(heads, given, d_heads, d_bias)
    d_shift = None if shift is None else passes.column_sum(d_rows.flatten(0, 1))
    d_projection = projection_gradients(x, weight, d_rows, of_x=of_x, of_weight=of_weight)
    dx, d_weight, d_shift = given_or_empty(x, *d_projection, d_shift)
    return dx, d_weight, d_shift, dc_e, dc_r, d_bias


def attend_after(
    weights: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]],  # W_e, W_r, A_e and A_r
    attend: Callable[..., tuple[Tensor, Tensor, Tensor]],  # outputs and Gram matrices
    heads: Heads,
    c_e: Tensor | None,
    c_r: Tensor | None,
    bias: Tensor | None,
    inverse_n: Tensor,
    token_mask: Tensor | None,
    map_q: str,
    map_k: str,
    gram_q: bool,
    gram_k: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Outputs and Gram matrices after the weights, which come back too."""
    options = token_mask, map_q, map_k
    e, r, a_e, a_r = weights(heads, c_e, c_r, inverse_n, *options)
    sides = given_side(a_e, c_e), given_side(a_r, c_r)
    return *attend(heads.q, heads.k, *sides, bias, *options, gram_q, gram_k), e, r, a_e, a_r


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
    a_e, a_r = collapse_composed(e, r, c_e, c_r)
    dtype = heads.q.dtype
    return e, r, as_operand(a_e, c_e, dtype), as_operand(a_r, c_r, dtype)


def write_apart(
    write_gradients: Callable[..., None],
    add_gradients: Callable[..., tuple[Tensor, Tensor]],
    heads: Heads,
    given: Backward,
    d_heads: Heads,
    d_bias: Tensor,
) -> tuple[Tensor, Tensor]:
    """Write the gradients by the attention, then add those by the weights; those of c_e and c_r."""
    sides = given.a_e, given.a_r
    da_e, da_r = (empty_like(heads.q, a) for a in sides)
    write_gradients(
        heads.q, heads.k, *sides, given.bias, given.token_mask, given.map_q, given.map_k,
        given.d_out, given.d_gram_q, given.d_gram_k,
        (d_heads.q, d_heads.k, da_e, da_r, d_bias),
    )  # fmt: skip
    d_sides = used(given.d_out, da_e, given.c_e), used(given.d_out, da_r, given.c_r)
    return add_gradients(heads, given, *d_sides, d_heads)


def add_gradients_in_pieces(
    heads: Heads, given: Backward, da_e: Tensor | None, da_r: Tensor | None, d_heads: Heads
) -> tuple[Tensor, Tensor]:
    """Gradients of c_e and c_r; those of q and k are added to, those of h_e and h_r written."""
    dw_e, dc_e = side_backward(given.e, given.c_e, given.d_e, da_e)
    dw_r, dc_r = side_backward(given.r, given.c_r, given.d_r, da_r)
    by_n = given.inverse_n[:, None, None, None]
    for z, h, dw, name, dz, dh in moments(heads, given, dw_e, dw_r, d_heads):
        moment.add_gradients(z, h, given.token_mask, name, dw * by_n, dz, dh)
    return dc_e, dc_r


def moments(
    heads: Heads, given: Backward, dw_e: Tensor, dw_r: Tensor, d_heads: Heads
) -> Iterator[tuple[Tensor, Tensor, Tensor, str, Tensor, Tensor]]:
    """Rows and values of both moments, their gradients, and where those of the rows go."""
    yield heads.k, heads.h_r, dw_e, given.map_k, d_heads.k, d_heads.h_r
    yield heads.q, heads.h_e, dw_r, given.map_q, d_heads.q, d_heads.h_e


IN_PIECES = DualPasses(
    partial(attend_after, weights_in_pieces, forward_in_pieces),
    partial(write_apart, write_gradients, add_gradients_in_pieces),
    column_sum_in_pieces,
    takes_no_places,
)
