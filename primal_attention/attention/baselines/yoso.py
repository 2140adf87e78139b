r"""YOSO: attention by the probability that a query and a key fall into one hash bucket.

Letters: B batch, N tokens, T source tokens, H heads, C head dim.
"""

import math
from typing import ClassVar, Unpack

from einops import einsum
from torch import Tensor

from primal_attention.attention.base.card import Mechanism
from primal_attention.attention.base.inputs import zero_padding
from primal_attention.attention.base.qkv import Options, QKVAttention
from primal_attention.attention.base.validation import check_sizes
from primal_attention.feature_maps import cosine
from primal_attention.precision import accumulate, exact


class YosoAttention(QKVAttention):
    r"""You Only Sample (Almost) Once, Zeng et al. 2021, in its expectation (YOSO-E).

    With unit queries and keys, a hash of $\tau$ random hyperplanes makes q and k collide with
    probability $w_{ij} = (1 - \arccos(q_i^\top k_j) / \pi)^\tau$. The output is the unit vector of
    $\sum_j w_{ij} v_j$. The paper also estimates the sum by hashing, in linear time; comparisons in
    the Primal-Attention paper are with the expectation.

    Gradients are the published lower bound, $\partial w_{ij} / \partial (q_i^\top k_j) =
    \frac{\tau}{2} w_{ij}$: the true derivative is infinite where q = k. The published depthwise
    convolution of the values is left out.

    Args:
        num_bits: Hyperplanes of a hash, the paper's tau.
        **options: Those of :class:`QKVAttention`, not ``causal``.
    """

    mechanism = Mechanism(
        "Zeng et al., 2021",
        "N^2",
        cross=True,
        no_matrix=lambda layer: (
            "outputs of yoso are unit vectors, not linear in the values: it has no matrix"
        ),
    )
    shown = ("num_bits",)
    contract_exemptions: ClassVar[dict[str, str]] = {
        "gradients": "the published lower bound; the derivative is infinite where q = k",
        "gradient graphs": "that lower bound is a constant to second derivatives",
    }

    def __init__(self, dim: int, num_heads: int, *, num_bits: int = 9, **options: Unpack[Options]):
        check_sizes(num_bits=num_bits)
        super().__init__(dim, num_heads, **options)
        self.num_bits = num_bits

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, source_mask: Tensor | None
    ) -> Tensor:
        """Sum over the keys and normalise the sum, in the accumulation dtype."""
        q_unit, k_unit = cosine(accumulate(q)), cosine(accumulate(k))
        values = zero_padding(accumulate(v), source_mask)
        total = _expected_sums(q_unit, k_unit, values, self.num_bits)
        return cosine(total).to(v.dtype)


@exact
def _expected_sums(q: Tensor, k: Tensor, v: Tensor, num_bits: int) -> Tensor:
    """The sums [B, N, H, C] over all keys, weighted by the probability of a collision."""
    product = einsum(q, k, "b n h c, b t h c -> b h n t")
    fixed = product.detach()
    weights = (1.0 - fixed.clamp(-1.0, 1.0).acos() / math.pi) ** num_bits
    weights = weights * (1.0 + num_bits / 2 * (product - fixed))  # the published gradient
    return einsum(weights, v, "b h n t, b t h c -> b n h c")
