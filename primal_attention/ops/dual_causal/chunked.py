"""Causal Primal-Attention with dual weights in pieces of the sequence, with its own backward pass.

Inside a piece the kernel matrix is small and dense, and serves both sides; between pieces only the
two sums are carried. The forward pass keeps them for the backward pass, which thus walks over the
sequence once, from its end. README.md derives it.

Letters: B batch, N tokens, H heads, C head dim, P features, S directions, V outputs of a head,
n tokens of a piece.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from primal_attention.ops.chunks import head_first
from primal_attention.ops.dual_causal import pieces
from primal_attention.ops.dual_causal.pieces import Pieces, Side
from primal_attention.ops.dual_causal.reference import DualCausalResult
from primal_attention.ops.dual_causal.sizes import FORWARD, dims, fused_states, is_fused, key
from primal_attention.ops.flops import Call
from primal_attention.ops.gradients import (
    are_differentiated,
    differentiable_gradients,
    with_options,
)
from primal_attention.ops.launch import empty_rows
from primal_attention.ops.op import Op
from primal_attention.precision import accumulate, accumulation_dtype, exact


def dual_causal_attention(
    q: Tensor,  # [B, N, H, C]
    k: Tensor,
    h: Tensor,  # [B, N, 2, H, S]: h_e and h_r
    c_e: Tensor | None,  # [S, V]: the output map's part for e; None where e is not output
    c_r: Tensor | None,
    bias: Tensor | None,  # [V]
    q_before: Tensor | None,  # [B, H, P, S]: the sum of phi_q h_e^T over earlier tokens
    k_before: Tensor | None,
    *,
    counts: Tensor,  # [B, N]: real tokens up to each
    token_mask: Tensor | None = None,  # [B, N], True = real token
    map_q: str = "cosine",
    map_k: str = "cosine",
    grams: bool = True,
) -> DualCausalResult:
    """The same values as the reference; Gram matrices that are not wanted come back empty."""
    tensors = q, k, h, c_e, c_r, bias, q_before, k_before
    if c_e is None and c_r is None:
        raise ValueError("c_e and c_r are both None: give the map of one side at least")
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    return DualCausalResult(
        *_forward(*tensors, counts, token_mask, map_q, map_k, grams, keep)[:5]  # not the states
    )


@exact
def forward_in_pieces(
    q: Tensor,
    k: Tensor,
    h: Tensor,
    c_e: Tensor | None,
    c_r: Tensor | None,
    bias: Tensor | None,
    q_before: Tensor | None,
    k_before: Tensor | None,
    counts: Tensor,
    token_mask: Tensor | None,
    map_q: str,
    map_k: str,
    grams: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Outputs, sums after the last token, Gram matrices, and the sums before each piece."""
    tokens = Pieces(q, k, h, counts, token_mask, (map_q, map_k))
    results = _room_for_outputs(q, h, c_e, c_r, grams)
    out, q_side, k_side, gram_q, gram_k = results
    _start(q_side, q_before)
    _start(k_side, k_before)
    gram_q.zero_(), gram_k.zero_()
    c_e, c_r = _score_maps(c_e, c_r)
    states = _room_for_states(q, h, keep)
    for number, piece in enumerate(tokens.slices):
        queries, keys = tokens.sides(piece)
        read = queries.read(keys, k_side) @ c_e + keys.read(queries, q_side) @ c_r
        read = read * tokens.share(piece)
        read = read if bias is None else read + accumulate(bias)
        out[:, piece] = tokens.zeroed(read, piece).transpose(1, 2)
        if keep:
            states[:, number, :, 0], states[:, number, :, 1] = q_side, k_side
        q_side += queries.phi.mT @ queries.h
        k_side += keys.phi.mT @ keys.h
        if grams:
            gram_q += queries.phi.mT @ queries.phi
            gram_k += keys.phi.mT @ keys.phi
    return *results, states


def _start(total: Tensor, before: Tensor | None) -> None:
    total.zero_() if before is None else total.copy_(before)


def _score_maps(c_e: Tensor | None, c_r: Tensor | None) -> tuple[Tensor, Tensor]:
    """C_e and C_r, zero where a side is not output."""
    given = [accumulate(c) for c in (c_e, c_r) if c is not None]
    e, r = (torch.zeros_like(given[0]) if c is None else accumulate(c) for c in (c_e, c_r))
    return e, r


@exact
def backward_in_pieces(
    q: Tensor,
    k: Tensor,
    h: Tensor,
    c_e: Tensor | None,
    c_r: Tensor | None,
    bias: Tensor | None,
    q_before: Tensor | None,
    k_before: Tensor | None,
    counts: Tensor,
    token_mask: Tensor | None,
    map_q: str,
    map_k: str,
    states: Tensor,
    d_out: Tensor,
    d_q_side: Tensor | None,
    d_k_side: Tensor | None,
    d_gram_q: Tensor | None,
    d_gram_k: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the first eight inputs; empty where one of the last five is not given."""
    grads = empty_rows(q), empty_rows(k), empty_rows(h)
    given = q, k, h, c_e, c_r, bias, q_before, k_before, counts, token_mask, map_q, map_k, states
    small = write_gradients(*given, d_out, d_q_side, d_k_side, d_gram_q, d_gram_k, grads)
    return *grads, *small


def write_gradients(
    q: Tensor,
    k: Tensor,
    h: Tensor,
    c_e: Tensor | None,
    c_r: Tensor | None,
    bias: Tensor | None,
    q_before: Tensor | None,
    k_before: Tensor | None,
    counts: Tensor,
    token_mask: Tensor | None,
    map_q: str,
    map_k: str,
    states: Tensor,
    d_out: Tensor,
    d_q_side: Tensor | None,
    d_k_side: Tensor | None,
    d_gram_q: Tensor | None,
    d_gram_k: Tensor | None,
    d_tokens: tuple[Tensor, Tensor, Tensor],  # of q, k and h, written
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Write the gradients of the tokens; those of c_e, c_r, the bias and both sums come back."""
    tokens = Pieces(q, k, h, counts, token_mask, (map_q, map_k))
    given, (dq, dk, dh) = (c_e, c_r, bias, q_before, k_before), d_tokens
    dq_side, dk_side = (_room_for_sums(q, h) for _ in range(2))
    _start(dq_side, d_q_side)
    _start(dk_side, d_k_side)
    c_e, c_r = _score_maps(c_e, c_r)
    sums = torch.zeros_like(c_e), torch.zeros_like(c_r), c_e.new_zeros(c_e.shape[-1])
    both_q, both_k = (None if d is None else d + d.mT for d in (d_gram_q, d_gram_k))
    for number, piece in reversed(list(enumerate(tokens.slices))):
        (queries, keys), (q_side, k_side) = tokens.sides(piece), states[:, number].unbind(2)
        dy = tokens.zeroed(head_first(d_out, piece), piece)
        sums[2].add_(dy.sum((0, 1, 2)))
        dy = dy * tokens.share(piece)
        sums[0].add_((queries.read(keys, k_side).mT @ dy).sum((0, 1)))
        sums[1].add_((keys.read(queries, q_side).mT @ dy).sum((0, 1)))
        d_e, d_r = dy @ c_e.mT, dy @ c_r.mT
        d_kernel = (d_e @ keys.h.mT).tril_() + (queries.h @ d_r.mT).triu_()
        d_phi_q = _d_phi(queries, keys, d_kernel, d_e @ k_side.mT, dq_side, both_q)
        d_phi_k = _d_phi(keys, queries, d_kernel.mT, d_r @ q_side.mT, dk_side, both_k)
        dq[:, piece], dk[:, piece] = tokens.pull_back(d_phi_q, d_phi_k, piece)
        dh[:, piece, 0] = (queries.later @ d_r + queries.phi @ dq_side).transpose(1, 2)
        dh[:, piece, 1] = (keys.later @ d_e + keys.phi @ dk_side).transpose(1, 2)
        dq_side += keys.phi.mT @ d_r
        dk_side += queries.phi.mT @ d_e
    small = _empty_small(q, h, *given)
    for grad, total in zip(small, (*sums, dq_side, dk_side), strict=True):
        if grad.numel():
            grad.copy_(total)
    return small


def _d_phi(
    near: Side,
    far: Side,
    d_kernel: Tensor,
    from_before: Tensor,
    d_after: Tensor,
    both: Tensor | None,  # dG + dG^T
) -> Tensor:
    """Gradient of the features of one side."""
    d_phi = d_kernel @ far.phi + from_before + near.h @ d_after.mT
    return d_phi if both is None else d_phi + near.phi @ both


def _room_for_outputs(
    q: Tensor, h: Tensor, c_e: Tensor | None, c_r: Tensor | None, grams: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    (B, N, H, _), (P, S, V) = q.shape, dims(q, h, c_e, c_r)
    small = partial(q.new_empty, dtype=accumulation_dtype(q.dtype))
    side, gram = (B, H, P, S), (B, H, P, P) if grams else (0,)
    return q.new_empty((B, N, H, V)), small(side), small(side), small(gram), small(gram)


def _room_for_states(q: Tensor, h: Tensor, keep: bool) -> Tensor:
    """For the sums before each piece, [B, pieces, H, 2, P, S]."""
    B, N, H, P = q.shape
    shape = (B, -(-N // pieces.PIECE), H, 2, P, h.shape[-1]) if keep else (0,)
    return q.new_empty(shape, dtype=accumulation_dtype(q.dtype))


def empty_outputs(
    q: Tensor, k: Tensor, h: Tensor, c_e: Tensor | None, c_r: Tensor | None, *options: Any
) -> tuple[Tensor, ...]:
    """What the compiler is told of the outputs."""
    *_, grams, keep = options
    states = _room_for_states(q, h, keep)
    if keep and is_fused(q, k, h, c_e, c_r, *options):
        states = fused_states(q, h, FORWARD[key(q, h, c_e, c_r)].block)
    return *_room_for_outputs(q, h, c_e, c_r, grams), states


def _empty_gradients(
    q: Tensor, k: Tensor, h: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return empty_rows(q), empty_rows(k), empty_rows(h), *_empty_small(q, h, *rest[:5])


def _empty_small(
    q: Tensor, h: Tensor, *given: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """For the gradients of c_e, c_r, the bias and both sums; empty where these are not given."""
    *parameters, q_before, k_before = given
    dc_e, dc_r, d_bias = (q.new_empty(0) if x is None else empty_rows(x) for x in parameters)
    dq_side, dk_side = (
        q.new_empty(0, dtype=accumulation_dtype(q.dtype)) if x is None else _room_for_sums(q, h)
        for x in (q_before, k_before)
    )
    return dc_e, dc_r, d_bias, dq_side, dk_side


def _room_for_sums(q: Tensor, h: Tensor) -> Tensor:
    B, _, H, P = q.shape
    return q.new_empty((B, H, P, h.shape[-1]), dtype=accumulation_dtype(q.dtype))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.map_q, ctx.map_k, ctx.grams, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, output[-1])


def _gradients(ctx: Any, *d_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, counts, token_mask, states = ctx.saved_tensors
    d_outputs = tuple(None if d is None or not d.numel() else d for d in d_outputs[:5])
    maps = ctx.map_q, ctx.map_k
    grads: list[Tensor | None]
    if are_differentiated():
        options = counts, token_mask, *maps, ctx.grams
        whole = with_options(_composition, *options)
        grads = differentiable_gradients(whole, tensors, d_outputs)
    else:
        given = *tensors, counts, token_mask, *maps
        if not states.numel():  # the forward pass ran where no gradient was asked for
            states = _forward(*given, False, True)[-1]
        d_out = _zeros(*tensors) if d_outputs[0] is None else d_outputs[0]
        computed = _backward(*given, states, d_out, *d_outputs[1:])
        grads = [None if x is None else d for x, d in zip(tensors, computed, strict=True)]
    return (*grads, *[None] * 6)


def _zeros(
    q: Tensor, k: Tensor, h: Tensor, c_e: Tensor | None, c_r: Tensor | None, *rest: Any
) -> Tensor:
    """A gradient of the outputs, where only other results have one."""
    return q.new_zeros((*q.shape[:3], dims(q, h, c_e, c_r)[-1]))


@exact
def _composition(
    q: Tensor,
    k: Tensor,
    h: Tensor,
    c_e: Tensor | None,
    c_r: Tensor | None,
    bias: Tensor | None,
    q_before: Tensor | None,
    k_before: Tensor | None,
    counts: Tensor,
    token_mask: Tensor | None,
    map_q: str,
    map_k: str,
    grams: bool,
    keep: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The forward pass by operations that have derivatives; no sums are kept."""
    tokens = Pieces(q, k, h, counts, token_mask, (map_q, map_k))
    c_e, c_r = _score_maps(c_e, c_r)
    zero = _room_for_sums(q, h).zero_()
    q_side, k_side = (zero if x is None else x for x in (q_before, k_before))
    gram_q, gram_k = (zero.new_zeros(() if grams else 0) for _ in range(2))
    outputs = []
    for piece in tokens.slices:
        queries, keys = tokens.sides(piece)
        read = queries.read(keys, k_side) @ c_e + keys.read(queries, q_side) @ c_r
        read = read * tokens.share(piece)
        read = read if bias is None else read + accumulate(bias)
        outputs.append(tokens.zeroed(read, piece))
        q_side = q_side + queries.phi.mT @ queries.h
        k_side = k_side + keys.phi.mT @ keys.h
        if grams:
            gram_q = gram_q + queries.phi.mT @ queries.phi
            gram_k = gram_k + keys.phi.mT @ keys.phi
    out = torch.cat(outputs, 2).transpose(1, 2).to(q.dtype)
    return out, q_side, k_side, gram_q, gram_k


_forward = Op(
    "dual_causal_forward",
    forward_in_pieces,
    empty_outputs,
    fused="primal_attention.ops.dual_causal.triton.forward",
    gradients=_gradients,
    save=_save,
    composition=_composition,
)
_backward = Op(
    "dual_causal_backward",
    backward_in_pieces,
    _empty_gradients,
    fused="primal_attention.ops.dual_causal.triton.backward",
    backward_of=(_composition, lambda *t: Call((*t[:12], True), t[13:])),
)
