"""Projections, weights and scores one after the other, differentiable as often as one likes.

Letters: B batch, N tokens, D model dim, H heads, P feature dim, S directions, M landmarks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from primal_attention.ops.running_mean.reference import running_mean, token_counts
from primal_attention.ops.sampled.reference import sampled_weights
from primal_attention.ops.scores.reference import primal_scores
from primal_attention.precision import accumulate, exact


class ProjectedScores(NamedTuple):
    """The scores, and what the objectives need."""

    scores: Tensor  # [B, N, 2, H, S]: e and r, zero at padded tokens
    energies: Tensor  # [B, 2, H, S]: the sums of their squares over the tokens
    qk: Tensor  # [B, N, 2, H, P]: queries and keys, or their means up to each token
    e: Tensor  # W_{e|X}: [B, H, P, S], or [H, P, S] without landmarks
    r: Tensor


@exact
def projected_scores(
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
) -> ProjectedScores:
    """The op by its formulas."""
    qk = torch.unflatten(F.linear(x, weight, shift), -1, (2, w_e.shape[0], -1))
    if causal:
        z = qk.flatten(2, 3)  # side by side they are heads of one tensor
        counts = token_counts(z, token_mask, None)
        qk = running_mean(z, counts, token_mask=token_mask).mean.view(qk.shape)
    e, r = accumulate(w_e), accumulate(w_r)
    if index is not None:
        e, r, *_ = sampled_weights(x, index, w_e, w_r, None, None, scale)
    return ProjectedScores(*primal_scores(qk, e, r, token_mask, map_q, map_k), qk, e, r)
