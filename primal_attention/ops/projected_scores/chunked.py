"""Projections and scores in pieces, both ways: the gradients of queries and keys never exist whole.

Letters: B batch, N tokens, D model dim, H heads, P feature dim, S directions, M landmarks; of a
piece b sequences and n tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from primal_attention.ops.chunks import Scratch, masked, piece_slices
from primal_attention.ops.flops import Call
from primal_attention.ops.gradients import (
    are_differentiated,
    differentiable_gradients,
    with_options,
)
from primal_attention.ops.landmarks import Landmarks
from primal_attention.ops.op import Op
from primal_attention.ops.products import affine
from primal_attention.ops.projected.passes import add_gradients_in_pieces, weights_in_pieces
from primal_attention.ops.projected_scores import reference
from primal_attention.ops.projected_scores.reference import ProjectedScores
from primal_attention.ops.running_mean import token_counts
from primal_attention.ops.running_mean.chunked import running_sums
from primal_attention.ops.scores.piece import (
    add_gradients,
    add_scores,
    given_gradients,
    stacked,
    zero_gradients,
)
from primal_attention.precision import exact


def projected_scores(
    x: Tensor,  # [B, N, D], float32 or float64
    weight: Tensor,  # [2 H P, D]: of the queries, then of the keys
    shift: Tensor | None,  # [2 H P]
    w_e: Tensor,  # [H, M, S] with landmarks, [H, P, S] without
    w_r: Tensor,
    landmarks: Landmarks | None = None,  # of x; None for weights that are the parameters
    *,
    causal: bool = False,  # q and k become their means up to each token
    token_mask: Tensor | None = None,  # [B, N], True = real token
    map_q: str = "cosine",
    map_k: str = "cosine",
) -> ProjectedScores:
    """The same values as the reference."""
    index, scale = (None, 1.0) if landmarks is None else landmarks[1:]
    tensors = x, weight, shift, w_e, w_r
    return ProjectedScores(*_forward(*tensors, index, scale, causal, token_mask, map_q, map_k))


Where = tuple[slice, slice]  # sequences and tokens of a piece


class _Means:
    """Means up to each token, or their gradients, carried on from piece to piece."""

    def __init__(self, x: Tensor, token_mask: Tensor | None, *, backward: bool):
        self.counts, self.mask = token_counts(x, token_mask, None).clamp(min=1), token_mask
        self.backward, self.last = backward, x.shape[1]
        self.carried = x.new_empty(0)

    def take(self, z: Tensor, where: Where) -> None:
        """In the place of z [b, n, G, P]."""
        self._sum(masked(z, _at(self.mask, where)), z, where)
        z /= self._t(where)

    def pass_on(self, d_mean: Tensor, where: Where) -> Tensor:
        """What the tokens get from the gradients [b, n, G, P] of the means, which are lost."""
        d_mean /= self._t(where)
        self._sum(d_mean, d_mean, where)
        return masked(d_mean, _at(self.mask, where))

    def _t(self, where: Where) -> Tensor:
        return self.counts[where][:, :, None, None]

    def _sum(self, values: Tensor, room: Tensor, where: Where) -> None:
        _, tokens = where
        begins = tokens.stop == self.last if self.backward else tokens.start == 0
        start = torch.zeros_like(values[:, 0]) if begins else self.carried
        running_sums(values, start, room, reverse=self.backward)
        self.carried = room[:, 0 if self.backward else -1].clone()


def _at(tensor: Tensor | None, where: Where) -> Tensor | None:
    return None if tensor is None else tensor[where]


@exact
def forward_in_pieces(
    x: Tensor,
    weight: Tensor,
    shift: Tensor | None,
    w_e: Tensor,
    w_r: Tensor,
    index: Tensor | None,
    scale: float,
    causal: bool,
    token_mask: Tensor | None,
    map_q: str,
    map_k: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Scores, energies, queries and keys, and both weights."""
    scores, energies, *_ = _empty_outputs(x, weight, shift, w_e, w_r, index)
    qk = affine(x, weight, shift).view(*x.shape[:2], 2, len(w_e), -1)
    e, r, _, _ = weights_in_pieces(x, index, w_e, w_r, None, None, scale)
    weights, energies, scratch = stacked(e, r, len(x)), energies.zero_(), Scratch(x)
    means = _Means(x, token_mask, backward=False) if causal else None
    for where in piece_slices(qk.flatten(2, 3)):
        z, mask, (sequences, _) = qk[where], _at(token_mask, where), where
        if means is not None:
            means.take(z.flatten(2, 3), where)
        of_piece = scores[where], energies[sequences]
        add_scores(z, weights[sequences], mask, (map_q, map_k), *of_piece, scratch)
    return scores, energies, qk, e, r


def _empty_outputs(
    x: Tensor,
    weight: Tensor,
    shift: Tensor | None,
    w_e: Tensor,
    w_r: Tensor,
    index: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    (B, N, _), (H, _, S), P = x.shape, w_e.shape, len(weight) // (2 * len(w_e))
    given = (H, P, S) if index is None else (B, H, P, S)
    return (
        x.new_empty((B, N, 2, H, S)),
        x.new_empty((B, 2, H, S)),
        x.new_empty((B, N, 2, H, P)),
        x.new_empty(given),
        x.new_empty(given),
    )


@exact
def backward_in_pieces(
    x: Tensor,
    weight: Tensor,
    shift: Tensor | None,
    w_e: Tensor,
    w_r: Tensor,
    index: Tensor | None,
    scale: float,
    causal: bool,
    token_mask: Tensor | None,
    map_q: str,
    map_k: str,
    scores: Tensor,
    qk: Tensor,
    e: Tensor,
    r: Tensor,
    d_scores: Tensor | None,
    d_energies: Tensor | None,
    d_qk: Tensor | None,
    d_e: Tensor | None,
    d_r: Tensor | None,
    of_x: bool,
    of_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the first five inputs; empty where they are not given or not wanted."""
    dx, d_weight, d_shift, *_ = _empty_gradients(x, weight, shift, w_e, w_r, of_x, of_weight)
    weights = stacked(e, r, len(x))
    sums, d_weight, d_shift = zero_gradients(weights), d_weight.zero_(), d_shift.zero_()
    means = _Means(x, token_mask, backward=True) if causal else None
    scratch = Scratch(x)
    for where in reversed(list(piece_slices(qk.flatten(2, 3)))):
        z, mask, (sequences, _) = qk[where], _at(token_mask, where), where
        d_rows = scratch.room("d_rows", *z.shape)
        d_outputs = _at(d_scores, where), None if d_energies is None else d_energies[sequences]
        given = z, weights[sequences], mask, (map_q, map_k), scores[where], *d_outputs
        add_gradients(*given, d_rows, sums[sequences], scratch)
        if d_qk is not None:
            d_rows += d_qk[where]
        if means is not None:
            d_rows = means.pass_on(d_rows.flatten(2, 3), where)
        rows = d_rows.reshape(-1, len(weight))  # torch.where may follow the strides of a mask
        if of_x:
            dx[where] = affine(rows, weight.mT).view(dx[where].shape)
        if of_weight:
            d_weight.addmm_(rows.mT, x[where].flatten(0, 1))
        if shift is not None:
            d_shift += rows.sum(0)
    by_scores = given_gradients(sums, e, r)
    total_e, total_r = (
        one if other is None else one + other
        for one, other in zip(by_scores, (d_e, d_r), strict=True)
    )
    d_weights = e, r, total_e, total_r, None, None
    dw_e, dw_r, _, _ = add_gradients_in_pieces(
        x, index, w_e, w_r, None, None, scale, *d_weights, dx if of_x else None
    )
    return dx, d_weight, d_shift, dw_e, dw_r


def _empty_gradients(
    x: Tensor, weight: Tensor, shift: Tensor | None, w_e: Tensor, w_r: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    *_, of_x, of_weight = options
    return (
        x.new_empty(x.shape if of_x else 0),
        x.new_empty(weight.shape if of_weight else 0),
        x.new_empty(0 if shift is None else shift.shape),
        w_e.new_empty(w_e.shape),
        w_r.new_empty(w_r.shape),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, index, scale, causal, token_mask, map_q, map_k = inputs
    scores, _, qk, e, r = output
    ctx.options = scale, causal, map_q, map_k
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, index, token_mask, scores, qk, e, r)


def _gradients(ctx: Any, *d_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, index, token_mask, scores, qk, e, r = ctx.saved_tensors
    scale, causal, *maps = ctx.options
    options = index, scale, causal, token_mask, *maps
    if are_differentiated():
        whole = with_options(reference.projected_scores, *options)
        grads = differentiable_gradients(whole, tensors, d_outputs)
    else:
        wanted = ctx.needs_input_grad[: len(tensors)]
        computed = _backward(*tensors, *options, scores, qk, e, r, *d_outputs, *wanted[:2])
        grads = [grad if wants else None for wants, grad in zip(wanted, computed, strict=True)]
    return (*grads, *[None] * len(options))


_forward = Op(
    "projected_scores_forward",
    forward_in_pieces,
    _empty_outputs,
    gradients=_gradients,
    save=_save,
    composition=reference.projected_scores,
)
_backward = Op(
    "projected_scores_backward",
    backward_in_pieces,
    _empty_gradients,
    backward_of=(reference.projected_scores, lambda *t: Call(t[:11], t[15:20], t[20:22])),
)
