r"""Performer: softmax attention estimated by positive orthogonal random features (FAVOR+).

Letters: B batch, N tokens, T source tokens, H heads, C head dim, P random features.
"""

import math
from typing import Unpack

import torch
from torch import Tensor

from primal_attention.attention.base.card import Mechanism
from primal_attention.attention.base.features import FeatureSide
from primal_attention.attention.base.linear_core import (
    LinearState,
    MomentsAttention,
    attend_moments,
    scan_moments,
)
from primal_attention.attention.base.qkv import Options
from primal_attention.attention.base.validation import check_sizes
from primal_attention.feature_maps import ExponentialFeatureMap


class PerformerAttention(MomentsAttention):
    r"""Linear attention with random features of the softmax kernel, Choromanski et al. 2021.

    $y_i = \frac{g(q_i)^\top \sum_j g(k_j) v_j^\top}{g(q_i)^\top \sum_j g(k_j)}$ with
    $\langle g(q), g(k) \rangle \approx \exp(q^\top k / \sqrt C)$ from
    :class:`~primal_attention.feature_maps.ExponentialFeatureMap`, one draw for all heads.

    The random directions are a buffer that is saved with the layer. They change when :meth:`redraw`
    is called.

    Difference from the published code: its stabiliser subtracts the largest exponent of all keys,
    padding and future included, which does not cancel against epsilon. Here every query is divided
    by its own largest feature, which cancels. Keys need nothing: whatever its length, the exponent
    of a key in the direction u is at most $(w^\top u)^2 / 2$.

    Args:
        num_features: Number of random features P of a head; C ln(C), rounded down, if None.
        **options: Those of :class:`QKVAttention`.
    """

    least = 1e-12  # where there is a key, the normaliser is at least 1e-6 / sqrt(P)

    mechanism = Mechanism(
        "Choromanski et al., 2021",
        "N",
        causal=True,
        cross=True,
        decode="sums of features and of features times values",
        rank_bound=lambda layer: layer.feature_map.feature_dim,
    )

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_features: int | None = None,
        **options: Unpack[Options],
    ):
        super().__init__(dim, num_heads, **options)
        check_sizes(num_features=num_features)
        if num_features is None:
            num_features = max(1, int(self.head_dim * math.log(self.head_dim)))
        self.feature_map = ExponentialFeatureMap(self.head_dim, num_features)

    def redraw(self) -> None:
        """Draw new random features; graphs that were built with the old ones keep them."""
        self.feature_map.projection = torch.empty_like(self.feature_map.projection)
        self.feature_map.redraw()

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, source_mask: Tensor | None
    ) -> Tensor:
        """Attend by the moment form, scanned where causal."""
        if self.causal:
            return self.extend(q, k, v, None, mask)[0]
        return attend_moments(*self.sides(q, k), v, source_mask, least=self.least)

    @property
    def num_features(self) -> int:
        """P."""
        return self.feature_map.feature_dim

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: LinearState | None, mask: Tensor | None
    ) -> tuple[Tensor, LinearState]:
        """Go on from the moments, or from none."""
        return scan_moments(*self.sides(q, k), v, state, mask, least=self.least)

    def sides(self, q: Tensor, k: Tensor) -> tuple[FeatureSide, FeatureSide]:
        """Positive random features; the scale of a query cancels."""
        phi_q, phi_k = self.feature_map(q), self.feature_map(k)
        phi_q = phi_q / phi_q.detach().amax(-1, keepdim=True)
        return FeatureSide(phi_q), FeatureSide(phi_k)
