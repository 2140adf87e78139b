"""The KSVD objective as one op with its own backward pass, which README.md derives.

Letters: B batch, H heads, P feature dim, S directions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from primal_attention.ops.flops import Call
from primal_attention.ops.gradients import are_differentiated, differentiable_gradients
from primal_attention.ops.ksvd import reference
from primal_attention.ops.op import Op
from primal_attention.precision import exact


def ksvd_objective(
    gram_q: Tensor,  # [B, H, P, P] = Phi_q^T Phi_q
    gram_k: Tensor,  # [B, H, P, P]
    w_e_given_x: Tensor,  # [B, H, P, S] or [H, P, S]
    w_r_given_x: Tensor,
    lambda_diag: Tensor,  # [H, S]
    trace: Tensor | None,  # [H]; None: that of the weights given X
    num_queries: Tensor,  # [B]: tokens behind gram_q
    num_keys: Tensor,  # [B]: tokens behind gram_k
    *,
    averaged: bool = True,
    lambda_squared: bool = False,
    squared: bool = True,
    half: bool = False,
) -> Tensor:
    """The same value as the reference: the mean of J^2, or of J, over the sequences.

    ``half`` says that the tokens behind the Gram matrices have half precision, so that products
    need not hold all digits of float32.
    """
    tensors = gram_q, gram_k, w_e_given_x, w_r_given_x, lambda_diag, trace, num_queries, num_keys
    dtype = gram_q.dtype
    alike = [x if x is None or x.dtype == dtype else x.to(dtype) for x in tensors]
    mean: Tensor
    mean, _, _ = _forward(*alike, averaged, lambda_squared, squared, half)
    return mean


@exact
def forward_composed(
    gram_q: Tensor,
    gram_k: Tensor,
    w_e: Tensor,
    w_r: Tensor,
    lambda_diag: Tensor,
    trace: Tensor | None,
    num_queries: Tensor,
    num_keys: Tensor,
    averaged: bool,
    lambda_squared: bool,
    squared: bool,
    half: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The mean, its derivative by each J, [B], and the energies of both sides, [2, B, H, S].

    The energies are divided by the numbers of tokens where J averages.
    """
    energies = _empty_outputs(gram_q, gram_k, w_e)[2]
    for energy, gram, w in zip(energies, (gram_q, gram_k), (w_e, w_r), strict=True):
        torch.sum((gram @ w).mul_(w), -2, out=energy)
    if averaged:
        energies /= torch.stack([num_queries, num_keys]).clamp_(min=1)[:, :, None, None]
    diagonal = (lambda_diag.square() if lambda_squared else lambda_diag) / (2 * len(lambda_diag))
    j = energies.sum(0).flatten(1) @ diagonal.flatten() - _mean_trace(w_e, w_r, trace)
    real = torch.minimum(num_queries, num_keys) > 0
    j = torch.where(real, j, 0.0)
    shares = real / real.sum().clamp_(min=1).to(j.dtype)  # of the sequences in the mean
    slopes = 2 * shares * j if squared else shares
    return slopes.dot(j) / 2 if squared else slopes.dot(j), slopes, energies


def _mean_trace(w_e: Tensor, w_r: Tensor, trace: Tensor | None) -> Tensor:
    """Tr(W_e^T W_r), the mean over the heads: of all sequences, or of each, [B]."""
    if trace is not None:
        return trace.mean()
    return (w_e * w_r).sum((-3, -2, -1)) / w_e.shape[-3]


def _empty_outputs(
    gram_q: Tensor, gram_k: Tensor, w_e: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    B, H, _, _ = gram_q.shape
    energies = gram_q.new_empty(2, B, H, w_e.shape[-1])
    return gram_q.new_empty(()), gram_q.new_empty(B), energies


@exact
def backward_composed(
    gram_q: Tensor,
    gram_k: Tensor,
    w_e: Tensor,
    w_r: Tensor,
    lambda_diag: Tensor,
    trace: Tensor | None,
    num_queries: Tensor,
    num_keys: Tensor,
    slopes: Tensor,  # [B]: derivative of the mean by each J
    energies: Tensor,  # [2, B, H, S]
    averaged: bool,
    lambda_squared: bool,
    d_mean: Tensor,
    half: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of both Gram matrices, of both weights, of Lambda and of the trace.

    The first two are stacked; the last is empty where there is no such input.
    """
    d_grams, d_weights, d_lambda, d_trace = _empty_gradients(
        gram_q, gram_k, w_e, w_r, lambda_diag, trace
    )
    d_j = slopes * (d_mean / len(lambda_diag))  # of the J of one head, [B]
    diagonal = (lambda_diag.square() if lambda_squared else lambda_diag) / 2
    sides = (gram_q, w_e, w_r, num_queries), (gram_k, w_r, w_e, num_keys)
    for (gram, w, other, num_tokens), d_gram, d_w in zip(sides, d_grams, d_weights, strict=True):
        factor = d_j / num_tokens.clamp(min=1) if averaged else d_j
        scaled = w * (factor[:, None, None] * diagonal)[:, :, None, :]  # W diag(c)
        torch.matmul(scaled, w.mT, out=d_gram)
        total = d_w if w.ndim == 4 else torch.empty_like(scaled)
        torch.matmul(gram + gram.mT, scaled, out=total)
        if trace is None:
            total.addcmul_(d_j[:, None, None, None], other, value=-1)
        if w.ndim == 3:
            torch.sum(total, 0, out=d_w)
    torch.mul(
        (d_j @ energies.sum(0).flatten(1)).view_as(lambda_diag),
        lambda_diag if lambda_squared else 0.5,
        out=d_lambda,
    )
    return d_grams, d_weights, d_lambda, d_trace.copy_(-d_j.sum())


def _empty_gradients(
    gram_q: Tensor,
    gram_k: Tensor,
    w_e: Tensor,
    w_r: Tensor,
    lambda_diag: Tensor,
    trace: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_grams, d_weights = gram_q.new_empty(2, *gram_q.shape), w_e.new_empty(2, *w_e.shape)
    d_trace = lambda_diag.new_empty(0 if trace is None else trace.shape)
    return d_grams, d_weights, lambda_diag.new_empty(lambda_diag.shape), d_trace


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.averaged, ctx.lambda_squared, ctx.squared, ctx.half = inputs
    _, *kept = output
    ctx.mark_non_differentiable(*kept)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *kept)


def _gradients(ctx: Any, d_mean: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, num_queries, num_keys, slopes, energies = ctx.saved_tensors
    counts, options = (num_queries, num_keys), (ctx.averaged, ctx.lambda_squared)
    grads: list[Tensor | None] = [None] * len(tensors)
    if d_mean is not None and are_differentiated():
        given = *counts, *options, ctx.squared
        grads = differentiable_gradients(lambda *t: [_mean(*t, *given)], tensors, [d_mean])
    elif d_mean is not None:
        stacked = _backward(*tensors, *counts, slopes, energies, *options, d_mean, ctx.half)
        d_grams, d_weights, d_lambda, d_trace = stacked
        computed = *d_grams, *d_weights, d_lambda, d_trace
        grads = [None if x is None else d for x, d in zip(tensors, computed, strict=True)]
    return (*grads, *[None] * 6)


def _mean(*inputs: Any) -> Tensor:
    """The reference, differentiable as often as one likes."""
    *tensors, averaged, lambda_squared, squared = inputs
    return reference.ksvd_objective(
        *tensors, averaged=averaged, lambda_squared=lambda_squared, squared=squared
    )


def _composition(*inputs: Any) -> tuple[Tensor, None, None]:
    return _mean(*inputs[:-1]), None, None


_forward = Op(
    "ksvd_forward",
    forward_composed,
    _empty_outputs,
    fused="primal_attention.ops.ksvd.triton.forward",
    gradients=_gradients,
    save=_save,
    composition=_composition,
)
_backward = Op(
    "ksvd_backward",
    backward_composed,
    _empty_gradients,
    fused="primal_attention.ops.ksvd.triton.backward",
    backward_of=(_composition, lambda *t: Call((*t[:8], *t[10:12], True, False), t[12:13])),
)
