"""The passes that the op is composed of, and their composition in both directions.

Letters: B batch, N tokens, D model dim, H heads, C head dim, P feature dim, S directions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from primal_attention.ops.dual_causal.chunked import forward_in_pieces, write_gradients
from primal_attention.ops.dual_causal.sizes import dims
from primal_attention.ops.products import affine
from primal_attention.ops.projected.frame import given_or_empty, projection_gradients
from primal_attention.ops.projected_dual.reference import directions_of, inverse_counts
from primal_attention.ops.projected_dual_causal.reference import sides_of
from primal_attention.ops.running_mean import token_counts
from primal_attention.precision import accumulation_dtype


class CausalPasses(NamedTuple):
    """One way to compute them."""

    counts: Callable[[Tensor, Tensor | None], Tensor | None]  # of the real tokens up to each
    attend: Callable[..., tuple[Tensor, ...]]  # outputs, weights, Gram matrices, kept sums
    write_gradients: Callable[..., tuple[Tensor, ...]]  # of the rows and their shift; of the rest


def compose_forward(
    passes: CausalPasses,
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The five outputs; then what the backward pass needs: rows, kept sums and 1 / n."""
    rows = affine(x, weight, shift)
    q, k, h = sides_of(rows, num_heads, directions_of(c_e, c_r))
    options = passes.counts(q, token_mask), token_mask, map_q, map_k
    inverse_n = inverse_counts(x, token_mask)
    out, r, e, *grams, states = passes.attend(
        q, k, h, c_e, c_r, bias, None, None, *options, gram_q or gram_k, True, inverse_n
    )
    wanted = zip(grams, (gram_q, gram_k), strict=True)
    g_q, g_k = (gram if wants else gram.new_empty(0) for gram, wants in wanted)
    return out, g_q, g_k, e, r, rows, states, inverse_n


def compose_backward(
    passes: CausalPasses,
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
    states: Tensor,
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
    d_rows, S = torch.empty_like(rows), directions_of(c_e, c_r)
    q, k, h = sides_of(rows, num_heads, S)
    if d_out is None:
        d_out = q.new_zeros((*q.shape[:3], dims(q, h, c_e, c_r)[-1]))
    options = passes.counts(q, token_mask), token_mask, map_q, map_k, states
    d_shift = None if shift is None else torch.empty_like(shift)
    dc_e, dc_r, d_bias, _, _ = passes.write_gradients(
        q, k, h, c_e, c_r, bias, None, None, *options,
        d_out, d_r, d_e, d_gram_q, d_gram_k, sides_of(d_rows, num_heads, S), d_shift, inverse_n,
    )  # fmt: skip
    d_projection = projection_gradients(x, weight, d_rows, of_x=of_x, of_weight=of_weight)
    dx, d_weight, d_shift = given_or_empty(x, *d_projection, d_shift)
    return dx, d_weight, d_shift, dc_e, dc_r, d_bias


def attend_in_pieces(q: Tensor, k: Tensor, h: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Outputs, the weights of keys and queries, Gram matrices, and the kept sums."""
    *given, inverse_n = rest
    out, q_side, k_side, *others = forward_in_pieces(q, k, h, *given)
    for side in (q_side, k_side):
        side *= inverse_n[:, None, None, None]
    return out, q_side, k_side, *others


def write_gradients_in_pieces(q: Tensor, k: Tensor, h: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Write the gradients of the rows, and their sum over all tokens; the others come back."""
    *given, d_r, d_e, d_gram_q, d_gram_k, d_tokens, d_shift, inverse_n = rest
    by_n = inverse_n[:, None, None, None]
    d_sides = [None if d is None else d * by_n for d in (d_r, d_e)]
    d_outputs = *d_sides, d_gram_q, d_gram_k
    others: tuple[Tensor, ...] = write_gradients(q, k, h, *(*given, *d_outputs, d_tokens))
    if d_shift is not None:
        sums = [d.sum((0, 1), dtype=accumulation_dtype(d.dtype)).flatten() for d in d_tokens]
        d_shift.copy_(torch.cat(sums))
    return others


IN_PIECES = CausalPasses(
    partial(token_counts, before=None), attend_in_pieces, write_gradients_in_pieces
)
