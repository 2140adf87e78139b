"""Causal Primal-Attention of two ops, the running mean and ``primal``; fused on a GPU.

Only q and k are kept for the backward pass, which makes the means again.

Letters: B batch, N tokens, H heads, C head dim, P feature dim, S directions.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

import primal_attention.ops.primal
import primal_attention.ops.running_mean  # noqa: F401  (these two register the ops)
from primal_attention.ops.causal_primal.reference import CausalResult
from primal_attention.ops.causal_primal.sizes import FORWARD, block_sums, is_fused, key
from primal_attention.ops.gpu import on_gpu
from primal_attention.ops.gradients import differentiable_gradients
from primal_attention.ops.launch import empty_rows
from primal_attention.precision import accumulate, accumulation_dtype, exact

_ops = torch.ops.primal_attention


@exact
def causal_primal_attention(
    q: Tensor,  # [B, N, H, C]
    k: Tensor,
    w_e: Tensor,  # [H, P, S]
    w_r: Tensor,
    c_e: Tensor | None,  # [S, C]: the output map's part for e; None where e is not output
    c_r: Tensor | None,
    bias: Tensor | None,  # [C]
    q_before: Tensor | None,  # [B, H, C]: the sum over earlier tokens
    k_before: Tensor | None,
    *,
    counts: Tensor,  # [B, N], from token_counts
    token_mask: Tensor | None = None,  # [B, N], True = real token
    map_q: str = "cosine",
    map_k: str = "cosine",
    grams: bool = True,
) -> CausalResult:
    """The same values as the reference; Gram matrices that are not wanted come back empty."""
    a_e = None if c_e is None else accumulate(w_e) @ accumulate(c_e)  # [H, P, C]
    a_r = None if c_r is None else accumulate(w_r) @ accumulate(c_r)
    inputs = q, k, a_e, a_r, bias, q_before, k_before, counts, token_mask, map_q, map_k, grams
    return CausalResult(*_forward(*inputs)[:5])


def forward_of_two_ops(
    q: Tensor,
    k: Tensor,
    a_e: Tensor | None,
    a_r: Tensor | None,
    bias: Tensor | None,
    q_before: Tensor | None,
    k_before: Tensor | None,
    counts: Tensor,
    token_mask: Tensor | None,
    map_q: str,
    map_k: str,
    grams: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Outputs, Gram matrices, totals, and nothing in the place of the sums before each block."""
    q_mean, q_total = _ops.running_mean_forward(q, q_before, counts, token_mask)
    k_mean, k_total = _ops.running_mean_forward(k, k_before, counts, token_mask)
    out, gram_q, gram_k = _ops.primal_forward(
        q_mean, k_mean, a_e, a_r, bias, token_mask, map_q, map_k, grams, grams
    )
    return out, gram_q, gram_k, q_total, k_total, _nothing(q), _nothing(q)


def backward_of_two_ops(
    q: Tensor,
    k: Tensor,
    a_e: Tensor | None,
    a_r: Tensor | None,
    bias: Tensor | None,
    q_before: Tensor | None,
    k_before: Tensor | None,
    counts: Tensor,
    token_mask: Tensor | None,
    map_q: str,
    map_k: str,
    q_sums: Tensor,
    k_sums: Tensor,
    d_out: Tensor | None,
    d_gram_q: Tensor | None,
    d_gram_k: Tensor | None,
    d_q_total: Tensor | None,
    d_k_total: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the first seven inputs; empty where a_e, a_r or the bias is not given."""
    q_mean, q_total = _ops.running_mean_forward(q, q_before, counts, token_mask)
    k_mean, k_total = _ops.running_mean_forward(k, k_before, counts, token_mask)
    dq_mean, dk_mean, *weights = _ops.primal_backward(
        q_mean, k_mean, a_e, a_r, bias, token_mask, map_q, map_k, d_out, d_gram_q, d_gram_k
    )
    d_q_total = q_total.zero_() if d_q_total is None else d_q_total
    d_k_total = k_total.zero_() if d_k_total is None else d_k_total
    dq, d_q_before = _ops.running_mean_backward(dq_mean, d_q_total, counts, token_mask)
    dk, d_k_before = _ops.running_mean_backward(dk_mean, d_k_total, counts, token_mask)
    return dq, dk, *weights, d_q_before, d_k_before


def _nothing(q: Tensor) -> Tensor:
    return q.new_empty(0, dtype=accumulation_dtype(q.dtype))


def _empty_outputs(
    q: Tensor, k: Tensor, a_e: Tensor | None, a_r: Tensor | None, *options: Any
) -> tuple[Tensor, ...]:
    B, N, H, P = q.shape
    a = a_e if a_e is not None else a_r
    out = q.new_empty(0 if a is None else (B, N, H, a.shape[-1]))
    small = partial(q.new_empty, dtype=accumulation_dtype(q.dtype))
    *_, grams = options
    gram_shape = (B, H, P, P) if grams else (0,)
    outputs = out, small(gram_shape), small(gram_shape), small((B, H, P)), small((B, H, P))
    if not is_fused(q, k, a_e, a_r):
        return *outputs, _nothing(q), _nothing(q)
    block = FORWARD[key(q, a_e, a_r)].block
    return *outputs, block_sums(q, block), block_sums(q, block)


def _empty_gradients(
    q: Tensor,
    k: Tensor,
    a_e: Tensor | None,
    a_r: Tensor | None,
    bias: Tensor | None,
    *options: Any,
) -> tuple[Tensor, ...]:
    B, _, H, P = q.shape
    given = [q.new_empty(0) if x is None else empty_rows(x) for x in (a_e, a_r, bias)]
    small = partial(q.new_empty, (B, H, P), dtype=accumulation_dtype(q.dtype))
    return empty_rows(q), empty_rows(k), *given, small(), small()


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.map_q, ctx.map_k, ctx.grams = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output[-2:])


def _gradients(ctx: Any, *d_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, counts, token_mask, q_sums, k_sums = ctx.saved_tensors
    d_outputs = tuple(None if d is None or not d.numel() else d for d in d_outputs[:5])
    options = counts, token_mask, ctx.map_q, ctx.map_k
    grads: list[Tensor | None]
    if torch.is_grad_enabled():
        run: Any = forward_of_two_ops  # itself differentiable, as often as one likes
        grads = differentiable_gradients(
            lambda *x: run(*x, *options, ctx.grams)[:5], tensors, d_outputs
        )
    else:
        computed = _backward(*tensors, *options, q_sums, k_sums, *d_outputs)
        grads = [None if x is None else d for x, d in zip(tensors, computed, strict=True)]
    return (*grads, *[None] * 5)


_forward = torch.library.custom_op(
    "primal_attention::causal_primal_forward", forward_of_two_ops, mutates_args=()
)
_backward = torch.library.custom_op(
    "primal_attention::causal_primal_backward", backward_of_two_ops, mutates_args=()
)
_forward.register_fake(_empty_outputs)
_backward.register_fake(_empty_gradients)
_forward.register_autograd(_gradients, setup_context=_save)
on_gpu(_forward, forward_of_two_ops, "primal_attention.ops.causal_primal.triton", "forward")
on_gpu(_backward, backward_of_two_ops, "primal_attention.ops.causal_primal.triton", "backward")
