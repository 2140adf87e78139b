"""Attention-BN, linear form: queries and keys normalised by the statistics of the keys.

Letters: B batch, N tokens, T source tokens, H heads, C head dim.
"""

from collections.abc import Sequence

from torch import Tensor

from primal_attention.attention.base.card import Mechanism
from primal_attention.attention.base.features import FeaturePair
from primal_attention.attention.base.linear_core import attend_moments
from primal_attention.attention.base.qkv import QKVAttention
from primal_attention.attention.baselines.linear import in_range, scaled_heads
from primal_attention.attention.svr.batch_norm import KeyNorm, key_moments
from primal_attention.attention.svr.pooling import Source
from primal_attention.feature_maps import FeatureMapSpec


class LinearBNAttention(QKVAttention):
    r"""Attention-BN of Nguyen et al. 2023 in linear attention.

    Linear attention of $\phi(\tilde q_i)$ and $\phi(\tilde k_j)$ with
    $\tilde z = (z - \beta\mu) / \sqrt{\sigma^2 + \epsilon}$, where $\mu$ and $\sigma^2$ are the
    mean and the variance of the real keys. The map is not linear, so both sides are normalised.

    Not causal: with the statistics of the keys up to i, the features of a key differ from query to
    query, and no sum over the keys serves them all. :class:`SoftmaxBNAttention` has a causal form.

    Args:
        dim: Model dimension D, a multiple of ``num_heads``.
        num_heads: Number of heads H.
        beta: Weight of the mean.
        rescale: Whether to divide by the standard deviation.
        eps: What is added to the variance.
        learnable_beta: Whether beta is a parameter of each head.
        feature_map: As in :class:`LinearAttention`.
        scales: How many tokens make one key, for each head, whose statistics are those of its
            pooled keys: Attention-BN+SH; None for one each.
        causal: Not possible.
        dropout: Probability of dropout after the output projection.
        bias: Whether the projections have a bias.
    """

    mechanism = Mechanism(
        "Nguyen et al., 2023",
        "N",
        cross=True,
        rank_bound=lambda layer: layer.features.feature_dim,
    )

    def __init__(  # noqa: PLR0913 - each option is a line of the docstring above
        self,
        dim: int,
        num_heads: int,
        *,
        beta: float = 1.0,
        rescale: bool = True,
        eps: float = 1e-5,
        learnable_beta: bool = False,
        feature_map: FeatureMapSpec = "elu",
        scales: Sequence[int] | None = None,
        causal: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
    ):
        if causal:
            raise ValueError(
                "causal=True: the features of a key would depend on the statistics up to each "
                "query, so that their sums do not factorise; use softmax_bn, or linear"
            )
        super().__init__(dim, num_heads, dropout=dropout, bias=bias)
        self.norm = KeyNorm(
            num_heads, beta=beta, rescale=rescale, eps=eps, learnable=learnable_beta
        )
        self.features = FeaturePair(feature_map, self.head_dim)
        self.scaled = scaled_heads(num_heads, scales)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, source_mask: Tensor | None
    ) -> Tensor:
        """Linear attention of the normalised queries and keys, scale by scale."""
        return self.scaled.each(q, Source(k, v, source_mask), self._attend_to)

    def _attend_to(self, q: Tensor, source: Source, heads: list[int]) -> Tensor:
        moments = key_moments(source.k, source.mask)
        queries = self.features.queries(self.norm(q, moments, heads, folded=False))
        keys = self.features.keys(self.norm(source.k, moments, heads, folded=False))
        return attend_moments(in_range(queries), keys, source.v, source.mask)
