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

from primal_attention.ops.projected import ProjectedResult, node
from primal_attention.ops.projected_dual import reference
from primal_attention.ops.projected_dual.passes import (
    IN_PIECES,
    compose_backward,
    compose_forward,
)
from primal_attention.ops.projected_dual.reference import directions_of
from primal_attention.precision import accumulation_dtype, operand_dtype

TENSORS = "Tensor x, Tensor weight, Tensor? shift, Tensor? c_e, Tensor? c_r, Tensor? bias"
OPTIONS = "int num_heads, Tensor? token_mask, str map_q, str map_k"


def projected_dual_attention(
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
    """The same values as the reference; a Gram matrix that is not wanted comes back empty."""
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
    (B, N, _), R, H, S = x.shape, weight.shape[0], num_heads, directions_of(c_e, c_r)
    P, C = R // (2 * H) - S, next(c.shape[1] for c in (c_e, c_r) if c is not None)
    *_, gram_q, gram_k = options
    sums = accumulation_dtype(x.dtype)
    of_sums, of_a = (partial(x.new_empty, dtype=t) for t in (sums, operand_dtype(x.dtype, sums)))
    return (
        x.new_empty((B, N, H, C)),
        *(of_sums((B, H, P, P) if gram else 0) for gram in (gram_q, gram_k)),
        *(of_sums((B, H, P, S)) for _ in range(2)),
        x.new_empty((B, N, R)),
        *(of_sums(0) if c is None else of_a((B, H, P, C)) for c in (c_e, c_r)),
        of_sums(B),
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
    *_, of_x, of_weight, _ = options
    nothing = x.new_empty(0, dtype=accumulation_dtype(x.dtype))
    return (
        x.new_empty(x.shape if of_x else 0),
        weight.new_empty(weight.shape) if of_weight else x.new_empty(0),
        x.new_empty(0) if shift is None else shift.new_empty(shift.shape),
        *(torch.empty_like(nothing if c is None else c) for c in (c_e, c_r)),
        weight.new_empty(0) if bias is None else torch.empty_like(bias),
    )


forward_composed = partial(compose_forward, IN_PIECES)
backward_composed = partial(compose_backward, IN_PIECES)
_forward = node.register(
    "projected_dual",
    node.Signature(TENSORS, OPTIONS, "Tensor rows, Tensor a_e, Tensor a_r, Tensor inverse_n"),
    (forward_composed, backward_composed),
    (_empty_outputs, _empty_gradients),
    reference.projected_dual_attention,
)
