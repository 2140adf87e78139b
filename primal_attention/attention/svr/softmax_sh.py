"""Attention-SH: softmax attention whose heads see keys and values at different scales.

Letters: B batch, N tokens, T source tokens, H heads, C head dim, r tokens of a pooled one.
"""

from collections.abc import Sequence

from torch import Tensor

from primal_attention.attention.base.card import Mechanism
from primal_attention.attention.base.projections import outputs_of
from primal_attention.attention.base.qkv import DecodingAttention
from primal_attention.attention.baselines.softmax import KeyValueCache
from primal_attention.attention.svr.batch_norm import KeyNorm
from primal_attention.attention.svr.pooling import Source, TokenPooling
from primal_attention.attention.svr.scaled_heads import ScaledHeads, head_groups


class SoftmaxSHAttention(DecodingAttention):
    r"""Attention-SH (scaled heads) of Nguyen et al. 2023.

    $o_i^s = \sum_{j \le N_s} softmax_j(q_i^{s\top} k_j^s / \sqrt C)\, v_j^s$ for head s: each head
    fits its regression to fewer training points, $N_s = N / r_s$ keys and values pooled from $r_s$
    neighbours; queries keep their number. Scores cost the fraction mean(1 / r) of softmax
    attention. With all scales 1 it is softmax attention.

    Neighbours are counted among the real tokens: padding changes nothing, wherever it stands. Keys
    and values are pooled after their projections, which for averages is the same as pooling the
    input and leaves the projections ordinary modules. Causal (ours): see
    :mod:`primal_attention.attention.svr.pooled_past`; it keeps N (N / r + r) weights, unfused.

    Args:
        dim: Model dimension D, a multiple of ``num_heads``.
        num_heads: Number of heads H.
        scales: How many tokens make one key, for each head; None for 1, 2, 4, 8 in equal shares.
        pool: How: ``average``, ``max`` or ``stride`` (the first of them).
        grid: Rows and columns of the tokens of an image, which are pooled in windows as square as
            they can be: 1 x 2, 2 x 2, 2 x 4.
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
        self.norm: KeyNorm | None = None
        _check_causal_pooling(pooling, causal=causal)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, source_mask: Tensor | None
    ) -> Tensor:
        """One call of softmax attention for each scale; the causal form spells its softmax out."""
        attend = self.scaled.attend_causal if self.causal else self.scaled.attend
        return attend(q, mask, Source(k, v, source_mask), self.norm)

    def init_state(self, batch_size: int) -> KeyValueCache:
        """An empty cache."""
        self._check_causal()
        like = outputs_of(self.k_proj)
        return KeyValueCache.empty(batch_size, self.num_heads, self.head_dim, like)

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: KeyValueCache, mask: Tensor | None
    ) -> tuple[Tensor, KeyValueCache]:
        """Attend to the cache and to the new tokens up to each."""
        state = state.append(k, v, mask)
        return self.scaled.attend_causal(q, mask, Source(*state.read(q.dtype)), self.norm), state

    def extra_repr(self) -> str:
        """The sizes and choices, for printing."""
        return f"{super().extra_repr()}, scales={self.scaled.scales}, {self.scaled.pooling}"


def _check_causal_pooling(pooling: TokenPooling, *, causal: bool) -> None:
    """Raise where a causal layer asks for what only a set of tokens has."""
    if causal and pooling.grid is not None:
        raise ValueError(f"grid={pooling.grid} does not go with causal=True: an image has no past")
    if causal and pooling.num_prefix_tokens:
        raise ValueError(
            f"num_prefix_tokens={pooling.num_prefix_tokens} does not go with causal=True"
        )
