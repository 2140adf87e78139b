r"""Scores, moments and Gram matrices of features in plain PyTorch.

    s = \phi(z) W        M = \sum_i \phi(z_i) h_i^T        G = \sum_i \phi(z_i) \phi(z_i)^T

Both sides of the kernel are one tensor z [2, H, B, N, C], queries before keys, so that each
formula is written once and runs in few launches.

Letters: B batch, N tokens, H heads, C head dim, P feature dim, S directions.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from primal_attention.feature_maps import FIXED_MAPS
from primal_attention.ops.landmarks import Landmarks, sampled_weights
from primal_attention.ops.op import chunk_size, fused, may_run_fused
from primal_attention.ops.walk import Tensors, walk
from primal_attention.precision import accumulate, without_autocast

Maps = tuple[str, ...]  # of the queries and of the keys, or of the only side


class Sides(NamedTuple):
    """Queries and keys of a batch, or one of them, and the maps that make features of them."""

    z: Tensor  # [2, H, B, N, C]
    h: Tensor | None  # [2, H, B, N, S]: H_e and H_r; None unless weights are dual
    steps: Tensor | None  # [H, B, N]: how much time passes at each token; None without a decay
    maps: Maps
    mask: Tensor | None  # [B, N, 1], True at real tokens

    def side(self, number: int) -> Sides:
        """Select the queries (0) or the keys (1)."""
        one = slice(number, number + 1)
        h = None if self.h is None else self.h[one]
        return self._replace(z=self.z[one], h=h, maps=self.maps[one])

    def num_tokens(self) -> Tensor:
        """Count the real tokens of each sequence, [B], in the accumulation dtype."""
        z, dtype = self.z, torch.promote_types(self.z.dtype, torch.float32)
        if self.mask is None:
            return torch.full(z.shape[2:3], z.shape[3], dtype=dtype, device=z.device)
        return self.mask.sum((1, 2), dtype=dtype)


def with_features(sides: Sides) -> Sides:
    """Sides that hold their features, for several uses; of long work each use computes its own."""
    if chunk_size(sides.z) < sides.z.shape[-2] or may_run_fused("moment", sides.z):
        return sides
    with without_autocast(sides.z.device):
        phi = features(sides.z, sides.maps, sides.mask)
    return sides._replace(z=phi, maps=("identity",) * len(sides.maps))


def weights_given_x(
    parameters: Tensor | None,  # w_e, w_r side by side [H, M or P, 2 S]; None for dual weights
    here: Sides,
    there: Sides,  # of the context; the same in self-attention
    landmarks: Landmarks | None,
) -> Tensor:
    """W_{e|X} and W_{r|X}, [2, H, B, P, S], or static ones of all sequences, [2, H, P, S]."""
    if landmarks is not None and parameters is not None:
        return sampled_weights(landmarks, parameters)
    if parameters is not None:
        return accumulate(torch.unflatten(parameters, -1, (2, -1))).permute(2, 0, 1, 3)
    if here is there:
        return _token_mean(here).flip(0)
    return torch.cat((_token_mean(there.side(1)), _token_mean(here.side(0))))


def _token_mean(sides: Sides) -> Tensor:
    r"""Eq. (14): $\Phi^\top H / n$ over the real tokens of a side; zero where there are none."""
    assert sides.h is not None
    total = moment(sides.z, sides.h, sides.maps, sides.mask)
    if sides.mask is None:
        return total / sides.z.shape[-2]
    return total / sides.num_tokens().clamp(min=1)[:, None, None]


def both_sides(q: Tensor, k: Tensor) -> Tensor:
    """Queries and keys [B, N, H, C] as one tensor [2, H, B, N, C]."""
    return torch.stack((q.permute(2, 0, 1, 3), k.permute(2, 0, 1, 3)))


def features(z: Tensor, maps: Maps, mask: Tensor | None) -> Tensor:
    """Phi [sides, ..., N, P] of z [sides, ..., N, C]; zero where the mask [B, N, 1] is False."""
    z = accumulate(z)
    if len(set(maps)) == 1:
        phi = FIXED_MAPS[maps[0]](z)
    else:
        phi = torch.stack([FIXED_MAPS[name](side) for name, side in zip(maps, z, strict=True)])
    return phi if mask is None else torch.where(mask, phi, 0.0)


def primal_scores(z: Tensor, w: Tensor, maps: Maps, mask: Tensor | None) -> Tensor:
    r"""Scores $W^\top \phi$ of eq. (9), [2, H, B, N, S], by w [2, H, B, P, S] or [2, H, P, S]."""
    if chunk_size(z) >= z.shape[-2]:
        with without_autocast(z.device):
            return scores_of(features(z, maps, mask), w)
    (scores,), _ = walk(partial(_scores, maps), (), (z, mask), (w,))
    return scores


def _scores(
    maps: Maps, state: Tensors, rows: Tensors, shared: Tensors
) -> tuple[list[Tensor], Tensors]:
    (z, mask), (w,) = rows, shared
    return [scores_of(features(z, maps, mask), w)], []


def scores_of(phi: Tensor, w: Tensor) -> Tensor:
    """Multiply phi [..., B, N, P] by w [..., B, P, S], or [..., P, S] for all sequences."""
    if w.ndim == phi.ndim:
        return phi @ w
    B, N = phi.shape[-3:-1]
    return torch.unflatten(phi.flatten(-3, -2) @ w, -2, (B, N))


class MomentInputs(NamedTuple):
    """All that the moment of one side is made of."""

    z: Tensor  # [B, N, H, C]
    values: Tensor | None  # [B, N, H, S]; None for Gram matrices alone
    token_mask: Tensor | None  # [B, N], True = real token
    feature_map: str


def moment(z: Tensor, values: Tensor, maps: Maps, mask: Tensor | None) -> Tensor:
    r"""$\sum_i \phi(z_i) h_i^\top$ over the real tokens, [sides, ..., P, S]; sums of eq. (14)."""
    sides, totals = (z[None], values[None]) if z.ndim == 4 else (z, values), []
    for side, h, name in zip(*sides, maps, strict=True):
        given = MomentInputs(tokens_first(side), tokens_first(h), rows_of(mask), name)
        found = fused("moment", given)
        if found is None:
            _, (total,) = walk(partial(_moment, maps), (None,), (z, values, mask))
            return total
        totals.append(found[0].transpose(0, 1))
    return totals[0] if z.ndim == 4 else torch.stack(totals)


def moment_eager(given: MomentInputs) -> Tensor:
    """Compute the moment of one side [B, H, P, S] in plain PyTorch."""
    mask = None if given.token_mask is None else given.token_mask[:, :, None]
    assert given.values is not None
    z, values = (each.permute(2, 0, 1, 3) for each in (given.z, given.values))
    _, (total,) = walk(partial(_moment, (given.feature_map,)), (None,), (z, values, mask))
    return total.transpose(0, 1)


def tokens_first(rows: Tensor) -> Tensor:
    """Rows [H, B, N, C] as fused ops read them, [B, N, H, C]; a view."""
    return rows.permute(1, 2, 0, 3)


def rows_of(mask: Tensor | None) -> Tensor | None:
    """Return the mask [B, N, 1] as fused ops read it, [B, N]."""
    return None if mask is None else mask[:, :, 0]


def _moment(
    maps: Maps, state: Tensors, rows: Tensors, shared: Tensors
) -> tuple[Tensors, list[Tensor]]:
    z, values, mask = rows
    phi = features(z, maps, mask)
    h = phi if values is None else zeroed(accumulate(values), mask)
    return [], [grown(state[0], phi.mT @ h)]


def gram(z: Tensor, maps: Maps, mask: Tensor | None) -> Tensor:
    r"""$\Phi^\top \Phi$ over the real tokens, [sides, ..., P, P]."""
    _, (total,) = walk(partial(_moment, maps), (None,), (z, None, mask))
    return total


def grown(total: Tensor | None, part: Tensor) -> Tensor:
    """Add a part to the total; return the part where there is no total yet."""
    return part if total is None else total + part


def zeroed(values: Tensor, mask: Tensor | None) -> Tensor:
    """Set values to zero where the mask, shaped for them, is False."""
    return values if mask is None else torch.where(mask, values, 0.0)


class Attended(NamedTuple):
    """Queries and keys, and the matrices that make outputs of their features."""

    q: Tensor  # [B, N, H, P]
    k: Tensor
    a_e: Tensor | None  # W_{e|X} C_e: [B, H, P, C], or [H, P, C]; None where e is not output
    a_r: Tensor | None
    bias: Tensor | None = None  # [C]
    token_mask: Tensor | None = None  # [B, N], True = real token
    map_q: str = "cosine"
    map_k: str = "cosine"

    @property
    def columns(self) -> int:
        """C; 0 without outputs."""
        return max(0 if a is None else a.shape[-1] for a in (self.a_e, self.a_r))


class CollapsedResult(NamedTuple):
    """Outputs, and the Gram matrices over the real tokens."""

    out: Tensor  # [B, N, H, C]
    gram_q: Tensor  # [B, H, P, P]
    gram_k: Tensor


def collapsed_attention(given: Attended) -> CollapsedResult:
    r"""$\phi_q A_e + \phi_k A_r + b$, zero at padded tokens, and the Gram matrices."""
    found = fused("primal", given)
    return collapsed_eager(given) if found is None else CollapsedResult(*found)


def collapsed_eager(given: Attended) -> CollapsedResult:
    """Compute :func:`collapsed_attention` in plain PyTorch."""
    mask = None if given.token_mask is None else given.token_mask[:, :, None]
    phi = features(both_sides(given.q, given.k), (given.map_q, given.map_k), mask)
    out = phi.new_zeros(()) if given.bias is None else accumulate(given.bias)
    for side, a in zip(phi, (given.a_e, given.a_r), strict=True):
        if a is not None:
            out = out + scores_of(side, accumulate(a.transpose(0, 1) if a.ndim == 4 else a))
    out = zeroed(out, mask).permute(1, 2, 0, 3).to(given.q.dtype)
    return CollapsedResult(out, *(phi.mT @ phi).transpose(1, 2))
