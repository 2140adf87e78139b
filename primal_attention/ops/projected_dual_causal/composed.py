r"""Tokens, projections and causal attention with dual weights as one op.

    q, k, h_e, h_r = W x + b

    out_t = phi_q(q_t) W_{e,t} C_e + phi_k(k_t) W_{r,t} C_r + bias

with W_{e,t} the mean of phi_k h_r^T over the tokens up to t, and W_{r,t} that of phi_q h_e^T.

Its backward pass is one too: the gradients of all projections lie side by side, so that each of x,
W and b gets its own at once.

Letters: B batch, N tokens, D model dim, H heads, C head dim, P feature dim, S directions.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from primal_attention.ops.dual_causal import chunked
from primal_attention.ops.projected import ProjectedResult, node
from primal_attention.ops.projected_dual.composed import OPTIONS, TENSORS
from primal_attention.ops.projected_dual.reference import directions_of
from primal_attention.ops.projected_dual_causal import reference
from primal_attention.ops.projected_dual_causal.passes import (
    IN_PIECES,
    compose_backward,
    compose_forward,
)
from primal_attention.ops.projected_dual_causal.reference import sides_of
from primal_attention.precision import accumulation_dtype


def projected_dual_causal_attention(
    x: Tensor,  # [B, N, D], in the dtype of the weight
    weight: Tensor,  # [2 H P + 2 H S, D]: of the queries, the keys, H_e and H_r
    shift: Tensor | None,  # [2 H P + 2 H S]
    c_e: Tensor | None,  # [S, C]: the output map's part for e; None where e is not output
    c_r: Tensor | None,  # at least one of the two is given
    bias: Tensor | None = None,  # [C]
    *,
    num_heads: int,
    token_mask: Tensor | None = None,  # [B, N], True = real token
    map_q: str = "cosine",
    map_k: str = "cosine",
    gram_q: bool = True,
    gram_k: bool = True,
) -> ProjectedResult:
    """The same values as the reference; e and r are the weights after the last real token.

    A Gram matrix that is not wanted comes back empty.
    """
    given = x, weight, shift, c_e, c_r, bias, num_heads
    outputs = _forward(*given, token_mask, map_q, map_k, gram_q, gram_k)
    return ProjectedResult(*outputs[: node.OUTPUTS])


def _empty_outputs(
    x: Tensor,
    weight: Tensor,
    shift: Tensor | None,
    c_e: Tensor | None,
    c_r: Tensor | None,
    bias: Tensor | None,
    num_heads: int,
    *options: Any,
) -> tuple[Tensor, ...]:
    token_mask, map_q, map_k, gram_q, gram_k = options
    of_sums = partial(x.new_empty, dtype=accumulation_dtype(x.dtype))
    rows = x.new_empty((*x.shape[:2], weight.shape[0]))
    q, k, h = sides_of(rows, num_heads, directions_of(c_e, c_r))
    inputs = q, k, h, c_e, c_r, bias, None, None, None, token_mask, map_q, map_k
    out, q_side, k_side, g_q, g_k, states = chunked.empty_outputs(*inputs, True, True)
    return (
        out,
        g_q if gram_q else of_sums(0),
        g_k if gram_k else of_sums(0),
        k_side,
        q_side,
        rows,
        states,
        of_sums(x.shape[0]),
    )


def _empty_gradients(
    x: Tensor,
    weight: Tensor,
    shift: Tensor | None,
    c_e: Tensor | None,
    c_r: Tensor | None,
    bias: Tensor | None,
    *options: Any,
) -> tuple[Tensor, ...]:
    *_, of_x, of_weight = options
    small = (weight.new_empty(0) if t is None else t.new_empty(t.shape) for t in (c_e, c_r, bias))
    return (
        x.new_empty(x.shape if of_x else 0),
        weight.new_empty(weight.shape) if of_weight else x.new_empty(0),
        x.new_empty(0) if shift is None else shift.new_empty(shift.shape),
        *small,
    )


forward_composed = partial(compose_forward, IN_PIECES)
backward_composed = partial(compose_backward, IN_PIECES)
_forward = node.register(
    "projected_dual_causal",
    node.Signature(
        TENSORS,
        OPTIONS,
        "Tensor rows, Tensor states, Tensor inverse_n",
        spends=False,
    ),
    (forward_composed, backward_composed),
    (_empty_outputs, _empty_gradients),
    reference.projected_dual_causal_attention,
)
