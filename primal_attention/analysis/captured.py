r"""Calls of attention layers as they were captured, and the matrices of each sequence in them.

Padding is removed before anything is computed, so it need not be finite.

The kernel of a Primal layer is that of Theorem 3.2, $K = \Phi_q F_X^\top F_X \Phi_k^\top$; it has
at most P singular values. As in the objectives, a causal layer with static weights has the features
of its running means, and one with dual weights those of all its tokens. With a decay,
$K_{ij} = e^{-|a_i - a_j|} \phi_q(x_i)^\top \phi_k(x_j)$ has any rank and is dense.

Letters: B batch, N queries, T keys, D model dim, H heads, C head dim, P features, S directions,
M landmarks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from primal_attention.analysis.matrices import HeadMatrices, attention_matrix, triangle
from primal_attention.attention.base.qkv import QKVAttention
from primal_attention.attention.primal import FeaturesAndWeights, PrimalAttention


class AttendedSequence(NamedTuple):
    """Queries, keys and values of the real tokens of one sequence, in float64."""

    q: Tensor  # [N, H, C]
    k: Tensor  # [T, H, C]
    v: Tensor  # [T, H, C]


@dataclass(frozen=True)
class CapturedAttention:
    """One call of a mechanism with queries, keys and values."""

    layer: QKVAttention  # in float64
    q: Tensor  # [B, N, H, C]
    k: Tensor  # [B, T, H, C]
    v: Tensor
    mask: Tensor | None  # [B, N], True = real token
    source_mask: Tensor | None  # [B, T]
    crossing: bool

    def sequences(self) -> Iterator[AttendedSequence]:
        """Sequences that have a query and a key."""
        for b in range(len(self.q)):
            q = _real(self.q, self.mask, b)
            k, v = (_real(z, self.source_mask, b) for z in (self.k, self.v))
            if len(q) and len(k):
                yield AttendedSequence(q.double(), k.double(), v.double())

    def matrices(self) -> Iterator[HeadMatrices]:
        """Yield the attention matrices of each sequence."""
        return map(self.matrix, self.sequences())

    def matrix(self, sequence: AttendedSequence) -> HeadMatrices:
        """Compute the attention matrices of one sequence."""
        q, k, v = sequence

        def attend(values: Tensor) -> Tensor:
            out = self.layer.attend(q[None], k[None], values.transpose(0, 1)[None], None, None)
            return out[0].transpose(0, 1)

        bound = self.layer.mechanism.largest_rank(self.layer)
        return attention_matrix(attend, v.transpose(0, 1), len(q), bound, crossing=self.crossing)


class PrimalSequence(NamedTuple):
    """One sequence as a Primal layer sees it, in float64."""

    phi_q: Tensor  # [H, N, P]
    phi_k: Tensor  # [H, T, P]
    f_x: Tensor | None  # [H, M, P]; None where F_X is the identity
    w_e: Tensor  # [H, M, S], or [H, P, S] where F_X is the identity
    w_r: Tensor
    h: tuple[Tensor, Tensor] | None  # H_e [H, N, S], H_r [H, T, S] of dual weights
    lambda_diag: Tensor  # [H, S]
    times: Tensor | None  # [H, N], with a decay
    crossing: bool

    def kernel(self) -> HeadMatrices:
        """K as factors, or dense with a decay."""
        if self.times is not None:
            lags = self.times[:, :, None] - self.times[:, None, :]
            matrix = (-lags.abs()).exp() * (self.phi_q @ self.phi_k.mT)
            return HeadMatrices(matrix, crossing=self.crossing)
        if self.f_x is None:
            return HeadMatrices(self.phi_q, self.phi_k, self.crossing)
        root = triangle(self.f_x).mT  # F_X^T F_X = root root^T
        return HeadMatrices(self.phi_q @ root, self.phi_k @ root, self.crossing)


@dataclass(frozen=True)
class CapturedPrimal:
    """One call of a Primal layer."""

    given: FeaturesAndWeights  # in float64
    crossing: bool

    @classmethod
    @torch.no_grad()
    def of(
        cls, layer: PrimalAttention, x: Tensor, context: Tensor | None = None, **masks: Any
    ) -> Self:
        """Capture a call by its arguments."""
        given = layer.features_and_weights(x, context, **masks, dtype=torch.float64)
        return cls(given, context is not None)

    def sequences(self) -> Iterator[PrimalSequence]:
        """Sequences that have a query and a key."""
        for b in range(len(self.given.phi_q)):
            sequence = self._sequence(b)
            if sequence.phi_q.shape[1] and sequence.phi_k.shape[1]:
                yield sequence

    def _sequence(self, b: int) -> PrimalSequence:
        given = self.given

        def queries(z: Tensor) -> Tensor:
            return _real(z.transpose(1, 2), given.token_mask, b).transpose(0, 1)

        def keys(z: Tensor) -> Tensor:
            return _real(z.transpose(1, 2), given.context_mask, b).transpose(0, 1)

        w_e, w_r = given.w_e.detach(), given.w_r.detach()
        return PrimalSequence(
            queries(given.phi_q),
            keys(given.phi_k),
            None if given.x_sampled is None else given.x_sampled[b],
            w_e if given.h is None else w_e[b],
            w_r if given.h is None else w_r[b],
            None if given.h is None else (queries(given.h[0]), keys(given.h[1])),
            given.lambda_diag,
            None if given.times is None else queries(given.times),
            self.crossing,
        )

    def matrices(self) -> Iterator[HeadMatrices]:
        """Yield the kernel of each sequence."""
        return map(PrimalSequence.kernel, self.sequences())


def _real(z: Tensor, mask: Tensor | None, b: int) -> Tensor:
    """The real tokens of sequence b of [B, N, ...]."""
    return z[b] if mask is None else z[b, mask[b].to(z.device)]
