"""Attention-BN: softmax attention of queries and keys normalised by the statistics of the keys.

Letters: B batch, N tokens, T source tokens, H heads, C head dim.
"""

from typing import NamedTuple

from torch import Tensor

from primal_attention.attention.base.card import Mechanism
from primal_attention.attention.base.projections import outputs_of
from primal_attention.attention.base.qkv import DecodingAttention
from primal_attention.attention.baselines.softmax import KeyValueCache, softmax_attention
from primal_attention.attention.svr.batch_norm import (
    KeyMoments,
    KeyNorm,
    key_moments,
    no_moments,
    running_key_moments,
)


class KeyMomentsCache(NamedTuple):
    """Keys and values of the tokens so far, and the moments of these keys."""

    k: Tensor  # [B, T, H, C], accumulation dtype
    v: Tensor  # [B, T, H, C]
    mask: Tensor  # [B, T], 1 at real tokens
    num_tokens: Tensor  # [B, 1, 1, 1], how many real ones
    key_mean: Tensor  # [B, 1, H, C]
    key_scatter: Tensor  # [B, 1, H, C], the sum of squared differences from the mean


class SoftmaxBNAttention(DecodingAttention):
    r"""Attention-BN of Nguyen et al. 2023, softmax form.

    $o_i = \sum_j softmax_j(\tilde q_i^\top \tilde k_j / \sqrt C)\, v_j$ with
    $\tilde z = (z - \beta\mu) / \sqrt{\sigma^2 + \epsilon}$, where $\mu$ and $\sigma^2$ are the
    mean and the variance of the real keys of the sequence, for each head and feature. A key that is
    like all others is attended to less.

    It runs on ``scaled_dot_product_attention`` with the keys and values untouched: only the query
    changes, see :meth:`KeyNorm.fold`. Causal (ours): the statistics of query i are those of the
    keys up to i. Its first queries then divide by variances of very few keys, so ``eps`` of 1e-3 or
    more is advised there. With ``beta=0.0, rescale=False`` it is softmax attention itself.

    Args:
        dim: Model dimension D, a multiple of ``num_heads``.
        num_heads: Number of heads H.
        beta: Weight of the mean.
        rescale: Whether to divide by the standard deviation.
        eps: What is added to the variance.
        learnable_beta: Whether beta is a parameter of each head.
        causal: Each token sees itself and those before it.
        dropout: Probability of dropout after the output projection.
        bias: Whether the projections have a bias.
    """

    mechanism = Mechanism(
        "Nguyen et al., 2023",
        "N^2",
        causal=True,
        cross=True,
        decode="keys, values, moments of the keys",
        fused="SDPA",
        softmax_start={"beta": 0.0, "rescale": False, "learnable_beta": True},
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
        causal: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
    ):
        super().__init__(dim, num_heads, causal=causal, dropout=dropout, bias=bias)
        self.norm = KeyNorm(
            num_heads, beta=beta, rescale=rescale, eps=eps, learnable=learnable_beta
        )

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, source_mask: Tensor | None
    ) -> Tensor:
        """Softmax attention of the folded queries."""
        moments = running_key_moments if self.causal else key_moments
        q = self.norm(q, moments(k, source_mask))
        return softmax_attention(q, k, v, source_mask, mask=mask, causal=self.causal)

    def init_state(self, batch_size: int) -> KeyMomentsCache:
        """An empty cache and the moments of no keys."""
        self._check_causal()
        like = outputs_of(self.k_proj)
        cache = KeyValueCache.empty(batch_size, self.num_heads, self.head_dim, like)
        return KeyMomentsCache(*cache, *no_moments(cache.k))

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: KeyMomentsCache, mask: Tensor | None
    ) -> tuple[Tensor, KeyMomentsCache]:
        """Attend to the cache and to the new tokens up to each, with the moments up to each."""
        cache = KeyValueCache(*state[:3]).append(k, v, mask)
        moments = running_key_moments(k, mask, KeyMoments(*state[3:]))
        out = softmax_attention(self.norm(q, moments), *cache.read(q.dtype), causal=True)
        return out, KeyMomentsCache(*cache, *moments.last())
