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

from primal_attention.ops.gpu import on_gpu
from primal_attention.ops.landmarks import Landmarks
from primal_attention.ops.projected import node, reference
from primal_attention.ops.projected.passes import IN_PIECES, compose_backward, compose_forward
from primal_attention.ops.projected.reference import ProjectedResult
from primal_attention.precision import accumulation_dtype, exact

_INPUTS = 8  # those with gradients, which come first


def projected_attention(
    x: Tensor,  # [B, N, D]; read in the dtype of the weight by the projection
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


@exact
def forward_composed(
    x: Tensor,
    weight: Tensor,
    shift: Tensor | None,
    w_e: Tensor,
    w_r: Tensor,
    c_e: Tensor | None,
    c_r: Tensor | None,
    bias: Tensor | None,
    index: Tensor | None,
    scale: float,
    causal: bool,
    token_mask: Tensor | None,
    map_q: str,
    map_k: str,
    gram_q: bool,
    gram_k: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Outputs, and what the backward pass needs of their making."""
    given = x, weight, shift, w_e, w_r, c_e, c_r, bias, index, scale
    return compose_forward(IN_PIECES, *given, causal, token_mask, map_q, map_k, gram_q, gram_k)


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
    of_weights = partial(x.new_empty, dtype=accumulation_dtype(small))
    of_grams = partial(x.new_empty, dtype=accumulation_dtype(weight.dtype))
    of_tokens = partial(x.new_empty, dtype=weight.dtype)
    nothing = of_weights(0) if index is None else x.new_empty(0)
    C = next((c.shape[1] for c in (c_e, c_r) if c is not None), None)
    return (
        of_tokens(0 if C is None else (B, N, H, C)),
        *(of_grams((B, H, P, P) if gram else 0) for gram in (gram_q, gram_k)),
        *(of_weights((*lead, H, P, S)) for _ in range(2)),
        of_tokens(0 if x.dtype == weight.dtype else x.shape),
        of_tokens((B, N, 2, H, P)),
        *(nothing if c is None else of_weights((*lead, H, P, C)) for c in (c_e, c_r)),
    )


@exact
def backward_composed(
    x: Tensor,
    weight: Tensor,
    shift: Tensor | None,
    w_e: Tensor,
    w_r: Tensor,
    c_e: Tensor | None,
    c_r: Tensor | None,
    bias: Tensor | None,
    index: Tensor | None,
    scale: float,
    causal: bool,
    token_mask: Tensor | None,
    map_q: str,
    map_k: str,
    e: Tensor,
    r: Tensor,
    tokens: Tensor,
    qk: Tensor,
    a_e: Tensor,
    a_r: Tensor,
    d_out: Tensor | None,
    d_gram_q: Tensor | None,
    d_gram_k: Tensor | None,
    d_e: Tensor | None,
    d_r: Tensor | None,
    of_x: bool,
    of_weight: bool,
    spent: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the first eight inputs; empty where they are not given or not wanted.

    Where q, k, A_e and A_r are spent, nobody needs them afterwards, and the fused form writes over
    them.
    """
    given = x, weight, shift, w_e, w_r, c_e, c_r, bias, index, scale
    kept, d_outputs = (e, r, tokens, qk, a_e, a_r), (d_out, d_gram_q, d_gram_k, d_e, d_r)
    options = causal, token_mask, map_q, map_k
    return compose_backward(IN_PIECES, *given, *options, *kept, *d_outputs, of_x, of_weight, False)


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


def _backward_of_graph(x: Tensor, *given: Any) -> tuple[Tensor, ...]:
    gradients: tuple[Tensor, ...] = _backward(x, *given, node.is_let_go(x))
    return gradients


_forward = torch.library.custom_op(
    "primal_attention::projected_forward", forward_composed, mutates_args=()
)
_backward = torch.library.custom_op(
    "primal_attention::projected_backward", backward_composed, mutates_args=()
)
_forward.register_fake(_empty_outputs)
_backward.register_fake(_empty_gradients)
_forward.register_autograd(
    partial(node.gradients, _INPUTS, _backward_of_graph, reference.projected_attention),
    setup_context=node.save,
)
on_gpu(_forward, forward_composed, "primal_attention.ops.projected.triton", "forward")
on_gpu(_backward, backward_composed, "primal_attention.ops.projected.triton", "backward")
