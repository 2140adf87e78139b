r"""Sparse Transformer: exact attention to a strided subset of the tokens.

Letters: B batch, N tokens, T tokens so far, H heads, C head dim, n or m blocks, l = stride tokens.
"""

from typing import Unpack

import torch
from einops import einsum
from torch import Tensor

from primal_attention.attention.base.card import Mechanism
from primal_attention.attention.base.compaction import token_order
from primal_attention.attention.base.qkv import Options
from primal_attention.attention.base.validation import check_sizes
from primal_attention.attention.baselines.blocks import (
    PatternAttention,
    Reach,
    into_blocks,
    windows,
)
from primal_attention.attention.baselines.softmax import softmax_attention
from primal_attention.precision import accumulate


class SparseAttention(PatternAttention):
    r"""Factorised attention with both factors merged into one head, Child et al. 2019.

    $y_i = \sum_{j \in A_i} softmax_j(q_i^\top k_j / \sqrt C)\, v_j$ with the union
    $A_i = A^{(1)}_i \cup A^{(2)}_i$ of two subsets, where i and j count the real tokens:
    $|i - j| \le l$, and every l-th token, $(i - j) \bmod l = 0$ (the strided pattern).

    Causal layers keep $j \le i$ of these, as in the paper, which has the causal form only. The cost
    N (l + N / l) is $N^{3/2}$ for a stride near $\sqrt N$.

    Args:
        stride: The stride l.
        **options: Those of :class:`QKVAttention`.
    """

    mechanism = Mechanism("Child et al., 2019", "N (l + N / l)", causal=True, decode="keys, values")
    shown = ("stride",)

    def __init__(self, dim: int, num_heads: int, *, stride: int = 128, **options: Unpack[Options]):
        super().__init__(dim, num_heads, **options)
        check_sizes(stride=stride)
        self.stride = stride

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, source_mask: Tensor | None
    ) -> Tensor:
        """Compute all pairs where they are within one stride, blocks of one stride otherwise."""
        N = q.shape[1]
        if self.stride >= N:
            return softmax_attention(q, k, v, mask, causal=self.causal)
        order = token_order(q, mask)
        q, k, v = (order.pack(z) for z in (q, k, v))
        out = self._attend_blocks(into_blocks(q, self.stride), k, v, order.real())
        return order.unpack(out[:, :N])

    def sees(self, i: Tensor, j: Tensor) -> Tensor:
        """Tell by the definition of the pattern."""
        return (i - j <= self.stride) | ((i - j) % self.stride == 0)

    def _attend_blocks(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        """The window, and in every block but the neighbours the token at the query's place.

        Two products under one softmax: each query has distant keys of its own.
        """
        length = self.stride
        near = windows(k, v, real, length, Reach(length, 0 if self.causal else length))
        k, v, real = (into_blocks(z, length) for z in (k, v, real))
        index = torch.arange(k.shape[1], device=k.device)
        distance = index[:, None] - index  # by how many blocks n comes after m, [n, m]
        far = (distance > 1) if self.causal else (distance.abs() > 1)  # [n, m]
        scores = torch.cat(
            [
                _scores(q, near.k, "b n l h c, b n m h c -> b h n l m", near.seen),
                _scores(q, k, "b n l h c, b m l h c -> b h n l m", real.mT[:, None] & far[:, None]),
            ],
            dim=-1,
        )
        sizes = [near.seen.shape[-1], k.shape[1]]
        weights, far_weights = torch.split(scores.softmax(-1).to(v.dtype), sizes, dim=-1)
        out = einsum(weights, near.v, "b h n l m, b n m h c -> b n l h c")
        out = out + einsum(far_weights, v, "b h n l m, b m l h c -> b n l h c")
        return out.flatten(1, 2)


def _scores(q: Tensor, k: Tensor, axes: str, seen: Tensor) -> Tensor:
    """Scores [B, H, n, l, m] in at least float32, the smallest number where a key is not seen."""
    scores = accumulate(einsum(q * q.shape[-1] ** -0.5, k, axes))
    return scores.masked_fill(~seen[:, None], torch.finfo(scores.dtype).min)
