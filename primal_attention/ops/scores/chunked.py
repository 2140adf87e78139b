"""Scores and their energies in pieces, with their own backward pass, which README.md derives.

Queries, keys and scores are kept.

Letters: B batch, N tokens, H heads, C head dim, P feature dim, S directions.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from primal_attention.ops.chunks import Scratch, piece_slices
from primal_attention.ops.flops import Call
from primal_attention.ops.gradients import are_differentiated, differentiable_gradients
from primal_attention.ops.op import Op
from primal_attention.ops.scores import reference
from primal_attention.ops.scores.piece import (
    add_gradients,
    add_scores,
    given_gradients,
    stacked,
    zero_gradients,
)
from primal_attention.ops.scores.reference import ScoresResult
from primal_attention.precision import accumulate, accumulation_dtype, exact


def primal_scores(
    qk: Tensor,  # [B, N, 2, H, C]: queries and keys
    w_e_given_x: Tensor,  # [B, H, P, S] or [H, P, S]
    w_r_given_x: Tensor,
    *,
    token_mask: Tensor | None = None,  # [B, N], True = real token
    map_q: str = "cosine",
    map_k: str = "cosine",
) -> ScoresResult:
    """The same values as the reference."""
    return ScoresResult(*_forward(qk, w_e_given_x, w_r_given_x, token_mask, map_q, map_k))


@exact
def forward_in_pieces(
    qk: Tensor, w_e: Tensor, w_r: Tensor, token_mask: Tensor | None, map_q: str, map_k: str
) -> tuple[Tensor, Tensor]:
    """Scores and energies."""
    wide, weights, maps = accumulate(qk), stacked(w_e, w_r, len(qk)), (map_q, map_k)
    scores, energies = _empty_outputs(wide, w_e)
    energies, scratch = energies.zero_(), Scratch(qk)
    for rows, tokens in piece_slices(qk.flatten(2, 3)):
        where = rows, tokens
        mask = None if token_mask is None else token_mask[where]
        of_piece = scores[where], energies[rows]
        add_scores(wide[where], weights[rows], mask, maps, *of_piece, scratch)
    return scores.to(qk.dtype), energies


def _empty_outputs(qk: Tensor, w_e: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    B, N, _, H, _ = qk.shape
    S, dtype = w_e.shape[-1], accumulation_dtype(qk.dtype)
    return qk.new_empty((B, N, 2, H, S)), qk.new_empty((B, 2, H, S), dtype=dtype)


@exact
def backward_in_pieces(
    qk: Tensor,
    w_e: Tensor,
    w_r: Tensor,
    token_mask: Tensor | None,
    map_q: str,
    map_k: str,
    scores: Tensor,
    d_scores: Tensor | None,
    d_energies: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries and keys, side by side, and of both weights."""
    wide, weights, maps = accumulate(qk), stacked(w_e, w_r, len(qk)), (map_q, map_k)
    d_qk, sums = wide.new_empty(wide.shape), zero_gradients(weights)
    scratch = Scratch(qk)
    for rows, tokens in piece_slices(qk.flatten(2, 3)):
        where = rows, tokens
        mask = None if token_mask is None else token_mask[where]
        add_gradients(
            wide[where],
            weights[rows],
            mask,
            maps,
            scores[where],
            None if d_scores is None else d_scores[where],
            None if d_energies is None else d_energies[rows],
            d_qk[where],
            sums[rows],
            scratch,
        )
    return d_qk.to(qk.dtype), *given_gradients(sums, w_e, w_r)


def _empty_gradients(
    qk: Tensor, w_e: Tensor, w_r: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return qk.new_empty(qk.shape), w_e.new_empty(w_e.shape), w_r.new_empty(w_r.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.map_q, ctx.map_k = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, output[0])


def _gradients(ctx: Any, *d_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
    qk, w_e, w_r, token_mask, scores = ctx.saved_tensors
    tensors, options = [qk, w_e, w_r], (token_mask, ctx.map_q, ctx.map_k)

    def whole(qk: Tensor, w_e: Tensor, w_r: Tensor) -> ScoresResult:
        return reference.primal_scores(qk, w_e, w_r, *options)

    if are_differentiated():
        return (*differentiable_gradients(whole, tensors, d_outputs), None, None, None)
    return (*_backward(*tensors, *options, scores, *d_outputs), None, None, None)


_forward = Op(
    "scores_forward",
    forward_in_pieces,
    _empty_outputs,
    gradients=_gradients,
    save=_save,
    composition=reference.primal_scores,
)
_backward = Op(
    "scores_backward",
    backward_in_pieces,
    _empty_gradients,
    backward_of=(reference.primal_scores, lambda *t: Call(t[:6], t[7:])),
)
