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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from primal_attention.analysis.matrices import (
    DenseHeads,
    HeadMatrices,
    LowRankHeads,
    triangle,
)
from primal_attention.attention.primal import FeaturesAndWeights, PrimalAttention


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


@dataclass(frozen=True)
class PrimalRun:
    """One pass of a Primal layer."""

    given: FeaturesAndWeights
    crossing: bool  # the keys are those of a context

    @classmethod
    @torch.no_grad()
    def of(
        cls, layer: PrimalAttention, x: Tensor, context: Tensor | None = None, **masks: Any
    ) -> PrimalRun:
        """Return the pass of a layer that was called with these arguments."""
        given = layer.features_and_weights(x, context, **masks, dtype=torch.float64)
        return cls(given, context is not None)

    def sequences(self) -> Iterator[PrimalSequence]:
        """Yield those that have a query and a key."""
        for b in range(len(self.given.phi_q)):
            sequence = _sequence(self.given, b)
            if sequence.phi_q.shape[1] and sequence.phi_k.shape[1]:
                yield sequence

    def matrices(self) -> Iterator[HeadMatrices]:
        """Yield the kernel of each sequence."""
        for sequence in self.sequences():
            yield sequence.kernel(crossing=self.crossing)


def _sequence(given: FeaturesAndWeights, b: int) -> PrimalSequence:
    def queries(z: Tensor) -> Tensor:
        return z[b] if given.token_mask is None else z[b][:, given.token_mask[b]]

    def keys(z: Tensor) -> Tensor:
        return z[b] if given.context_mask is None else z[b][:, given.context_mask[b]]

    w_e, w_r = given.w_e.detach(), given.w_r.detach()
    if given.h is not None:
        w_e, w_r = w_e[b], w_r[b]
    return PrimalSequence(
        queries(given.phi_q),
        keys(given.phi_k),
        None if given.x_sampled is None else given.x_sampled[b],
        w_e,
        w_r,
        None if given.h is None else (queries(given.h[0]), keys(given.h[1])),
        given.lambda_diag,
        None if given.times is None else queries(given.times),
    )
