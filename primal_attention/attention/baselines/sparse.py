r"""Sparse Transformer: exact attention to a strided or fixed subset of the tokens.

Letters: B batch, N tokens, T tokens so far, H heads, C head dim, n or m blocks, l = stride tokens.
"""

from typing import Unpack

import torch
from einops import einsum
from torch import Tensor

from primal_attention.attention.base.card import Mechanism
from primal_attention.attention.base.compaction import token_order
from primal_attention.attention.base.qkv import Options
from primal_attention.attention.base.validation import check_choice, check_sizes
from primal_attention.attention.baselines.blocks import (
    KeyBlocks,
    PatternAttention,
    Reach,
    attend_blocks,
    into_blocks,
    windows,
    with_common,
)
from primal_attention.attention.baselines.softmax import softmax_attention
from primal_attention.precision import accumulate


class SparseAttention(PatternAttention):
    r"""Factorised attention with both factors merged into one head, Child et al. 2019.

    $y_i = \sum_{j \in A_i} softmax_j(q_i^\top k_j / \sqrt C)\, v_j$ with the union
    $A_i = A^{(1)}_i \cup A^{(2)}_i$ of two subsets, where i and j count the real tokens:

    - strided: $|i - j| \le l$, and every l-th token, $(i - j) \bmod l = 0$;
    - fixed: the block of l tokens that i is in, $\lfloor i / l \rfloor = \lfloor j / l \rfloor$,
      and the last c tokens of every block, $j \bmod l \ge l - c$.

    Causal layers keep $j \le i$ of these, as in the paper, which has the causal form only. The cost
    N (l + N / l) is $N^{3/2}$ for a stride near $\sqrt N$.

    Args:
        pattern: "strided" (for images and audio) or "fixed" (for text).
        stride: The stride l.
        num_summary: Tokens c at the end of each block that all later ones see, at most ``stride``;
            for "fixed" only. A sixteenth of the stride if None, as in the paper.
        **options: Those of :class:`QKVAttention`.
    """

    mechanism = Mechanism(
        "Child et al., 2019",
        "N (l + N / l)",
        causal=True,
        decode="keys, values",
        fused="SDPA (fixed)",
    )
    shown = ("pattern", "stride", "num_summary")

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        pattern: str = "strided",
        stride: int = 128,
        num_summary: int | None = None,
        **options: Unpack[Options],
    ):
        super().__init__(dim, num_heads, **options)
        check_choice("pattern", pattern, ("strided", "fixed"))
        check_sizes(stride=stride, num_summary=num_summary)
        if num_summary is not None and pattern != "fixed":
            raise ValueError(f"num_summary={num_summary} goes with pattern='fixed' only")
        if num_summary is not None and num_summary > stride:
            raise ValueError(f"num_summary must be at most {stride=}, got {num_summary}")
        self.pattern, self.stride = pattern, stride
        self.num_summary = max(1, stride // 16) if num_summary is None else num_summary

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, source_mask: Tensor | None
    ) -> Tensor:
        """Compute all pairs where they are within one stride, blocks of one stride otherwise."""
        N = q.shape[1]
        if self.stride >= N:
            return softmax_attention(q, k, v, mask, causal=self.causal)
        order = token_order(q, mask)
        q, k, v = (order.pack(z) for z in (q, k, v))
        attend = self._attend_strided if self.pattern == "strided" else self._attend_fixed
        return order.unpack(attend(into_blocks(q, self.stride), k, v, order.real())[:, :N])

    def sees(self, i: Tensor, j: Tensor) -> Tensor:
        """Tell by the definition of the pattern."""
        if self.pattern == "strided":
            return (i - j <= self.stride) | ((i - j) % self.stride == 0)
        summary = j % self.stride >= self.stride - self.num_summary
        return (i // self.stride == j // self.stride) | summary

    def _attend_strided(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        """The window, and in every block but the neighbours the token at the query's place.

        Two products under one softmax: each query has distant keys of its own.
        """
        length = self.stride
        near = windows(k, v, real, length, Reach(length, 0 if self.causal else length))
        k, v, real = (into_blocks(z, length) for z in (k, v, real))
        distance = _distances(k)
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

    def _attend_fixed(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        """The block of the query, and the last tokens of the others."""
        k, v, real = (into_blocks(z, self.stride) for z in (k, v, real))
        inside = real[:, :, None].expand(-1, -1, self.stride, -1)
        own = KeyBlocks(k, v, inside.tril() if self.causal else inside)
        k, v, real = (z[:, :, -self.num_summary :].flatten(1, 2) for z in (k, v, real))
        other = (_distances(own.k) > 0) if self.causal else (_distances(own.k) != 0)
        other = other.repeat_interleave(self.num_summary, dim=1)  # [n, m c]
        seen = (real[:, None] & other)[:, :, None].expand(-1, -1, self.stride, -1)
        return attend_blocks(q, with_common(own, k, v, seen))


def _scores(q: Tensor, k: Tensor, axes: str, seen: Tensor) -> Tensor:
    """Scores [B, H, n, l, m] in at least float32, the smallest number where a key is not seen."""
    scores = accumulate(einsum(q * q.shape[-1] ** -0.5, k, axes))
    return scores.masked_fill(~seen[:, None], torch.finfo(scores.dtype).min)


def _distances(blocks: Tensor) -> Tensor:
    """By how many blocks n comes after m, [n, m]."""
    index = torch.arange(blocks.shape[1], device=blocks.device)
    return index[:, None] - index
