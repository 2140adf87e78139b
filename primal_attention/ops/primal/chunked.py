"""Primal-Attention in the collapsed form, in pieces, with its own backward pass.

The scores are linear in the features, so neither they nor their concatenation need exist:

    out = phi_q A_e + phi_k A_r + b        A_e = W_{e|X} C_e,  A_r = W_{r|X} C_r

Only q and k are kept; phi is recomputed piece by piece. README.md derives the backward pass.

Letters: B batch, N tokens, H heads, C head dim, P feature dim, S directions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from primal_attention.feature_maps import FIXED_MAPS
from primal_attention.ops.chunks import (
    Scratch,
    add_product,
    head_first,
    mask_of,
    token_chunks,
    zeroed,
)
from primal_attention.ops.collapse import collapse
from primal_attention.ops.features import features_of
from primal_attention.ops.flops import Call
from primal_attention.ops.gradients import (
    are_differentiated,
    differentiable_gradients,
    with_options,
)
from primal_attention.ops.op import Op
from primal_attention.ops.primal.piece_gradients import d_features, d_outputs, twice
from primal_attention.ops.primal.reference import PrimalResult
from primal_attention.precision import accumulate, accumulation_dtype, exact


def primal_attention(
    q: Tensor,  # [B, N, H, C]
    k: Tensor,  # [B, N, H, C]
    w_e_given_x: Tensor,  # [B, H, P, S] or [H, P, S]
    w_r_given_x: Tensor,
    c_e: Tensor | None,  # [S, C]: the output map's part for e; None where e is not output
    c_r: Tensor | None,
    bias: Tensor | None = None,  # [C]
    *,
    token_mask: Tensor | None = None,  # [B, N], True = real token
    map_q: str = "cosine",
    map_k: str = "cosine",
    gram_q: bool = True,
    gram_k: bool = True,
) -> PrimalResult:
    """The same values as the reference; a Gram matrix that is not wanted comes back empty."""
    return collapsed_attention(
        q,
        k,
        *collapse(w_e_given_x, w_r_given_x, c_e, c_r),
        bias,
        token_mask=token_mask,
        map_q=map_q,
        map_k=map_k,
        gram_q=gram_q,
        gram_k=gram_k,
    )


def collapsed_attention(
    q: Tensor,  # [B, N, H, C]
    k: Tensor,  # [B, N, H, C]
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
    """Primal-Attention from the products A_e, A_r of the weights and the output map."""
    return PrimalResult(*_forward(q, k, a_e, a_r, bias, token_mask, map_q, map_k, gram_q, gram_k))


def gram(z: Tensor, *, token_mask: Tensor | None = None, feature_map: str = "cosine") -> Tensor:
    """Phi^T Phi [B, H, P, P] of queries or keys z [B, N, H, C] over the real tokens."""
    gram_z: Tensor
    _, gram_z, _ = _forward(z, None, None, None, None, token_mask, feature_map, "", True, False)
    return gram_z


class _Side(NamedTuple):
    """Queries or keys, with what is done to their features."""

    z: Tensor | None
    a: Tensor | None  # [B, H, P, C] or [H, P, C]
    feature_map: str


def _side(z: Tensor | None, a: Tensor | None, feature_map: str) -> _Side:
    """With A in the dtype of the sums."""
    return _Side(z, None if a is None else accumulate(a), feature_map)


@exact
def forward_in_pieces(
    q: Tensor,
    k: Tensor | None,
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
    out, *grams = empty_outputs(q, k, a_e, a_r, bias, token_mask, map_q, map_k, gram_q, gram_k)
    for gram_z in grams:
        gram_z.zero_()
    sides, scratch = (_side(q, a_e, map_q), _side(k, a_r, map_k)), Scratch(q)
    for piece in token_chunks(q):
        total = None
        for side, gram_z in zip(sides, grams, strict=True):
            if side.z is None or (side.a is None and not gram_z.numel()):
                continue
            phi = features_of(side.z, piece, token_mask, side.feature_map, scratch).phi
            if gram_z.numel():
                add_product(gram_z, phi.mT, phi)
            if side.a is not None:
                if total is None:
                    total = scratch.product("total", phi, side.a)
                else:
                    add_product(total, phi, side.a)
        if total is not None and out.numel():
            _write_outputs(total, bias, mask_of(token_mask, piece), out[:, piece].transpose(1, 2))
    return out, grams[0], grams[1]


def _write_outputs(total: Tensor, bias: Tensor | None, mask: Tensor | None, out: Tensor) -> None:
    """Outputs of one piece, [B, H, n, C]: the total and the bias, zero at padded tokens."""
    if bias is not None and mask is None and out.dtype == total.dtype:
        torch.add(total, bias, out=out)
    else:
        out.copy_(zeroed(total if bias is None else total.add_(accumulate(bias)), mask))


def empty_outputs(
    q: Tensor, k: Tensor | None, a_e: Tensor | None, a_r: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The outputs and Gram matrices, unwritten."""
    B, N, H, P = q.shape
    a = a_e if a_e is not None else a_r
    out = q.new_empty(0 if a is None else (B, N, H, a.shape[-1]))
    dtype = accumulation_dtype(q.dtype)
    *_, gram_q, gram_k = options
    grams = [q.new_empty((B, H, P, P) if gram else (0,), dtype=dtype) for gram in (gram_q, gram_k)]
    return out, grams[0], grams[1]


@exact
def backward_in_pieces(
    q: Tensor,
    k: Tensor | None,
    a_e: Tensor | None,
    a_r: Tensor | None,
    bias: Tensor | None,
    token_mask: Tensor | None,
    map_q: str,
    map_k: str,
    d_out: Tensor | None,
    d_gram_q: Tensor | None,
    d_gram_k: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, a_e, a_r and bias; empty where there is no such input."""
    grads = _empty_gradients(q, k, a_e, a_r, bias)
    d_outputs = d_out, d_gram_q, d_gram_k
    write_gradients(q, k, a_e, a_r, bias, token_mask, map_q, map_k, *d_outputs, grads)
    return grads


def write_gradients(
    q: Tensor,
    k: Tensor | None,
    a_e: Tensor | None,
    a_r: Tensor | None,
    bias: Tensor | None,
    token_mask: Tensor | None,
    map_q: str,
    map_k: str,
    d_out: Tensor | None,
    d_gram_q: Tensor | None,
    d_gram_k: Tensor | None,
    grads: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
) -> None:
    """Write the gradients of q, k, a_e, a_r and bias, which may be written over these."""
    dq, dk, da_e, da_r, d_bias = grads
    sides = (
        (_side(q, a_e, map_q), twice(d_gram_q), dq, _sums_like(q, a_e)),
        (_side(k, a_r, map_k), twice(d_gram_k), dk, _sums_like(q, a_r)),
    )
    bias_sum, scratch = torch.zeros_like(accumulate(d_bias)), Scratch(q)
    for piece in token_chunks(q):
        dy = None if d_out is None else d_outputs(d_out, piece, token_mask, scratch)
        if bias is not None and dy is not None:
            bias_sum += dy.sum((0, 1, 2))
        for side, both, dz, da in sides:
            if side.z is not None:
                features = features_of(side.z, piece, token_mask, side.feature_map, scratch)
                d_phi = d_features(features.phi, side.a, dy, both, da, scratch)
                features.pull_back(d_phi, dz[:, piece], scratch)
    d_bias.copy_(bias_sum)
    for target, (*_, total) in zip((da_e, da_r), sides, strict=True):
        target.copy_(total.sum_to_size(target.shape))


def _sums_like(q: Tensor, a: Tensor | None) -> Tensor:
    """Zeros for the gradient of A, of each sequence by itself."""
    if a is None:
        return q.new_zeros(0)
    return q.new_zeros((q.shape[0], *a.shape[-3:]), dtype=accumulation_dtype(a.dtype))


def _empty_gradients(
    q: Tensor,
    k: Tensor | None,
    a_e: Tensor | None,
    a_r: Tensor | None,
    bias: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, da_e, da_r, d_bias = (
        q.new_empty(0) if x is None else torch.empty_like(x) for x in (q, k, a_e, a_r, bias)
    )
    return dq, dk, da_e, da_r, d_bias


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.map_q, ctx.map_k, ctx.gram_q, ctx.gram_k = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, *d_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, token_mask = ctx.saved_tensors
    d_outputs = tuple(None if d is None or not d.numel() else d for d in d_outputs)
    maps = token_mask, ctx.map_q, ctx.map_k
    grads: list[Tensor | None]
    if are_differentiated():
        whole = with_options(in_one_piece, *maps)
        grads = differentiable_gradients(whole, tensors, d_outputs)
    else:
        computed = _backward(*tensors, *maps, *d_outputs)
        grads = [None if x is None else d for x, d in zip(tensors, computed, strict=True)]
    return (*grads, *[None] * 5)


@exact
def in_one_piece(
    q: Tensor,
    k: Tensor | None,
    a_e: Tensor | None,
    a_r: Tensor | None,
    bias: Tensor | None,
    token_mask: Tensor | None,
    map_q: str,
    map_k: str,
    gram_q: bool = True,
    gram_k: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """The collapsed form in one piece, differentiable as often as one likes."""
    whole = slice(0, q.shape[1])
    mask = mask_of(token_mask, whole)
    out = q.new_zeros(()) if bias is None else accumulate(bias)
    grams = []
    sides = (_side(q, a_e, map_q), gram_q), (_side(k, a_r, map_k), gram_k)
    for side, wanted in sides:
        if side.z is None:
            grams.append(q.new_empty(0))
            continue
        phi = zeroed(FIXED_MAPS[side.feature_map].forward(head_first(side.z, whole)), mask)
        grams.append(phi.mT @ phi if wanted else phi.new_empty(0))
        if side.a is not None:
            out = out + phi @ side.a
    if out.ndim == 4:
        out = zeroed(out, mask).transpose(1, 2)
    return out.to(q.dtype), grams[0], grams[1]


_forward = Op(
    "primal_forward",
    forward_in_pieces,
    empty_outputs,
    fused="primal_attention.ops.primal.triton.forward",
    gradients=_gradients,
    save=_save,
    composition=in_one_piece,
)
_backward = Op(
    "primal_backward",
    backward_in_pieces,
    _empty_gradients,
    fused="primal_attention.ops.primal.triton.backward",
    backward_of=(in_one_piece, lambda *t: Call(t[:8], t[8:])),
)
