r"""Tokens, projections, dual weights and attention as one op, whose backward pass is one too.

    q, k, h_e, h_r = W x + b        W_{e|X} = Phi_k^T H_r / n        W_{r|X} = Phi_q^T H_e / n

    out = phi_q(q) W_{e|X} C_e + phi_k(k) W_{r|X} C_r + bias

Letters: B batch, N tokens, D model dim, H heads, C head dim, P feature dim, S directions.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from primal_attention.ops.gpu import on_gpu
from primal_attention.ops.projected import ProjectedResult, node
from primal_attention.ops.projected_dual import reference
from primal_attention.ops.projected_dual.passes import (
    IN_PIECES,
    compose_backward,
    compose_forward,
)
from primal_attention.ops.projected_dual.reference import directions_of
from primal_attention.precision import accumulation_dtype, exact

_INPUTS = 6  # those with gradients, which come first


def projected_dual_attention(
    x: Tensor,  # [B, N, D]; read in the dtype of the weight by the projection
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
    """The same values as the reference; a Gram matrix that is not wanted comes back empty."""
    given = x, weight, shift, c_e, c_r, bias, num_heads
    outputs = _forward(*given, token_mask, map_q, map_k, gram_q, gram_k)
    return ProjectedResult(*outputs[: node.OUTPUTS])


@exact
def forward_composed(
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
    """Outputs, and what the backward pass needs of their making."""
    given = x, weight, shift, c_e, c_r, bias, num_heads
    return compose_forward(IN_PIECES, *given, token_mask, map_q, map_k, gram_q, gram_k)


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
    (B, N, _), R, H, S = x.shape, weight.shape[0], num_heads, directions_of(c_e, c_r)
    P, C = R // (2 * H) - S, next(c.shape[1] for c in (c_e, c_r) if c is not None)
    *_, gram_q, gram_k = options
    of_tokens = partial(x.new_empty, dtype=weight.dtype)
    of_sums = partial(x.new_empty, dtype=accumulation_dtype(weight.dtype))
    return (
        of_tokens((B, N, H, C)),
        *(of_sums((B, H, P, P) if gram else 0) for gram in (gram_q, gram_k)),
        *(of_sums((B, H, P, S)) for _ in range(2)),
        of_tokens(0 if x.dtype == weight.dtype else x.shape),
        of_tokens((B, N, R)),
        *(of_sums(0 if c is None else (B, H, P, C)) for c in (c_e, c_r)),
        of_sums(B),
    )


@exact
def backward_composed(
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
    spent: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the first six inputs; empty where they are not given or not wanted.

    Where the rows are spent, nobody needs them afterwards, and the fused form writes over them.
    """
    given = x, weight, shift, c_e, c_r, bias, num_heads, token_mask, map_q, map_k
    kept, d_outputs = (tokens, rows, a_e, a_r, inverse_n), (d_out, d_gram_q, d_gram_k, d_e, d_r)
    return compose_backward(IN_PIECES, *given, e, r, *kept, *d_outputs, of_x, of_weight, False)


def _empty_gradients(
    x: Tensor,
    weight: Tensor,
    shift: Tensor | None,
    c_e: Tensor | None,
    c_r: Tensor | None,
    bias: Tensor | None,
    *options: Any,
) -> tuple[Tensor, ...]:
    *_, of_x, of_weight, _ = options
    nothing = x.new_empty(0, dtype=accumulation_dtype(weight.dtype))
    return (
        x.new_empty(x.shape if of_x else 0),
        weight.new_empty(weight.shape) if of_weight else x.new_empty(0),
        x.new_empty(0) if shift is None else shift.new_empty(shift.shape),
        *(torch.empty_like(nothing if c is None else c) for c in (c_e, c_r)),
        weight.new_empty(0) if bias is None else torch.empty_like(bias),
    )


def _backward_of_graph(x: Tensor, *given: Any) -> tuple[Tensor, ...]:
    gradients: tuple[Tensor, ...] = _backward(x, *given, node.is_let_go(x))
    return gradients


_forward = torch.library.custom_op(
    "primal_attention::projected_dual_forward", forward_composed, mutates_args=()
)
_backward = torch.library.custom_op(
    "primal_attention::projected_dual_backward", backward_composed, mutates_args=()
)
_forward.register_fake(_empty_outputs)
_backward.register_fake(_empty_gradients)
_forward.register_autograd(
    partial(node.gradients, _INPUTS, _backward_of_graph, reference.projected_dual_attention),
    setup_context=node.save,
)
on_gpu(_forward, forward_composed, "primal_attention.ops.projected_dual.triton", "forward")
on_gpu(_backward, backward_composed, "primal_attention.ops.projected_dual.triton", "backward")
