"""Attention-BN+SH: heads at different scales, each normalised by the statistics of its own keys.

Letters: B batch, N tokens, T source tokens, H heads, C head dim.
"""

from collections.abc import Sequence

from primal_attention.attention.svr.batch_norm import KeyNorm
from primal_attention.attention.svr.softmax_sh import SoftmaxSHAttention


class SoftmaxBNSHAttention(SoftmaxSHAttention):
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

    mechanism = SoftmaxSHAttention.mechanism._replace(
        softmax_start={"beta": 0.0, "rescale": False, "learnable_beta": True}
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
        super().__init__(
            dim,
            num_heads,
            scales=scales,
            pool=pool,
            grid=grid,
            num_prefix_tokens=num_prefix_tokens,
            causal=causal,
            dropout=dropout,
            bias=bias,
        )
        self.norm = KeyNorm(
            num_heads, beta=beta, rescale=rescale, eps=eps, learnable=learnable_beta
        )
