"""The Primal layer with a learned time, under a name of its own."""

from primal_attention.attention.primal.layer import PrimalAttention
from primal_attention.feature_maps import FeatureMapSpec


class PrimalTimeAttention(PrimalAttention):
    r"""Primal-Attention whose kernel is weighted by a learned time.

    $\kappa(x_i, x_j) = e^{-|a_i - a_j|} \phi_q(x_i)^\top \phi_k(x_j)$, where $a$ grows at each
    token by a step that the head projects from it: the product with an Ornstein-Uhlenbeck kernel,
    whose rank the number of features does not bound. Scores are sums over the dual variables, in
    linear time; their norm and a gate replace the division by the number of tokens.

    The options are those of :class:`~primal_attention.attention.primal.PrimalAttention`, of which
    this class has other defaults.
    """

    mechanism = PrimalAttention.mechanism._replace(
        paper="Chen et al., 2023, with a learned time",
        causal_forms=({},),
        causal_patch={},
        cross=False,
    )

    def __init__(  # noqa: PLR0913 - each option is one of PrimalAttention
        self,
        dim: int,
        num_heads: int,
        num_directions: int = 32,
        *,
        decay: str = "learned",
        score_norm: bool = True,
        gate: bool = True,
        rotary: bool = False,
        feature_map: FeatureMapSpec = "unit_elu",
        causal: bool = False,
        scores: str = "both",
        dropout: float = 0.0,
        bias: bool = True,
    ):
        super().__init__(
            dim,
            num_heads,
            num_directions,
            weights="dual",
            decay=decay,
            score_norm=score_norm,
            gate=gate,
            rotary=rotary,
            feature_map=feature_map,
            causal=causal,
            scores=scores,
            dropout=dropout,
            bias=bias,
        )
