r"""Tokens, projections, weights and attention as one op, so that its backward pass is one too.

    q, k = W x + b        W_{e|X} = X'^T w_e or w_e        out = phi_q(q) A_e + phi_k(k) A_r + bias

The gradients of q and k lie side by side, so that each of x, W and b gets its own at once; what the
landmarks add to that of x is added at their rows alone.

Letters: B batch, N tokens, D model dim, H heads, C head dim, P feature dim, S directions,
M landmarks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from primal_attention.ops.landmarks import Landmarks
from primal_attention.ops.projected import node, reference
from primal_attention.ops.projected.passes import IN_PIECES, compose_backward, compose_forward
from primal_attention.ops.projected.reference import ProjectedResult
from primal_attention.precision import accumulation_dtype, operand_dtype


def projected_attention(
    x: Tensor,  # [B, N, D], in the dtype of the weight
    weight: Tensor,  # [2 H P, D]: of the queries, then of the keys
    shift: Tensor | None,  # [2 H P]
    w_e: Tensor,  # [H, M, S] with landmarks, [H, P, S] without
    w_r: Tensor,
    c_e: Tensor | None,  # [S, C]: the output map's part for e; None where e is not output
    c_r: Tensor | None,
    bias: Tensor | None = None,  # [C]
    landmarks: Landmarks | None = None,  # of x; None for weights that are the parameters
    *,
    causal: bool = False,  # q and k become their means up to each token
    token_mask: Tensor | None = None,  # [B, N], True = real token
    map_q: str = "cosine",
    map_k: str = "cosine",
    gram_q: bool = True,
    gram_k: bool = True,
) -> ProjectedResult:
    """The same values as the reference; a Gram matrix that is not wanted comes back empty."""
    index, scale = (None, 1.0) if landmarks is None else landmarks[1:]
    given = x, weight, shift, w_e, w_r, c_e, c_r, bias, index, scale
    outputs = _forward(*given, causal, token_mask, map_q, map_k, gram_q, gram_k)
    return ProjectedResult(*outputs[: node.OUTPUTS])


def _empty_outputs(
    x: Tensor,
    weight: Tensor,
    shift: Tensor | None,
    w_e: Tensor,
    w_r: Tensor,
    c_e: Tensor | None,
    c_r: Tensor | None,
    bias: Tensor | None,
    index: Tensor | None,
    *options: Any,
) -> tuple[Tensor, ...]:
    (B, N, _), (H, _, S), P = x.shape, w_e.shape, weight.shape[0] // (2 * w_e.shape[0])
    *_, gram_q, gram_k = options
    lead, small = ((), w_e.dtype) if index is None else ((B,), x.dtype)
    sums = accumulation_dtype(small)
    of_weights = partial(x.new_empty, dtype=sums)
    of_a = partial(x.new_empty, dtype=sums if index is None else operand_dtype(x.dtype, sums))
    of_grams = partial(x.new_empty, dtype=accumulation_dtype(x.dtype))
    nothing = of_weights(0) if index is None else x.new_empty(0)
    C = next((c.shape[1] for c in (c_e, c_r) if c is not None), None)
    return (
        x.new_empty(0 if C is None else (B, N, H, C)),
        *(of_grams((B, H, P, P) if gram else 0) for gram in (gram_q, gram_k)),
        *(of_weights((*lead, H, P, S)) for _ in range(2)),
        x.new_empty((B, N, 2, H, P)),
        *(nothing if c is None else of_a((*lead, H, P, C)) for c in (c_e, c_r)),
    )


def _empty_gradients(
    x: Tensor,
    weight: Tensor,
    shift: Tensor | None,
    w_e: Tensor,
    w_r: Tensor,
    c_e: Tensor | None,
    c_r: Tensor | None,
    bias: Tensor | None,
    index: Tensor | None,
    *options: Any,
) -> tuple[Tensor, ...]:
    *_, of_x, of_weight, _ = options
    small = accumulation_dtype(x.dtype) if index is not None else w_e.dtype
    return (
        x.new_empty(x.shape if of_x else 0),
        weight.new_empty(weight.shape) if of_weight else x.new_empty(0),
        x.new_empty(0) if shift is None else shift.new_empty(shift.shape),
        *(w.new_empty(w.shape) for w in (w_e, w_r)),
        *(torch.empty_like(x.new_empty(0, dtype=small) if c is None else c) for c in (c_e, c_r)),
        weight.new_empty(0) if bias is None else torch.empty_like(bias),
    )


forward_composed = partial(compose_forward, IN_PIECES)
backward_composed = partial(compose_backward, IN_PIECES)
_forward = node.register(
    "projected",
    node.Signature(
        tensors="Tensor x, Tensor weight, Tensor? shift, Tensor w_e, Tensor w_r, "
        "Tensor? c_e, Tensor? c_r, Tensor? bias",
        options="Tensor? index, float scale, bool causal, Tensor? token_mask, str map_q, str map_k",
        kept="Tensor qk, Tensor a_e, Tensor a_r",
    ),
    (forward_composed, backward_composed),
    (_empty_outputs, _empty_gradients),
    reference.projected_attention,
)
