"""Scores and their energies in pieces, with their own backward pass, which README.md derives.

Queries, keys and scores are kept. Everything stays in the layout of the projections, token by
token; products of one head step over the others.

Letters: B batch, N tokens, H heads, C head dim, P feature dim, S directions; of a piece b
sequences, n tokens and G heads, those of the sides that are taken together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from primal_attention.feature_maps import FIXED_MAPS, inverse_norm
from primal_attention.ops.chunks import piece_slices, zeroed
from primal_attention.ops.gradients import differentiable_gradients
from primal_attention.ops.op import Op
from primal_attention.ops.scores import reference
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


class _Piece(NamedTuple):
    """Some tokens of some sequences, of one side or of both."""

    where: tuple[slice, slice, slice]  # sequences, tokens, sides
    feature_map: str
    z: Tensor  # [b, n, G, C], zero at padded tokens
    weights: Tensor  # [b, G, P, S]
    mask: Tensor | None  # [b, n, 1, 1]

    def of(self, tensor: Tensor) -> Tensor:
        """The piece of a tensor [B, N, 2, H, any], as [b, n, G, any]."""
        return tensor[self.where].flatten(2, 3)

    def of_sums(self, tensor: Tensor) -> Tensor:
        """The piece of a tensor [B, 2, H, ...] over all tokens, as [b, G, ...]."""
        sequences, _, sides = self.where
        return tensor[sequences, sides].flatten(1, 2)

    def rows(self) -> Tensor:
        """The features, where they are cosines without their factor, [b, n, G, P]."""
        if self.feature_map == "cosine":
            return self.z
        return zeroed(FIXED_MAPS[self.feature_map].forward(self.z), self.mask)


def _pieces(
    qk: Tensor, w_e: Tensor, w_r: Tensor, token_mask: Tensor | None, map_q: str, map_k: str
) -> Iterator[_Piece]:
    weights = accumulate(torch.stack((w_e, w_r), -4)).expand(len(qk), 2, *w_e.shape[-3:])
    maps = [(slice(2), map_q)]
    if map_q != map_k:
        maps = [(slice(1), map_q), (slice(1, 2), map_k)]
    for sequences, tokens in piece_slices(qk.flatten(2, 3)):
        mask = None if token_mask is None else token_mask[sequences, tokens, None, None]
        for sides, feature_map in maps:
            z = zeroed(qk[sequences, tokens, sides].flatten(2, 3), mask)
            given = weights[sequences, sides].flatten(1, 2)
            yield _Piece((sequences, tokens, sides), feature_map, z, given, mask)


@exact
def forward_in_pieces(
    qk: Tensor, w_e: Tensor, w_r: Tensor, token_mask: Tensor | None, map_q: str, map_k: str
) -> tuple[Tensor, Tensor]:
    """Scores and energies."""
    wide = accumulate(qk)
    scores, energies = _empty_outputs(wide, w_e)
    energies.zero_()
    for piece in _pieces(wide, w_e, w_r, token_mask, map_q, map_k):
        score = piece.of(scores)
        _write_product(score, piece.rows(), piece.weights)
        if piece.feature_map == "cosine":
            score *= inverse_norm(piece.z)
        piece.of_sums(energies).add_(score.square().sum(1))
    return scores.to(qk.dtype), energies


def _write_product(result: Tensor, a: Tensor, b: Tensor) -> None:
    """Write the product of a [b, n, G, m] and b [b, G, m, c] of each head to [b, n, G, c].

    Products of one sequence go where they belong; those of several are copied there.
    """
    if len(a) == 1:
        torch.bmm(a[0].transpose(0, 1), b[0], out=result[0].transpose(0, 1))
    else:
        result.copy_((a.transpose(1, 2) @ b).transpose(1, 2))


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add the product of stacks [b, G, any, m] and [b, G, m, any] of matrices to their total."""
    if len(a) == 1:
        total[0].baddbmm_(a[0], b[0])
    else:
        total += a @ b


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
    wide = accumulate(qk)
    d_qk, sums = wide.new_empty(wide.shape), wide.new_zeros((len(qk), 2, *w_e.shape[-3:]))
    for piece in _pieces(wide, w_e, w_r, token_mask, map_q, map_k):
        score, dz = accumulate(piece.of(scores)), piece.of(d_qk)
        d_score = torch.zeros_like(score)
        if d_scores is not None:
            d_score = accumulate(zeroed(piece.of(d_scores), piece.mask))
        if d_energies is not None:
            d_score = torch.addcmul(d_score, score, piece.of_sums(d_energies)[:, None], value=2.0)
        if piece.feature_map == "cosine":
            inverse = inverse_norm(piece.z)
            d_score = d_score * inverse
            radial = (score * d_score).sum(-1, keepdim=True) * inverse
            torch.mul(piece.z, -radial, out=dz)
            _add_product(dz.transpose(1, 2), d_score.transpose(1, 2), piece.weights.mT)
        else:
            d_phi = torch.empty_like(dz, memory_format=torch.contiguous_format)
            _write_product(d_phi, d_score, piece.weights.mT)
            dz.copy_(FIXED_MAPS[piece.feature_map].vjp(piece.z, d_phi))
        _add_product(piece.of_sums(sums), piece.rows().permute(0, 2, 3, 1), d_score.transpose(1, 2))
    dw_e, dw_r = (
        total.sum_to_size(w.shape).to(w.dtype, copy=True)
        for total, w in zip(sums.unbind(1), (w_e, w_r), strict=True)
    )
    return d_qk.to(qk.dtype), dw_e, dw_r


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

    if torch.is_grad_enabled():
        return (*differentiable_gradients(whole, tensors, d_outputs), None, None, None)
    return (*_backward(*tensors, *options, scores, *d_outputs), None, None, None)


_forward = Op("scores_forward", forward_in_pieces, _empty_outputs, gradients=_gradients, save=_save)
_backward = Op("scores_backward", backward_in_pieces, _empty_gradients)
