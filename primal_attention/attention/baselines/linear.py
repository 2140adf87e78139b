r"""Linear attention: $y_i = \phi(q_i)^\top S / \phi(q_i)^\top z$ with sums S and z over the keys.

$S = \sum_j \phi(k_j) v_j^\top$ and $z = \sum_j \phi(k_j)$ come from one pass: the values get a
channel that is 1.

Letters: B batch, N tokens, T source tokens, H heads, C head dim, P feature dim.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from primal_attention.attention.base.card import Mechanism
from primal_attention.attention.base.features import FeaturePair, Side
from primal_attention.attention.base.linear_core import (
    Moments,
    attend_moments,
    empty_moments,
    scan_moments,
)
from primal_attention.attention.base.projections import outputs_of
from primal_attention.attention.base.qkv import DecodingAttention
from primal_attention.attention.svr.pooling import Source, TokenPooling
from primal_attention.attention.svr.scaled_heads import ScaledHeads, head_groups
from primal_attention.feature_maps import FeatureMapSpec


class LinearAttention(DecodingAttention):
    r"""Attention with the kernel $\phi(q)^\top \phi(k)$, Katharopoulos et al. 2020.

    The normaliser counts real tokens only; where it is zero the output is zero.

    Args:
        dim: Model dimension D, a multiple of ``num_heads``.
        num_heads: Number of heads H.
        feature_map: ``elu`` (the paper's elu + 1), ``relu``, ``exponential``, ``cosine``,
            ``identity``, a :class:`~primal_attention.feature_maps.FeatureMap`, or a pair (queries,
            keys) of these. The last two names have kernels of both signs, with a normaliser that
            may come near zero.
        scales: How many tokens make one key, for each head: Attention-SH of Nguyen et al. 2023 in
            linear attention, not causal; None for one each.
        causal: Each token sees itself and those before it.
        dropout: Probability of dropout after the output projection.
        bias: Whether the projections have a bias.
    """

    mechanism = Mechanism(
        "Katharopoulos et al., 2020",
        "N",
        causal=True,
        cross=True,
        decode="sums of features and of features times values",
    )

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        feature_map: FeatureMapSpec = "elu",
        scales: Sequence[int] | None = None,
        causal: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
    ):
        if causal and scales is not None:
            raise ValueError(f"scales={list(scales)} does not go with causal=True; use softmax_sh")
        super().__init__(dim, num_heads, causal=causal, dropout=dropout, bias=bias)
        self.features = FeaturePair(feature_map, self.head_dim)
        self.scaled = scaled_heads(num_heads, scales)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, source_mask: Tensor | None
    ) -> Tensor:
        """One sum over all keys, or one for each scale, or the scan where causal."""
        if self.causal:
            return self._scan(q, k, v, None, mask)[0]
        return self.scaled.each(q, Source(k, v, source_mask), self._attend_to)

    def _attend_to(self, q: Tensor, source: Source, heads: list[int]) -> Tensor:
        queries, keys = in_range(self.features.queries(q)), self.features.keys(source.k)
        return attend_moments(queries, keys, source.v, source.mask)

    def init_state(self, batch_size: int) -> Moments:
        """The sums of no token."""
        self._check_causal()
        shape = self.features.feature_dim, self.head_dim
        return empty_moments(outputs_of(self.k_proj), batch_size, self.num_heads, shape)

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: Moments, mask: Tensor | None
    ) -> tuple[Tensor, Moments]:
        """Go on from the sums."""
        return self._scan(q, k, v, state, mask)

    def _scan(
        self, q: Tensor, k: Tensor, v: Tensor, state: Moments | None, mask: Tensor | None
    ) -> tuple[Tensor, Moments]:
        queries, keys = in_range(self.features.queries(q)), self.features.keys(k)
        return scan_moments(queries, keys, v, state, mask)


def scaled_heads(num_heads: int, scales: Sequence[int] | None) -> ScaledHeads:
    """Heads of those scales; all see every token by itself where there are none."""
    return ScaledHeads(head_groups(num_heads, scales or [1] * num_heads), TokenPooling())


def in_range(queries: Side) -> Side:
    """The queries, raised where all features of one are exponentials that might underflow.

    elu + 1 is exp on the negative side: there a shift of the whole query is a factor of all its
    features, which the normaliser cancels.
    """
    if queries.feature_map != "elu":
        return queries
    highest = queries.z.detach().amax(-1, keepdim=True)
    return queries._replace(z=queries.z - highest.clamp(max=0.0))
