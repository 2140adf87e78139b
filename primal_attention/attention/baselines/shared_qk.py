"""Mechanisms whose keys are made of the queries, so that there is no key projection.

Letters: B batch, N tokens, H heads, C head dim.
"""

from typing import Any

from torch import Tensor

from primal_attention.attention.base.masks import Tokens
from primal_attention.attention.base.qkv import QKVAttention


class SharedQKAttention(QKVAttention):
    """The frame of :class:`QKVAttention` without ``k_proj``: ``attend`` gets k = q.

    Both sides come from the same tokens, hence there is no cross-attention.
    """

    def __init__(self, dim: int, num_heads: int, **options: Any):
        super().__init__(dim, num_heads, **options)
        del self.k_proj

    def _project(
        self, tokens: Tokens, source: Tokens, before: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, v = (
            projected.unflatten(-1, (self.num_heads, -1))
            for projected in (self.q_proj(tokens.x), self.v_proj(source.x))
        )
        return q, q, v
