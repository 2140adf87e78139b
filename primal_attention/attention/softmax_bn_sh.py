"""Attention-BN+SH: heads at different scales, each normalised by the statistics of its own keys.

Letters: B batch, N tokens, T source tokens, H heads, C head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from primal_attention.attention.batch_norm import KeyNorm
from primal_attention.attention.mechanism import Mechanism
from primal_attention.attention.pooling import Source, TokenPooling
from primal_attention.attention.qkv import DecodingAttention
from primal_attention.attention.scaled_heads import ScaledHeads, head_groups
from primal_attention.attention.softmax import KeyValueCache
from primal_attention.attention.softmax_sh import check_causal_pooling


class SoftmaxBNSHAttention(DecodingAttention):
    r"""Attention-BN+SH of Nguyen et al. 2023.

    Attention-SH, in which head s normalises its queries and its $N_s$ pooled keys by the mean and
    the variance of these pooled keys, as Attention-BN does. Averages vary less than tokens, so at
    large scales ``eps`` weighs more. Causal (ours): the statistics of query i are those of the keys
    it sees, pooled and single.

    The decode state holds the keys; the moments are taken from them at every step.

    Args:
        dim: Model dimension D, a multiple of ``num_heads``.
        num_heads: Number of heads H.
        beta: Weight of the mean.
        rescale: Whether to divide by the standard deviation.
        eps: What is added to the variance.
        learnable_beta: Whether beta is a parameter of each head.
        scales: How many tokens make one key, for each head; None for 1, 2, 4, 8 in equal shares.
        pool: How: ``average``, ``max`` or ``stride``.
        grid: Rows and columns of the tokens of an image.
        num_prefix_tokens: How many tokens at the front stay as they are (a class token).
        causal: Each token sees itself and those before it; not with a grid or prefix tokens.
        dropout: Probability of dropout after the output projection.
        bias: Whether the projections have a bias.
    """

    mechanism = Mechanism(
        "Nguyen et al., 2023",
        "N^2",
        causal=True,
        cross=True,
        decode="keys, values",
        fused="SDPA (not causal)",
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
        scales: Sequence[int] | None = None,
        pool: str = "average",
        grid: tuple[int, int] | None = None,
        num_prefix_tokens: int = 0,
        causal: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
    ):
        super().__init__(dim, num_heads, causal=causal, dropout=dropout, bias=bias)
        pooling = TokenPooling(pool, grid, num_prefix_tokens)
        self.scaled = ScaledHeads(head_groups(num_heads, scales), pooling)
        check_causal_pooling(pooling, causal=causal)
        self.norm = KeyNorm(
            num_heads, beta=beta, rescale=rescale, eps=eps, learnable=learnable_beta
        )

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, source_mask: Tensor | None
    ) -> Tensor:
        """One SDPA call for each scale, of folded queries; the causal form is spelled out."""
        if self.causal:
            return self.scaled.attend_causal(q, mask, Source(k, v, source_mask), self.norm)
        return self.scaled.attend(q, k, v, source_mask, self.norm)

    def init_state(self, batch_size: int) -> KeyValueCache:
        """An empty cache."""
        self._check_causal()
        return KeyValueCache.empty(batch_size, self.num_heads, self.k_proj.weight)

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: KeyValueCache, mask: Tensor | None
    ) -> tuple[Tensor, KeyValueCache]:
        """Attend to the cache and to the new tokens up to each."""
        state = state.append(k, v, mask)
        return self.scaled.attend_causal(q, mask, Source(*state.read(q.dtype)), self.norm), state

    def extra_repr(self) -> str:
        """The sizes and choices, for printing."""
        return f"{super().extra_repr()}, scales={self.scaled.scales}, {self.scaled.pooling}"
