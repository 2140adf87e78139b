r"""What a Primal layer did with one batch: features, weights and the kernel between them.

The kernel of a layer is that of Theorem 3.2, $K = \Phi_q F_X^\top F_X \Phi_k^\top$, whose KSVD the
layer stands for. It has at most P singular values. As in the objectives, a causal layer with static
weights has the features of its running means, and one with dual weights those of all its tokens.
With a decay, $K_{ij} = e^{-|a_i - a_j|} \phi_q(x_i)^\top \phi_k(x_j)$ has any rank and is dense.

Letters: B batch, N queries, T keys, D model dim, H heads, C head dim, P features, S directions,
M landmarks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from primal_attention.analysis.matrices import (
    DenseHeads,
    HeadMatrices,
    LowRankHeads,
    triangle,
)
from primal_attention.analysis.runs import real
from primal_attention.attention.base.features import Side
from primal_attention.attention.base.masks import real_tokens
from primal_attention.attention.base.rotary import rotary_positions, rotated
from primal_attention.attention.primal import PrimalAttention
from primal_attention.feature_maps import FIXED_MAPS, normaliser
from primal_attention.ops.landmarks import choose_landmarks


class PrimalSequence(NamedTuple):
    """One sequence as a Primal layer sees it, in float64."""

    phi_q: Tensor  # [H, N, P]
    phi_k: Tensor  # [H, T, P]
    f_x: Tensor | None  # [H, M, P]; None where F_X is the identity
    w_e: Tensor  # [H, M, S], or [H, P, S] where F_X is the identity
    w_r: Tensor
    h: tuple[Tensor, Tensor] | None  # H_e [H, N, S], H_r [H, T, S] of dual weights
    lambda_diag: Tensor  # [H, S]
    times: Tensor | None = None  # [H, N], with a decay

    def kernel(self, *, crossing: bool = False) -> HeadMatrices:
        """K by its factors, or with a decay as it is."""
        if self.times is not None:
            lags = self.times[:, :, None] - self.times[:, None, :]
            return DenseHeads((-lags.abs()).exp() * (self.phi_q @ self.phi_k.mT), crossing)
        return self.factors(crossing=crossing)

    def factors(self, *, crossing: bool = False) -> LowRankHeads:
        """K without a decay."""
        if self.f_x is None:
            return LowRankHeads(self.phi_q, self.phi_k, crossing)
        root = triangle(self.f_x).mT  # F_X^T F_X = root root^T
        return LowRankHeads(self.phi_q @ root, self.phi_k @ root, crossing)


class _Projected(NamedTuple):
    """What the projections of a layer make of a batch, in the dtype of the layer."""

    x: Tensor  # [B, N, D]
    q: Tensor  # [B, N, H, C]
    k: Tensor
    h: Tensor | None  # [B, N, 2, H, S]
    steps: Tensor | None  # [B, N, H]: how much time passes at each token
    mask: Tensor | None

    def sequence(self, b: int) -> _Projected:
        """The real tokens of one sequence, [N, ...]."""
        x, q, k = (real(z, self.mask, b) for z in (self.x, self.q, self.k))
        h, steps = (None if z is None else real(z, self.mask, b) for z in (self.h, self.steps))
        return _Projected(x, q, k, h, steps, None)


@dataclass(frozen=True)
class PrimalRun:
    """One pass of a Primal layer."""

    layer: PrimalAttention
    queries: _Projected
    keys: _Projected  # the same, or that of the context

    @classmethod
    def of(
        cls,
        layer: PrimalAttention,
        x: Tensor,
        context: Tensor | None = None,
        *,
        token_mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> PrimalRun:
        """The pass of a layer that was called with these arguments."""
        queries = _project(layer, x, token_mask)
        keys = queries if context is None else _project(layer, context, context_mask)
        return cls(layer, queries, keys)

    @property
    def crossing(self) -> bool:
        """Whether the keys are those of a context."""
        return self.keys is not self.queries

    def sequences(self) -> Iterator[PrimalSequence]:
        """Those that have a query and a key."""
        for b in range(len(self.queries.x)):
            queries = self.queries.sequence(b)
            keys = self.keys.sequence(b) if self.crossing else queries
            if len(queries.x) and len(keys.x):
                yield _sequence(self.layer, queries, keys)

    def matrices(self) -> Iterator[HeadMatrices]:
        """The kernel of each sequence."""
        for sequence in self.sequences():
            yield sequence.kernel(crossing=self.crossing)


@torch.no_grad()
def _project(layer: PrimalAttention, x: Tensor, token_mask: Tensor | None) -> _Projected:
    x, mask = real_tokens(x, token_mask)
    q, k = (
        rearrange(project(x), "b n (h c) -> b n h c", h=layer.num_heads)
        for project in (layer.q_proj, layer.k_proj)
    )
    h = None
    if layer.weights == "dual":
        h = rearrange(layer.h_proj(x), "b n (two h s) -> b n two h s", two=2, h=layer.num_heads)
    if layer.rotary:
        positions = rotary_positions(x, mask)
        q, k = rotated(q, positions), rotated(k, positions)
    return _Projected(x, q, k, h, layer.time_steps(x, mask), mask)


@torch.no_grad()
def _sequence(layer: PrimalAttention, queries: _Projected, keys: _Projected) -> PrimalSequence:
    phi_q, phi_k = _features(layer, queries, keys)
    lambda_diag = layer.lambda_diag.double()
    if queries.h is None or keys.h is None:
        weights = layer.w_e.detach().double(), layer.w_r.detach().double()
        return PrimalSequence(phi_q, phi_k, _f_x(layer, keys.x), *weights, None, lambda_diag)
    h_e, h_r = (_heads_first(z) for z in (queries.h[:, 0], keys.h[:, 1]))
    w_e = phi_k.mT @ h_r / phi_k.shape[1]
    w_r = phi_q.mT @ h_e / phi_q.shape[1]
    times = None if queries.steps is None else queries.steps.double().cumsum(0).T
    return PrimalSequence(phi_q, phi_k, None, w_e, w_r, (h_e, h_r), lambda_diag, times)


def _features(
    layer: PrimalAttention, queries: _Projected, keys: _Projected
) -> tuple[Tensor, Tensor]:
    """Both sides [H, N, P] and [H, T, P], with the normaliser of the maps that have one."""
    phi_q, phi_k = _map(layer, queries.q, side=0), _map(layer, keys.k, side=1)
    if layer.features.normalised:
        total = phi_k.cumsum(1) if layer.causal else phi_k.sum(1, keepdim=True)
        at_keys = phi_q if keys is queries else _map(layer, keys.q, side=0)
        phi_q = phi_q * normaliser(phi_q, total).rsqrt()
        phi_k = phi_k * normaliser(at_keys, total).rsqrt()
    return phi_q, phi_k


def _map(layer: PrimalAttention, z: Tensor, *, side: int) -> Tensor:
    """Features [H, N, P] of queries (side 0) or keys [N, H, C]."""
    if layer.causal and layer.weights == "static":
        count = torch.arange(1, len(z) + 1, device=z.device)[:, None, None]
        mean = z.double().cumsum(0) / count
        z = mean.to(z.dtype) if layer.features.has_modules else mean
    mapped: Side = (layer.features.queries, layer.features.keys)[side](z)
    return _heads_first(FIXED_MAPS[mapped.feature_map](mapped.z.double()))


def _f_x(layer: PrimalAttention, x: Tensor) -> Tensor | None:
    """The landmarks of a sequence [T, D], by head [H, M, P]."""
    if layer.weights != "sampled":
        return None
    rows = choose_landmarks(x[None], layer.num_landmarks).rows()[0]
    return rearrange(rows.double(), "m (h p) -> h m p", h=layer.num_heads)


def _heads_first(z: Tensor) -> Tensor:
    return z.double().transpose(0, 1)
