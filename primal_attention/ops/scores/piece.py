"""Scores and gradients of one piece: some tokens of some sequences, small enough for the cache.

Everything stays in the layout of the projections, token by token; products of one head step over
the others.

Letters: b sequences, n tokens, H heads, C head dim, P feature dim, S directions; G heads, those of
the sides that have one feature map.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from primal_attention.feature_maps import FIXED_MAPS, inverse_norm
from primal_attention.ops.chunks import Scratch, zeroed
from primal_attention.ops.features import is_cosine
from primal_attention.precision import accumulate


def stacked(w_e: Tensor, w_r: Tensor, batch: int) -> Tensor:
    """Both weights, [B, H, P, S] or [H, P, S], as [B, 2, H, P, S] in the accumulation dtype."""
    return accumulate(torch.stack((w_e, w_r), -4)).expand(batch, 2, *w_e.shape[-3:])


def zero_gradients(weights: Tensor) -> Tensor:
    """What the gradients of stacked weights are added to, transposed, [B, 2, H, S, P]."""
    return torch.zeros_like(weights.mT, memory_format=torch.contiguous_format)


def given_gradients(total: Tensor, w_e: Tensor, w_r: Tensor) -> tuple[Tensor, Tensor]:
    """Of both weights, in their shapes and dtypes; without a batch axis summed over it."""
    d_e, d_r = (
        side.mT.sum_to_size(w.shape).to(w.dtype, memory_format=torch.contiguous_format, copy=True)
        for side, w in zip(total.unbind(1), (w_e, w_r), strict=True)
    )
    return d_e, d_r


class _Heads(NamedTuple):
    """The heads of one side, or of both where these have one map."""

    sides: slice
    feature_map: str
    z: Tensor  # [b, n, G, C], zero at padded tokens
    weights: Tensor  # [b, G, P, S]
    mask: Tensor | None  # [b, n, 1, 1]

    def of(self, tensor: Tensor) -> Tensor:
        """Theirs of a tensor [b, n, 2, H, any], as [b, n, G, any]."""
        return tensor[:, :, self.sides].flatten(2, 3)

    def of_sums(self, tensor: Tensor) -> Tensor:
        """Theirs of a tensor [b, 2, H, ...], as [b, G, ...]."""
        return tensor[:, self.sides].flatten(1, 2)

    def rows(self) -> Tensor:
        """The features, where they are cosines without their factor, [b, n, G, P]."""
        if is_cosine(self.feature_map):
            return self.z
        return zeroed(FIXED_MAPS[self.feature_map].forward(self.z), self.mask)


def _heads(
    qk: Tensor, weights: Tensor, token_mask: Tensor | None, maps: tuple[str, str]
) -> Iterator[_Heads]:
    mask = None if token_mask is None else token_mask[:, :, None, None]
    both = maps[0] == maps[1]
    for sides in (slice(2),) if both else (slice(1), slice(1, 2)):
        z = zeroed(qk[:, :, sides].flatten(2, 3), mask)
        given = weights[:, sides].flatten(1, 2)
        yield _Heads(sides, maps[sides.start or 0], z, given, mask)


def add_scores(
    qk: Tensor,  # [b, n, 2, H, C], in the accumulation dtype, as is all else
    weights: Tensor,  # [b, 2, H, P, S]
    token_mask: Tensor | None,  # [b, n]
    maps: tuple[str, str],
    scores: Tensor,  # [b, n, 2, H, S], written
    energies: Tensor,  # [b, 2, H, S], added to
    scratch: Scratch,
) -> None:
    """Write the scores, and add their squares to the energies."""
    for heads in _heads(qk, weights, token_mask, maps):
        score = heads.of(scores)
        _write_product(score, heads.rows(), heads.weights)
        if is_cosine(heads.feature_map):
            score *= inverse_norm(heads.z)
        squares = torch.mul(score, score, out=scratch.room("product", *score.shape))
        heads.of_sums(energies).add_(squares.sum(1))


def add_gradients(
    qk: Tensor,
    weights: Tensor,
    token_mask: Tensor | None,
    maps: tuple[str, str],
    scores: Tensor,
    d_scores: Tensor | None,
    d_energies: Tensor | None,  # [b, 2, H, S]
    d_qk: Tensor,  # [b, n, 2, H, C], contiguous, written
    d_weights: Tensor,  # [b, 2, H, S, P], transposed, added to
    scratch: Scratch,
) -> None:
    """Write the gradients of queries and keys, and add to those of the weights."""
    for heads in _heads(qk, weights, token_mask, maps):
        score, dz = accumulate(heads.of(scores)), heads.of(d_qk)
        d_score, product = (scratch.room(name, *score.shape) for name in ("d_score", "product"))
        given = d_score.zero_() if d_scores is None else zeroed(heads.of(d_scores), heads.mask)
        if d_energies is None:
            d_score.copy_(given)
        else:
            of_energies = heads.of_sums(d_energies)[:, None]
            torch.addcmul(given, score, of_energies, value=2.0, out=d_score)
        if is_cosine(heads.feature_map):
            inverse = inverse_norm(heads.z)
            d_score *= inverse
            radial = torch.mul(score, d_score, out=product).sum(-1, keepdim=True) * inverse
            torch.mul(heads.z, -radial, out=dz)
            _add_product(dz.transpose(1, 2), d_score.transpose(1, 2), heads.weights.mT)
        else:
            d_phi = scratch.room("d_phi", *dz.shape)
            _write_product(d_phi, d_score, heads.weights.mT)
            dz.copy_(FIXED_MAPS[heads.feature_map].vjp(heads.z, d_phi))
        moments = d_score.permute(0, 2, 3, 1), heads.rows().transpose(1, 2)
        _add_product(heads.of_sums(d_weights), *moments)


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
