r"""Scores, moments and Gram matrices of features in plain PyTorch.

    s = \phi(z) W        M = \sum_i \phi(z_i) h_i^T        G = \sum_i \phi(z_i) \phi(z_i)^T

Both sides of the kernel are one tensor z [2, H, B, N, C], queries before keys, so that each
formula is written once and runs in few launches.

Letters: B batch, N tokens, H heads, C head dim, P feature dim, S directions.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from primal_attention.feature_maps import FIXED_MAPS
from primal_attention.ops.walk import Tensors, walk
from primal_attention.precision import accumulate

Maps = tuple[str, ...]  # of the queries and of the keys, or of the only side


def both_sides(q: Tensor, k: Tensor) -> Tensor:
    """Queries and keys [B, N, H, C] as one tensor [2, H, B, N, C]."""
    return torch.stack((q.permute(2, 0, 1, 3), k.permute(2, 0, 1, 3)))


def features(z: Tensor, maps: Maps, mask: Tensor | None) -> Tensor:
    """Phi [sides, ..., N, P] of z [sides, ..., N, C]; zero where the mask [B, N, 1] is False."""
    z = accumulate(z)
    if len(set(maps)) == 1:
        phi = FIXED_MAPS[maps[0]].forward(z)
    else:
        phi = torch.stack(
            [FIXED_MAPS[name].forward(side) for name, side in zip(maps, z, strict=True)]
        )
    return phi if mask is None else torch.where(mask, phi, 0.0)


def primal_scores(z: Tensor, w: Tensor, maps: Maps, mask: Tensor | None) -> Tensor:
    r"""Scores $W^\top \phi$ of eq. (9), [2, H, B, N, S], by w [2, H, B, P, S] or [2, H, P, S]."""
    (scores,), _ = walk(partial(_scores, maps), (), (z, mask), (w,))
    return scores


def _scores(
    maps: Maps, state: Tensors, rows: Tensors, shared: Tensors
) -> tuple[list[Tensor], Tensors]:
    (z, mask), (w,) = rows, shared
    return [scores_of(features(z, maps, mask), w)], []


def scores_of(phi: Tensor, w: Tensor) -> Tensor:
    """The product of phi [..., B, N, P] and w [..., B, P, S], or [..., P, S] for all sequences."""
    if w.ndim == phi.ndim:
        return phi @ w
    B, N = phi.shape[-3:-1]
    return torch.unflatten(phi.flatten(-3, -2) @ w, -2, (B, N))


def moment(z: Tensor, values: Tensor, maps: Maps, mask: Tensor | None) -> Tensor:
    r"""$\sum_i \phi(z_i) h_i^\top$ over the real tokens, [sides, ..., P, S], eq. (14)."""
    _, (total,) = walk(partial(_moment, maps), (None,), (z, values, mask))
    return total


def _moment(
    maps: Maps, state: Tensors, rows: Tensors, shared: Tensors
) -> tuple[Tensors, list[Tensor]]:
    z, values, mask = rows
    return [], [grown(state[0], features(z, maps, mask).mT @ zeroed(accumulate(values), mask))]


def gram(z: Tensor, maps: Maps, mask: Tensor | None) -> Tensor:
    r"""$\Phi^\top \Phi$ over the real tokens, [sides, ..., P, P]."""
    _, (total,) = walk(partial(_gram, maps), (None,), (z, mask))
    return total


def _gram(
    maps: Maps, state: Tensors, rows: Tensors, shared: Tensors
) -> tuple[Tensors, list[Tensor]]:
    z, mask = rows
    phi = features(z, maps, mask)
    return [], [grown(state[0], phi.mT @ phi)]


def grown(total: Tensor | None, part: Tensor) -> Tensor:
    """The total with one more part; the part alone where there is no total yet."""
    return part if total is None else total + part


def zeroed(values: Tensor, mask: Tensor | None) -> Tensor:
    """The values with zeros where the mask, shaped for them, is False."""
    return values if mask is None else torch.where(mask, values, 0.0)
