"""Primal-Attention of queries and keys that one projection left side by side.

They are read where they lie, and their gradients come back side by side.

Letters: B batch, N tokens, H heads, C head dim, P feature dim.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from primal_attention.ops.gpu import on_gpu
from primal_attention.ops.gradients import differentiable_gradients
from primal_attention.ops.primal.chunked import (
    empty_outputs,
    forward_in_pieces,
    in_one_piece,
    write_gradients,
)
from primal_attention.ops.primal.reference import PrimalResult
from primal_attention.precision import exact


def packed_attention(
    qk: Tensor,  # [B, N, 2, H, C]: queries, then keys
    a_e: Tensor | None,  # [B, H, P, C] or [H, P, C]; None where e is not output
    a_r: Tensor | None,
    bias: Tensor | None = None,  # [C]
    *,
    token_mask: Tensor | None = None,  # [B, N], True = real token
    map_q: str = "cosine",
    map_k: str = "cosine",
    gram_q: bool = True,
    gram_k: bool = True,
) -> PrimalResult:
    """The same values as :func:`collapsed_attention`."""
    return PrimalResult(*_forward(qk, a_e, a_r, bias, token_mask, map_q, map_k, gram_q, gram_k))


def forward_packed(
    qk: Tensor,
    a_e: Tensor | None,
    a_r: Tensor | None,
    bias: Tensor | None,
    token_mask: Tensor | None,
    map_q: str,
    map_k: str,
    gram_q: bool,
    gram_k: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs and Gram matrices; empty where they are not wanted."""
    q, k = qk.unbind(2)
    options = token_mask, map_q, map_k, gram_q, gram_k
    return forward_in_pieces(q, k, a_e, a_r, bias, *options)


def _empty_outputs(qk: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k = qk.unbind(2)
    return empty_outputs(q, k, *rest)


@exact
def backward_packed(
    qk: Tensor,
    a_e: Tensor | None,
    a_r: Tensor | None,
    bias: Tensor | None,
    token_mask: Tensor | None,
    map_q: str,
    map_k: str,
    d_out: Tensor | None,
    d_gram_q: Tensor | None,
    d_gram_k: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of qk, a_e, a_r and bias; empty where there is no such input."""
    grads = _empty_gradients(qk, a_e, a_r, bias)
    (q, k), (dq, dk) = qk.unbind(2), grads[0].unbind(2)
    maps, d_outputs = (token_mask, map_q, map_k), (d_out, d_gram_q, d_gram_k)
    write_gradients(q, k, a_e, a_r, bias, *maps, *d_outputs, (dq, dk, *grads[1:]))
    return grads


def _empty_gradients(
    qk: Tensor, a_e: Tensor | None, a_r: Tensor | None, bias: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_qk, da_e, da_r, d_bias = (
        qk.new_empty(0) if x is None else torch.empty_like(x) for x in (qk, a_e, a_r, bias)
    )
    return d_qk, da_e, da_r, d_bias


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.map_q, ctx.map_k, ctx.gram_q, ctx.gram_k = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, *d_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, token_mask = ctx.saved_tensors
    d_outputs = tuple(None if d is None or not d.numel() else d for d in d_outputs)
    maps = token_mask, ctx.map_q, ctx.map_k
    grads: list[Tensor | None]
    if torch.is_grad_enabled():
        grads = differentiable_gradients(partial(_whole, *maps), tensors, d_outputs)
    else:
        computed = _backward(*tensors, *maps, *d_outputs)
        grads = [None if x is None else d for x, d in zip(tensors, computed, strict=True)]
    return (*grads, *[None] * 5)


def _whole(
    token_mask: Tensor | None, map_q: str, map_k: str, qk: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return in_one_piece(token_mask, map_q, map_k, *qk.unbind(2), *rest)


_forward = torch.library.custom_op(
    "primal_attention::primal_packed_forward", forward_packed, mutates_args=()
)
_backward = torch.library.custom_op(
    "primal_attention::primal_packed_backward", backward_packed, mutates_args=()
)
_forward.register_fake(_empty_outputs)
_backward.register_fake(_empty_gradients)
_forward.register_autograd(_gradients, setup_context=_save)
on_gpu(_forward, forward_packed, "primal_attention.ops.primal.triton_packed", "forward")
on_gpu(_backward, backward_packed, "primal_attention.ops.primal.triton_packed", "backward")
