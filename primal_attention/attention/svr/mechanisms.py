"""Attention-BN, Attention-SH and both together, in softmax and linear attention.

Letters: B batch, N tokens, T source tokens, H heads, C head dim, r tokens of a pooled one.
"""

from collections.abc import Sequence
from typing import Any, Unpack

from torch import Tensor

from primal_attention.attention.base.card import Mechanism
from primal_attention.attention.base.features import FeaturePair
from primal_attention.attention.base.linear_core import attend_moments
from primal_attention.attention.base.qkv import Options, QKVAttention
from primal_attention.attention.baselines.linear import in_range
from primal_attention.attention.baselines.softmax import CachedAttention, softmax_attention
from primal_attention.attention.svr.key_norm import (
    KeyMoments,
    KeyNorm,
    key_moments,
    running_key_moments,
)
from primal_attention.attention.svr.scaled_heads import (
    KeysAndValues,
    attend_at_scales,
    check_scales,
    default_scales,
)
from primal_attention.feature_maps import FeatureMapSpec

_SOFTMAX_START = {"beta": 0.0, "rescale": False, "learnable_beta": True}


class KeyNormedAttention(QKVAttention):
    """A mechanism of Attention-BN, with its ``norm`` of queries and keys.

    Args:
        beta: Weight of the mean.
        rescale: Divide by the standard deviation.
        eps: Term that is added to the variance.
        learnable_beta: Make beta a parameter of each head.
        **options: Those of the mechanism.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        beta: float = 1.0,
        rescale: bool = True,
        eps: float = 1e-5,
        learnable_beta: bool = False,
        **options: Any,
    ):
        super().__init__(dim, num_heads, **options)
        self.norm = KeyNorm(
            num_heads, beta=beta, rescale=rescale, eps=eps, learnable=learnable_beta
        )


class SoftmaxBNAttention(KeyNormedAttention, CachedAttention):
    r"""Attention-BN of Nguyen et al. 2023, softmax form.

    $o_i = \sum_j softmax_j(\tilde q_i^\top \tilde k_j / \sqrt C)\, v_j$ with
    $\tilde z = (z - \beta\mu) / \sqrt{\sigma^2 + \epsilon}$, where $\mu$ and $\sigma^2$ are the
    mean and the variance of the real keys of the sequence, for each head and feature. A key that is
    like all others is attended to less.

    It runs on ``scaled_dot_product_attention`` with the keys and values untouched: only the query
    changes, see :class:`KeyNorm`. Causal (ours): the statistics of query i are those of the keys
    up to i. Its first queries then divide by variances of very few keys, so ``eps`` of 1e-3 or
    more is advised there. With ``beta=0.0, rescale=False`` it is softmax attention itself.

    Args:
        **options: Those of :class:`KeyNormedAttention` and :class:`QKVAttention`.
    """

    mechanism = Mechanism(
        "Nguyen et al., 2023",
        "N^2",
        causal=True,
        cross=True,
        decode="keys, values",
        fused="SDPA",
        softmax_start=_SOFTMAX_START,
    )

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, source_mask: Tensor | None
    ) -> Tensor:
        """Softmax attention of queries that are normalised by the keys that each sees."""
        running = self.causal and q.shape[1] > 1
        moments = (running_key_moments if running else key_moments)(k, source_mask)
        if running:
            moments = KeyMoments(*(each[:, -q.shape[1] :] for each in moments))
        q = self.norm(q, moments)
        return softmax_attention(q, k, v, source_mask, mask=mask, causal=self.causal)


class SoftmaxSHAttention(QKVAttention):
    r"""Attention-SH (scaled heads) of Nguyen et al. 2023.

    $o_i^s = \sum_{j \le N_s} softmax_j(q_i^{s\top} k_j^s / \sqrt C)\, v_j^s$ for head s: each head
    fits its regression to fewer training points, $N_s = N / r_s$ keys and values, which are means
    of $r_s$ neighbours; queries keep their number. Scores cost the fraction mean(1 / r) of softmax
    attention. With all scales 1 it is softmax attention.

    Neighbours are counted among the real tokens: padding changes nothing, wherever it stands. Keys
    and values are pooled after their projections, which for means is the same as pooling the input
    and leaves the projections ordinary modules. There is no causal form.

    Args:
        scales: How many tokens make one key, for each head; None for 1, 2, 4, 8 in equal shares.
        **options: Those of :class:`QKVAttention`, not ``causal``.
    """

    mechanism = Mechanism("Nguyen et al., 2023", "N^2", cross=True, fused="SDPA")
    shown = ("scales",)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        scales: Sequence[int] | None = None,
        **options: Unpack[Options],
    ):
        super().__init__(dim, num_heads, **options)
        self.scales = check_scales(scales or default_scales(num_heads), num_heads)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, source_mask: Tensor | None
    ) -> Tensor:
        """Call softmax attention once per scale."""

        def attend(q: Tensor, source: KeysAndValues, heads: slice) -> Tensor:
            return softmax_attention(self.queries(q, source, heads), *source, mask=mask)

        return attend_at_scales(self.scales, q, KeysAndValues(k, v, source_mask), attend)

    def queries(self, q: Tensor, source: KeysAndValues, heads: slice) -> Tensor:
        """Return the queries of some heads as they meet their pooled keys."""
        return q


class SoftmaxBNSHAttention(KeyNormedAttention, SoftmaxSHAttention):
    r"""Attention-BN+SH of Nguyen et al. 2023.

    Attention-SH, in which head s normalises its queries and its $N_s$ pooled keys by the mean and
    the variance of these pooled keys, as Attention-BN does. Averages vary less than tokens, so at
    large scales ``eps`` weighs more.

    Args:
        **options: Those of :class:`KeyNormedAttention`, :class:`SoftmaxSHAttention` and
            :class:`QKVAttention`.
    """

    mechanism = SoftmaxSHAttention.mechanism._replace(softmax_start=_SOFTMAX_START)

    def queries(self, q: Tensor, source: KeysAndValues, heads: slice) -> Tensor:
        """Normalise the queries by the pooled keys."""
        normed: Tensor = self.norm(q, key_moments(source.k, source.mask), heads)
        return normed


class LinearBNAttention(KeyNormedAttention):
    r"""Attention-BN of Nguyen et al. 2023 in linear attention.

    Linear attention of $\phi(\tilde q_i)$ and $\phi(\tilde k_j)$ with
    $\tilde z = (z - \beta\mu) / \sqrt{\sigma^2 + \epsilon}$, where $\mu$ and $\sigma^2$ are the
    mean and the variance of the real keys. The map is not linear, so both sides are normalised.

    Not causal: with the statistics of the keys up to i, the features of a key differ from query to
    query, and no sum over the keys serves them all. :class:`SoftmaxBNAttention` has a causal form.

    Args:
        feature_map: As in :class:`LinearAttention`.
        scales: How many tokens make one key, for each head, whose statistics are those of its
            pooled keys: Attention-BN+SH; None for one each.
        **options: Those of :class:`KeyNormedAttention` and :class:`QKVAttention`, not ``causal``.
    """

    mechanism = Mechanism(
        "Nguyen et al., 2023", "N", cross=True, rank_bound=lambda layer: layer.features.feature_dim
    )

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        feature_map: FeatureMapSpec = "elu",
        scales: Sequence[int] | None = None,
        **options: Any,
    ):
        if options.get("causal"):
            raise ValueError(
                "causal=True: the features of a key would depend on the statistics up to each "
                "query, so that their sums do not factorise; use softmax_bn, or linear"
            )
        super().__init__(dim, num_heads, **options)
        self.features = FeaturePair(feature_map, self.head_dim)
        self.scales = check_scales(scales, num_heads)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, source_mask: Tensor | None
    ) -> Tensor:
        """Linear attention of the normalised queries and keys, scale by scale."""
        source = KeysAndValues(k, v, source_mask)
        return attend_at_scales(self.scales, q, source, self._attend_to)

    def _attend_to(self, q: Tensor, source: KeysAndValues, heads: slice) -> Tensor:
        moments = key_moments(source.k, source.mask)
        queries = self.features.queries(self.norm(q, moments, heads, folded=False))
        keys = self.features.keys(self.norm(source.k, moments, heads, folded=False))
        return attend_moments(in_range(queries), keys, source.v, source.mask)
